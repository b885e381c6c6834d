"""Write and read checkpoints: torch.distributed.checkpoint in safetensors files, so that loading executes no code.

    checkpoints/step_00000200/{*.safetensors, checkpoint.json}

A checkpoint is written under a temporary name, synced, then renamed, so it exists whole or not at all. It holds a dict
of tensors, `model.layers.0...` and `optimizer.layers.0....exp_avg`. A checkpoint with a file `pinned` is never deleted.
checkpoint.json has a checksum of each tensor and of itself, compared at every load (`checked_reader`). Older
checkpoints have none, and are read without a comparison. Several ranks write a checkpoint together, each its own
shards; any number of ranks can read it, each what it needs.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mxstudy.distributed import is_first, on_first_rank
from mxstudy.reader import ConfigError
from mxstudy.tracking.folder import CHECKPOINT, checkpoints_in, latest_checkpoint
from mxstudy.train.checked_reader import ChangedBytes, CheckedReader
from mxstudy.train.checksums import Checksums, checksums_of
from mxstudy.train.stream_writer import StreamWriter
from mxstudy.whole_files import replace_file, sync_file

ABOUT = "checkpoint.json"
PINNED = "pinned"


class CheckpointError(ConfigError):
    """Raised when a checkpoint could not be written or read; earlier checkpoints are untouched."""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run, which carry its config; a checkpoint with another fingerprint is refused."""

    folder: Path
    fingerprint: str
    config: dict[str, Any]
    keep_last: int

    def latest(self) -> Path | None:
        """Delete the unfinished checkpoints of killed processes, and return the newest checkpoint, or None.

        The run's own process calls it, on all ranks; all get the same result.
        """
        on_first_rank(lambda: self._clear(ignore_errors=True))
        return on_first_rank(self._newest)

    def save(self, step: int, tensors: dict[str, Tensor]) -> Path:
        """Write the state before `step`, then delete all but the newest `keep_last` and the pinned checkpoints.

        Returns the checkpoint's folder. All ranks must call it, each with its own shards of the tensors.
        """
        path = self.folder / f"{CHECKPOINT}{step:08d}"
        if on_first_rank(path.exists):
            return path  # a step that diverges may already have its checkpoint
        try:
            temporary = on_first_rank(lambda: self._begin(path))
            written = _save_tensors(temporary, tensors)
            with ThreadPoolExecutor(1) as thread:  # the disk writes while the checksums are computed
                flushed = thread.submit(lambda: _sync(temporary) if is_first() else None)
                checksums = checksums_of(written)
            on_first_rank(flushed.result)
            on_first_rank(lambda: self._finish(temporary, path, step, checksums))
        except (CheckpointException, OSError) as error:
            if is_first():
                self._clear(ignore_errors=True)
            kept = self._newest()
            stays = f"{kept} stays" if kept else "there is no earlier one"
            raise CheckpointError(f"{path}: could not be written ({_reason(error)}); {stays}") from error
        on_first_rank(self._drop_old)
        return path

    def _newest(self) -> Path | None:
        return latest_checkpoint(self.folder)

    def _begin(self, path: Path) -> Path:
        """Create and return an empty folder under the temporary name of an unfinished checkpoint."""
        self._clear()  # unfinished checkpoints of killed processes
        temporary = self.folder / f".{path.name}.{os.getpid()}"
        temporary.mkdir(parents=True)
        return temporary

    def _clear(self, ignore_errors: bool = False) -> None:
        for unfinished in self.folder.glob(f".{CHECKPOINT}*"):
            shutil.rmtree(unfinished, ignore_errors)

    def _finish(self, temporary: Path, path: Path, step: int, checksums: Checksums) -> None:
        about = {"step": step, "fingerprint": self.fingerprint, "config": self.config, "checksums": checksums}
        replace_file(temporary / ABOUT, json.dumps(about | {"checksum": checksum_of(about)}, indent=2))
        _sync(temporary)
        temporary.rename(path)
        sync_file(self.folder)

    def _drop_old(self) -> None:
        for old in checkpoints_in(self.folder)[: -self.keep_last]:
            if not (old / PINNED).exists():
                shutil.rmtree(old.rename(self.folder / f".{old.name}"))  # a kill in between leaves no half checkpoint

    def pin_latest(self) -> str | None:
        """Keep the newest checkpoint for good. Return its name, or None if there is none yet.

        Only one rank calls it. Raises OSError.
        """
        latest = self._newest()
        if latest is None:
            return None
        (latest / PINNED).touch()
        return latest.name

    def load(self, path: Path, tensors: dict[str, Tensor], older_lack: str | None = None) -> int:
        """Read a checkpoint of this run into `tensors`, in place, and return the next step to train.

        `older_lack`: how the names begin of tensors that older checkpoints do not have, and that then stay unchanged.
        """
        about = read_about(path)
        if about["fingerprint"] != self.fingerprint:
            raise CheckpointError(
                f"{path}: belongs to run {about['fingerprint'][:12]}, not {self.fingerprint[:12]}; move it back to its "
                "own run's folder"
            )
        if older_lack is not None:
            there = tensor_shapes(path)
            tensors = {key: x for key, x in tensors.items() if key in there or not key.startswith(older_lack)}
        _load_whole(path, about, tensors)
        return int(about["step"])


def load_weights(path: Path, model: nn.Module) -> int:
    """Read only the model's tensors, of any run's checkpoint, and return its next step. Raises CheckpointError."""
    about = read_about(path)
    _load_whole(path, about, model_tensors(model))
    return int(about["step"])


def _load_whole(path: Path, about: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Read the tensors in place, and compare them with their checksums, if it has any. Raises CheckpointError."""
    try:
        _load_tensors(path, tensors, about["checksums"])
    except (CheckpointException, ChangedBytes, OSError) as error:
        if isinstance(first := _first_of(error), ChangedBytes):
            what = f"{path}/{first} has other bytes than were written (its checksum differs)"
        else:
            what = f"{path}: truncated or unreadable ({_reason(error)})"
        raise CheckpointError(f"{what}; {_remedy(path)}") from error


def weight_shapes(path: Path) -> dict[str, torch.Size]:
    """Return {name: shape} of the tensors that `load_weights` reads. Raises CheckpointError."""
    shapes = tensor_shapes(path).items()
    return {name.removeprefix("model."): shape for name, shape in shapes if name.startswith("model.")}


def tensor_shapes(path: Path) -> dict[str, torch.Size]:
    """Return {name: shape} of a checkpoint's tensors, from the files' headers alone. Raises CheckpointError."""
    try:
        metadata = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{path}: truncated or unreadable ({_reason(error)}); {_remedy(path)}") from error
    return {name: tensor.size for name, tensor in metadata.items() if isinstance(tensor, TensorStorageMetadata)}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return {name: tensor} of a model's parameters and its buffers, the biases of routers."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {f"model.{name}": tensor.detach() for name, tensor in named}


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return {name: tensor} of all that training changes.

    An optimizer has no state before its first step; call `materialize_state` first.
    """
    tensors = model_tensors(model)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def read_about(path: Path) -> dict[str, Any]:
    """Return step, fingerprint, config and checksums (None if older) from checkpoint.json. Raises CheckpointError."""
    try:
        about = json.loads((path / ABOUT).read_text())
        is_older = "checksums" not in about and "checksum" not in about
        if not is_older and about.pop("checksum", None) != checksum_of(about):
            raise ValueError("it was changed after it was written: its checksum differs")
        return {key: about[key] for key in ("step", "fingerprint", "config")} | {"checksums": about.get("checksums")}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: no readable {ABOUT} ({error}); {_remedy(path)}") from error


def checksum_of(about: dict[str, Any]) -> str:
    """Return the checksum of a checkpoint's description of itself."""
    return xxhash.xxh3_128_hexdigest(json.dumps(about, sort_keys=True).encode())


def _remedy(path: Path) -> str:
    """Return which checkpoint can be used in place of a broken one."""
    before = [other.name for other in checkpoints_in(path.parent) if other.name < path.name]
    return f"delete that folder to use the one before it, {before[-1]}" if before else "there is none before it"


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[Path, dict[str, Tensor]]:
    """Write the tensors, and return what this rank has written into which file."""
    writer = StreamWriter(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns when it runs without a process group
        dcp.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
    return writer.written


def _load_tensors(path: Path, tensors: dict[str, Tensor], checksums: Checksums | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = CheckedReader(path, checksums) if checksums else HuggingFaceStorageReader(str(path))
        dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())


def _sync(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        sync_file(path)


def _reason(error: BaseException) -> str:
    """Return the first line of the error, or of the first failure that DCP wraps together with its traceback."""
    first = _first_of(error)
    return f"{type(first).__name__}: {str(first).strip()}".splitlines()[0]


def _first_of(error: BaseException) -> BaseException:
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error

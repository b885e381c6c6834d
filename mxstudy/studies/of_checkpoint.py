"""What the studies of a trained model share: which model that is, and where what was found out about it goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mxstudy.config import OfCheckpoint
from mxstudy.evaluation import checkpoints
from mxstudy.evaluation.checkpoints import Trained
from mxstudy.evaluation.pool import Pool, devices_of
from mxstudy.evaluation.scorer import Scorer
from mxstudy.model.backends import backends_of
from mxstudy.model.precision import describe
from mxstudy.studies.ending import end_mirrored
from mxstudy.tracking.arms import all_backends
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.journal import Journal, Row, read_journal
from mxstudy.tracking.mlflow import add_rows
from mxstudy.train.runtime import configure_torch, resolve_device


def pinned(config: Any) -> Any:
    """With the checkpoint's folder for its name: what a run's newest is, training or a retry may change."""
    return replace(config, checkpoint=str(checkpoints.find(config.checkpoint, Path(config.runs_dir))))


def described(config: OfCheckpoint) -> tuple[Path, Trained]:
    """Where the checkpoint is, and what it is, with what was asked for in place of what it was trained in."""
    path = checkpoints.find(config.checkpoint, Path(config.runs_dir))
    trained = checkpoints.describe(path)
    asked = {name: getattr(config, name) for name in ("norm", "precision", "compute")}
    return path, replace(trained, **{name: value for name, value in asked.items() if value is not None})


def identity_of(config: OfCheckpoint, **asked: Any) -> tuple[str, dict[str, Any]]:
    """What a fingerprint has beside the config: the kind of device; the checkpoint, and what it is `asked`."""
    path = checkpoints.find(config.checkpoint, Path(config.runs_dir))
    return resolve_device(config.device, "device").type, {"checkpoint": checkpoints.identity(path), **asked}


# The backends of what `check_model` has built.
_built: dict[str, str | None] = {}


def check_model(config: OfCheckpoint) -> Trained:
    """The checkpoint that there is, and that norm, precision and as many devices can be had; else ConfigError."""
    device, trained = resolve_device(config.device, "device"), described(config)[1]
    model = checkpoints.build(trained, device)
    _built[built_key(config)] = all_backends(backends_of(model).values())
    devices_of(device, config.processes)
    return trained


def backend(config: OfCheckpoint) -> str | None:
    """Return the backends of the model's blocks, where and as it is asked. Raises ConfigError as `check_model`."""
    key = built_key(config)
    if key not in _built:
        check_model(config)
    return _built[key]


def built_key(config: OfCheckpoint) -> str:
    """Return what decides the model that is built, and where."""
    path, device = checkpoints.find(config.checkpoint, Path(config.runs_dir)), resolve_device(config.device, "device")
    return repr((path, config.norm, config.precision, config.compute, device))


def plan_of(config: OfCheckpoint, trained: Trained) -> tuple[str, Row]:
    """Return the plan as applied to the model that is asked: to be read, and as a journal has it."""
    device = resolve_device(config.device, "device")
    model = checkpoints.build(trained, device)
    rows = checkpoints.set_precision(model, trained, device)
    return describe(model, rows, forward_only=True), {"precision": rows, "backends": backends_of(model)}


@contextmanager
def scoring(config: OfCheckpoint, path: Path, trained: Trained, tokens_per_batch: int) -> Iterator[Scorer]:
    """What scores requests, in this process or in several, on devices that are named as it begins."""
    devices = devices_of(resolve_device(config.device, "device"), config.processes)
    configure_torch()
    print(f"{trained.name} on {', '.join(map(str, devices))}: {checkpoints.title(trained)}")
    print(plan_of(config, trained)[0], flush=True)
    if len(devices) == 1:
        yield Scorer(checkpoints.load(path, trained, devices[0]), trained.max_length, tokens_per_batch)
        return
    pool = Pool(path, trained, devices, tokens_per_batch)
    try:
        yield pool
    finally:
        pool.close()


def write_journal(
    config: OfCheckpoint, folder: RunFolder, path: Path, trained: Trained, probe: str, values: Mapping[str, float]
) -> None:
    """Write two rows, at the step of the checkpoint in `path`, in place of what the journal had: plan, and values."""
    folder.journal_path.unlink(missing_ok=True)
    step, journal = checkpoints.step_of(path), Journal(folder.journal_path)
    journal.write({"step": step} | plan_of(config, trained)[1])
    journal.write({"step": step, "probe": probe, "values": dict(values)})
    journal.close()


def finish(config: OfCheckpoint, folder: RunFolder, label: str) -> None:
    """The run has finished: it is mirrored, and so is, beside its training, what the model is as it was trained."""
    end_mirrored(config, folder, label, partial(tell_training_run, config, folder))


def tell_training_run(config: OfCheckpoint, folder: RunFolder) -> str | None:
    """The journal's row once more, beside the losses of the run that it is of, where the store has that run.

    Of the model as it was trained: not with another norm or precision. What it has already is there once. Returns None,
    or in one line why it could not be told.
    """
    as_trained = (config.norm, config.precision, config.compute) == (None, None, None)
    trained_in = RunFolder(checkpoints.find(config.checkpoint, Path(config.runs_dir)).parent.parent)
    if not as_trained or config.tracking.uri is None or not trained_in.status_path.exists():
        return None
    return add_rows(config.tracking.uri, trained_in, read_journal(folder.journal_path))

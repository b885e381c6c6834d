"""A checkpoint by whatever names it, what it says of itself, and its decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mxstudy import config
from mxstudy.config import read_run
from mxstudy.config.model import BLOCKS
from mxstudy.data.hashes import sha256_once
from mxstudy.data.tokenizer import Tokenizer, load_pretrained
from mxstudy.evaluation import hugging_face
from mxstudy.model.decoder import Decoder
from mxstudy.model.precision import DTYPES, apply_precision
from mxstudy.reader import ConfigError, read, require
from mxstudy.tracking.folder import CHECKPOINT, RunFolder, named_run
from mxstudy.train.checkpoint import load_weights, read_about, weight_shapes


@dataclass(frozen=True)
class Trained:
    """What a checkpoint says of itself. `max_length`: of the sequences that it was trained on, in tokens.

    `shapes`: of the weights that it holds, by our names. `data`: what it was trained on; None where nothing says.
    `seed`: what its random signs are drawn by.
    """

    name: str
    model: config.Decoder
    norm: config.Norm
    precision: config.Precision
    compute: str
    tokenizer: Tokenizer
    max_length: int
    shapes: Mapping[str, torch.Size]
    data: config.Data | None
    seed: int = 0


def find(text: str, runs_dir: Path) -> Path:
    """The folder of a checkpoint, native or Hugging Face's.

    `text`: that folder, a run's folder, a fingerprint or its beginning, or an MLflow run id; of a run its newest
    checkpoint. Raises ConfigError for what names none.
    """
    path = Path(text)
    if (path / "checkpoint.json").is_file() or (path / "config.json").is_file():
        return path
    require(
        not path.exists() or (path / "status.json").is_file(),
        f"checkpoint: {path} is neither a run's folder, nor a checkpoint's, nor a Hugging Face model's",
    )
    return newest(named_run(text, runs_dir, "checkpoint"))


def newest(run: RunFolder) -> Path:
    latest = max(run.checkpoints.glob(f"{CHECKPOINT}*"), default=None)
    if latest is None:
        raise ConfigError(f"checkpoint: {run.path} has none yet; it is {run.status().state}")
    return latest


def describe(path: Path) -> Trained:
    """Of a folder that `find` found; of its weights the headers alone are read.

    Raises ConfigError for a tokenizer that is missing or does not fit, and for files that cannot be read.
    """
    trained = (native if (path / "checkpoint.json").is_file() else foreign)(path)
    ids, rows = trained.tokenizer.vocab_size, trained.model.vocab_size
    require(ids <= rows, f"checkpoint: the tokenizer of {trained.name} has {ids} ids, its embedding {rows}")
    return trained


def native(path: Path) -> Trained:
    run, about = RunFolder(path.parent.parent), read_about(path)
    trained = read_run(about["config"])
    if not isinstance(trained, config.Pretrain):
        raise ConfigError(f"checkpoint: {path} is of a study {about['config']['study']!r}, which trains no decoder")
    tokenizer = tokenizer_of(run.tokenizer_path, getattr(trained.tokenizer, "eos_token", None))
    name = f"{about['fingerprint'][:12]}/{path.name}"
    length, compute = trained.train.sequence_length, trained.train.compute
    model, norm, precision, shapes = trained.model, trained.norm, trained.precision, weight_shapes(path)
    return Trained(name, model, norm, precision, compute, tokenizer, length, shapes, trained.data, trained.seed)


def foreign(path: Path) -> Trained:
    """A Hugging Face Llama, in bf16.

    Its `torch_dtype` is not asked: it is what the weights are stored in, FP32 often, and not what was computed in.
    """
    model, norm, length = hugging_face.read_config(path)
    plan = read(config.Precision, {"schedule": [{"plan": {BLOCKS: "bf16"}}]})
    tokenizer = tokenizer_of(path / "tokenizer.json", hugging_face.read_eos(path))
    stored = hugging_face.from_hugging_face(hugging_face.read_state(path, hugging_face.headers), model)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    return Trained(path.name, model, norm, plan, "bf16", tokenizer, length, shapes, None)


def tokenizer_of(path: Path, eos_token: str | None) -> Tokenizer:
    require(path.is_file(), f"checkpoint: its tokenizer is missing: {path}")
    return load_pretrained(read(config.Pretrained, {"name": str(path), "eos_token": eos_token}))


def identity(path: Path) -> dict[str, Any]:
    """What names that model in a fingerprint: the run, when it was begun, and the step; or the files.

    Weights are too large to be read for it: their files' sizes and times stand for them.
    """
    if (path / "checkpoint.json").is_file():
        about, status = read_about(path), RunFolder(path.parent.parent).status()
        return {"run": about["fingerprint"], "started_s": status.started_s, "step": about["step"]}
    files = [(file.name, file.stat()) for file in sorted(path.glob("*.safetensors"))]
    weights = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in files}
    return weights | {name: sha256_once(path / name) for name in hugging_face.SAYS if (path / name).is_file()}


def step_of(path: Path) -> int:
    """The training step that comes next; 0 of a Hugging Face model, which does not say."""
    return int(read_about(path)["step"]) if (path / "checkpoint.json").is_file() else 0


def title(trained: Trained) -> str:
    """What it is asked in: 'mxnorm p=2, mxfp8, compute bf16'."""
    p, folded = getattr(trained.norm, "p", None), getattr(trained.norm, "fold_gain", False)
    norm = trained.norm.kind + (f" p={p:g}" if p else "") + (" folded" if folded else "")
    rows = dict.fromkeys(trained.precision.schedule[-1].plan.values())
    return ", ".join([norm, *rows, f"compute {trained.compute}"])


def build(trained: Trained, device: torch.device) -> Decoder:
    """The decoder without weights, on the meta device, with the formats that it is going to have on `device`.

    Raises ConfigError for a norm and a precision that do not fit each other, or the weights that there are.
    """
    with torch.device("meta"):
        model = Decoder(trained.model, trained.norm, trained.precision.settings, DTYPES[trained.compute])
    set_precision(model, trained, device)
    check_weights(model, trained)
    return model


def set_precision(model: Decoder, trained: Trained, device: torch.device) -> dict[str, str]:
    """Set casts and backends to those of the schedule's last row, as a model is asked (`for_evaluation`).

    Returns {module name: recipe}.
    """
    last, seeds = trained.precision.schedule[-1].from_step, (trained.seed,)
    return apply_precision(model, trained.precision, last, trained.compute, device, seeds, evaluates=True)


def check_weights(model: Decoder, trained: Trained) -> None:
    """That each parameter has a weight of its shape, and no weight is left over."""
    wanted, found = {name: parameter.shape for name, parameter in model.named_parameters()}, trained.shapes
    for name in sorted(wanted.keys() & found.keys()):
        there, asked = tuple(found[name]), tuple(wanted[name])
        require(there == asked, f"checkpoint: {name} of {trained.name} is {there}, and by its config {asked}")
    kind = trained.norm.kind
    for names, problem in (
        (sorted(found.keys() - wanted.keys()), f"has, and {kind} does not take,"),
        (sorted(wanted.keys() - found.keys()), f"does not have, and {kind} needs,"),
    ):
        of_norms = all("norm." in name for name in names)
        key, remedy = ("norm", "; norm=as_trained fits it") if of_norms else ("checkpoint", "")
        some = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
        require(not names, f"{key}: {trained.name} {problem} {some}{remedy}")


def load(path: Path, trained: Trained, device: torch.device) -> Decoder:
    """The decoder with a checkpoint's weights, in the norm and the precision that `trained` has by now.

    A gain is a gain, whatever its norm divides by: the norm may be another one than the weights were trained with, if
    it has the same parameters. Raises ConfigError and CheckpointError.
    """
    model = build(trained, device).to_empty(device=device)
    set_precision(model, trained, device)  # once more: what it draws by has to be on the device
    if (path / "checkpoint.json").is_file():
        load_weights(path, model)
    else:
        model.load_state_dict(hugging_face.from_hugging_face(hugging_face.read_state(path), trained.model))
    return model.eval()

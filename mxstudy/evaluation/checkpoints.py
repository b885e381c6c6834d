"""Find a checkpoint, describe it, and load it as a decoder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mxstudy import config
from mxstudy.config import read_run
from mxstudy.config.precision_plan import BLOCKS
from mxstudy.data.blends import manifests_in
from mxstudy.data.content_hash import sha256_once
from mxstudy.data.tokenizer import Tokenizer, load_pretrained
from mxstudy.evaluation import hugging_face
from mxstudy.model.decoder import Decoder
from mxstudy.model.precision import DTYPES, apply_precision
from mxstudy.reader import ConfigError, read, require
from mxstudy.small_files import read_json
from mxstudy.tracking.folder import MOVE_AWAY, RunFolder, latest_checkpoint
from mxstudy.tracking.named_runs import named_run
from mxstudy.train.checkpoint import load_weights, read_about, weight_shapes


@dataclass(frozen=True)
class Trained:
    """The description of a checkpoint. `max_length`: tokens of the sequences that it was trained on.

    `model`: without the dropout of a training, so that all models are evaluated by the same backends.
    `shapes`: shapes of its weights, under our names. `data`: the data that it was trained on; None if unknown.
    `seed`: the seed of its random signs. `corpora`: the identities of the corpora in the shards of its training.
    """

    name: str
    model: config.Decoder
    norm: config.Norm
    precision: config.Precision
    compute: str
    tokenizer: Tokenizer
    max_length: int
    shapes: Mapping[str, torch.Size]
    data: config.TrainingData | None
    seed: int = 0
    corpora: tuple[Mapping[str, Any], ...] = ()


def find(text: str, runs_dir: Path) -> Path:
    """Return the folder of a checkpoint, native or in Hugging Face's format.

    `text`: that folder, or a run by its folder, its fingerprint or a prefix of it, or its MLflow run id; a run stands
    for its newest checkpoint. Raises ConfigError if `text` names no checkpoint.
    """
    path = Path(text)
    if any(os.path.isfile(path / name) for name in ("checkpoint.json", "config.json")):
        return path
    require(
        not os.path.exists(path) or (path / "status.json").is_file(),
        f"checkpoint: {path} is neither the folder of a run, nor of a checkpoint, nor of a Hugging Face model",
    )
    return newest(named_run(text, runs_dir, "checkpoint"))


def newest(run: RunFolder) -> Path:
    latest = latest_checkpoint(run.checkpoints)
    if latest is None:
        raise ConfigError(f"checkpoint: the run {run.path} has none yet; its state is {run.status().state}")
    return latest


def describe(path: Path) -> Trained:
    """Return the description of the checkpoint in a folder that `find` returned, reading only headers of the weights.

    Raises ConfigError if the tokenizer is missing or does not fit, or if a file cannot be read.
    """
    trained = (native if (path / "checkpoint.json").is_file() else foreign)(path)
    ids, rows = trained.tokenizer.vocab_size, trained.model.vocab_size
    require(ids <= rows, f"checkpoint: the tokenizer of {trained.name} has {ids} ids, but its embedding {rows} rows")
    return trained


def native(path: Path) -> Trained:
    run, about = RunFolder(path.parent.parent), read_about(path)
    trained = read_run(about["config"])
    if not isinstance(trained, config.Pretrain):
        raise ConfigError(f"checkpoint: {path} is of study {about['config']['study']!r}, which trains no decoder")
    own_eos = trained.tokenizer.eos_token if isinstance(trained.tokenizer, config.Pretrained) else None
    tokenizer = tokenizer_of(run.tokenizer_path, own_eos)
    name = f"{about['fingerprint'][:12]}/{path.name}"
    length, compute = trained.train.sequence_length, trained.train.compute
    model, shapes = replace(trained.model, dropout=0.0), weight_shapes(path)
    norm, precision = trained.norm, trained.precision
    data, seed, corpora = trained.data, trained.seed, corpora_of(run)
    return Trained(name, model, norm, precision, compute, tokenizer, length, shapes, data, seed, corpora)


def corpora_of(run: RunFolder) -> tuple[Mapping[str, Any], ...]:
    """Return the identities of the corpora that a run was trained on, or () if its shards.json is missing."""
    path = run.path / "shards.json"
    manifests = manifests_in(read_json(path, MOVE_AWAY)) if path.exists() else []
    return tuple(manifest["corpus"] for manifest in manifests)


def foreign(path: Path) -> Trained:
    """Return the description of a Hugging Face model, to be computed in bf16.

    Its `torch_dtype` is ignored: it is the dtype in which the weights are stored, often FP32, not the compute dtype.
    """
    model, norm, length = hugging_face.read_config(path)
    plan = read(config.Precision, {"schedule": [{"plan": {BLOCKS: "bf16"}}]})
    tokenizer = tokenizer_of(path / "tokenizer.json", hugging_face.read_eos(path))
    stored = hugging_face.from_hugging_face(hugging_face.read_state(path, hugging_face.headers), model)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    return Trained(path.name, model, norm, plan, "bf16", tokenizer, length, shapes, None)


def tokenizer_of(path: Path, eos_token: str | None) -> Tokenizer:
    require(
        path.is_file(), f"checkpoint: its tokenizer is missing: {path}; copy the tokenizer.json of its training there"
    )
    return load_pretrained(read(config.Pretrained, {"name": str(path), "eos_token": eos_token}))


def identity(path: Path) -> dict[str, Any]:
    """Return what identifies the model in a fingerprint: run, start time and step; or the files of a foreign model.

    Weights are too large to be hashed here: sizes and modification times of their files stand for them.
    """
    if (path / "checkpoint.json").is_file():
        about, status = read_about(path), RunFolder(path.parent.parent).status()
        return {"run": about["fingerprint"], "started_s": status.started_s, "step": about["step"]}
    files = [(file.name, file.stat()) for file in sorted(path.glob("*.safetensors"))]
    weights = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in files}
    return weights | {name: sha256_once(path / name) for name in hugging_face.SAYS if (path / name).is_file()}


def step_of(path: Path) -> int:
    """Return the next training step, or 0 for a Hugging Face model, which does not record it."""
    return int(read_about(path)["step"]) if (path / "checkpoint.json").is_file() else 0


def title(trained: Trained) -> str:
    """Return how the model is evaluated: 'mxnorm p=2, mxfp8, compute bf16'."""
    norm, rows = trained.norm, dict.fromkeys(trained.precision.schedule[-1].plan.values())
    p = f" p={norm.p:g}" if isinstance(norm, config.MXNorm) else ""
    folded = " folded" if isinstance(norm, config.RMSNorm) and norm.fold_gain else ""
    return ", ".join([f"{norm.kind}{p}{folded}", *rows, f"compute {trained.compute}"])


def build(trained: Trained, device: torch.device) -> Decoder:
    """Return the decoder without weights, on the meta device, with the formats that it will have on `device`.

    Raises ConfigError if norm and precision do not fit each other or the checkpoint's weights.
    """
    with torch.device("meta"):
        model = Decoder(trained.model, trained.norm, trained.precision.settings, DTYPES[trained.compute])
    set_precision(model, trained, device)
    check_weights(model, trained)
    return model


def set_precision(model: Decoder, trained: Trained, device: torch.device) -> dict[str, str]:
    """Set casts and backends to those of the schedule's last row, as for every evaluation (`for_evaluation`).

    Returns {module name: recipe}.
    """
    last, seeds = trained.precision.schedule[-1].from_step, (trained.seed,)
    return apply_precision(model, trained.precision, last, trained.compute, device, seeds, evaluates=True)


def check_weights(model: Decoder, trained: Trained) -> None:
    """Raise ConfigError unless each of the model's tensors has a weight of its shape and no weight is left over."""
    named = (*model.named_parameters(), *model.named_buffers())
    wanted, found = {name: tensor.shape for name, tensor in named}, trained.shapes
    for name in sorted(wanted.keys() & found.keys()):
        there, asked = tuple(found[name]), tuple(wanted[name])
        require(there == asked, f"checkpoint: {name} of {trained.name} is {there}, but {asked} by its config")
    kind = trained.norm.kind
    for names, problem in (
        (sorted(found.keys() - wanted.keys()), f"has weights that {kind} does not take:"),
        (sorted(wanted.keys() - found.keys()), f"lacks weights that {kind} needs:"),
    ):
        of_norms = all("norm." in name for name in names)
        key, remedy = ("norm", "; norm=as_trained fits it") if of_norms else ("checkpoint", "")
        some = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
        require(not names, f"{key}: {trained.name} {problem} {some}{remedy}")


def load(path: Path, trained: Trained, device: torch.device) -> Decoder:
    """Return the decoder with a checkpoint's weights, in the norm and the precision of `trained`.

    These may differ from those in training: any norm with the same parameters can take the weights, as a gain means
    the same whatever the norm divides by. Raises ConfigError and CheckpointError.
    """
    model = build(trained, device).to_empty(device=device)
    set_precision(model, trained, device)  # again, because its random seeds have to be on the device
    if (path / "checkpoint.json").is_file():
        load_weights(path, model)
    else:
        model.load_state_dict(hugging_face.from_hugging_face(hugging_face.read_state(path), trained.model))
    return model.eval()

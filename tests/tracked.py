"""Make run folders with journals in them, without training anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mxstudy.config import read_run
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.journal import Journal
from mxstudy.tracking.provenance import provenance

FINGERPRINT = "0123456789abcdef" * 4
CONFIG: dict[str, Any] = {
    "study": "pretrain",
    "experiment": "quick",
    "model": dict.fromkeys(("hidden_size", "ffn_size", "vocab_size"), 64)
    | dict.fromkeys(("num_layers", "num_heads", "num_kv_heads"), 1),
    "norm": {"kind": "mxnorm", "p": 2.0},
    "precision": {"schedule": [{"plan": {"layers.*": "mxfp8"}}]},
    "data": {"kind": "pysource"},
    "tokenizer": {"kind": "bytes"},
    "optimizer": {"lr": 1e-3, "max_grad_norm": float("inf")},
    "schedule": {"kind": "cosine"},
    "train": {"steps": 10, "batch_size": 1, "sequence_length": 32},
}


def make_folder(runs: Path, fingerprint: str = FINGERPRINT, label: str = "norm=mxnorm_p2", **values: Any) -> RunFolder:
    choices = dict(word.split("=") for word in label.split())
    origin = {"label": label, "choices": choices, "overrides": label.split()}
    config = read_run(values if "study" in values else CONFIG | values)
    return RunFolder.create(runs / config.experiment / fingerprint[:12], config, fingerprint, provenance() | origin)


def training_row(step: int, loss: float | None = None) -> dict[str, Any]:
    loss = 5.0 - 0.1 * step if loss is None else loss
    return {"step": step, "tokens": 32 * (step + 1), "loss": loss, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 100.0}


def write_rows(folder: RunFolder, rows: list[dict[str, Any]], resumed_from: int | None = None) -> None:
    journal = Journal(folder.journal_path)
    if resumed_from is not None:
        journal.resumed_from(resumed_from)
    for row in rows:
        journal.write(row)
    journal.close()

"""Train stacks of students that are small enough for a test, through the study's own `run`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from mxstudy.config import StudentTeacher, fingerprint, read_run
from mxstudy.students import study as checks
from mxstudy.students import train as student_teacher
from mxstudy.tracking.columnar_journal import read_columns
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.provenance import provenance

CHANGE = 10  # the step at which the precision changes
VALUES: dict[str, Any] = {
    "study": "student_teacher",
    "experiment": "small",
    "seeds": [0, 1],
    "lrs": [1e-3],
    "model": {"kind": "residual_mlp", "hidden_size": 32, "num_layers": 2},
    "norm": {"kind": "layernorm", "bias": True},
    "precision": {
        "schedule": [{"plan": {"layers.*": "mxfp8"}}, {"from_step": CHANGE, "plan": {"layers.*": "mxfp8_forward_only"}}]
    },
    "student": {"gain": "mx", "vector_ops": "bf16"},
    "teacher": {"kind": "paper"},
    "optimizer": {"kind": "adam"},
    "schedule": {"kind": "cosine", "warmup_fraction": 0.0},
    "train": {"steps": 24, "batch_size": 32, "device": "cpu", "compile": False},
    "checkpoint": {"every_steps": 8},
    "tracking": {"uri": None},
}


def configured(**dotted: Any) -> StudentTeacher:
    """Return VALUES with `model__num_layers=3` set as model.num_layers."""
    values = copy.deepcopy(VALUES)
    for key, value in dotted.items():
        *parents, last = key.split("__")
        node = values
        for parent in parents:
            node = node[parent]
        node[last] = value
    config = read_run(values)
    assert isinstance(config, StudentTeacher)
    return config


def make(path: Path, config: StudentTeacher, label: str = "arm") -> RunFolder:
    digest = fingerprint(config, *checks.STUDY.identity(config))
    folder = path / "runs" / config.experiment / digest[:12]
    return RunFolder.create(folder, config, digest, provenance() | {"label": label, "choices": {}})


def trained(path: Path, **dotted: Any) -> RunFolder:
    """Train a run to its end, whatever that is."""
    config = configured(**dotted)
    folder = make(path, config)
    student_teacher.run(config, folder, "arm")
    return folder


def columns(folder: RunFolder) -> np.ndarray:
    """Return the columns, [steps, 2, S]."""
    config: Any = folder.config()
    return read_columns(folder.columns, len(config.replicas))


def newest(folder: RunFolder) -> tuple[str, dict[str, torch.Tensor]]:
    """Return name and tensors of the newest checkpoint."""
    path = max(folder.checkpoints.iterdir())
    (file,) = path.glob("*.safetensors")
    return path.name, load_file(file)


def same_bits(one: RunFolder, other: RunFolder) -> bool:
    """Return whether columns and newest checkpoints have equal bits, NaN for NaN."""
    (name, ours), (other_name, theirs) = newest(one), newest(other)
    alike = ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    return name == other_name and alike and columns(one).tobytes() == columns(other).tobytes()

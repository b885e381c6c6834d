"""Provide a kind of run that trains nothing, and the composed jobs for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mxstudy.config import Pretrain
from mxstudy.launch.claiming import claim
from mxstudy.launch.composed import Composed
from mxstudy.launch.job import Job
from mxstudy.reader import ConfigError, changed
from mxstudy.studies.pretrain.study import PretrainStudy
from mxstudy.studies.protocol import Study, Uses, on_planned_device, unused_messages
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_parent import Summary

Outcome = Callable[[RunFolder], str]


class FakeStudy(Study[Pretrain]):
    """Replaces mxstudy.studies.pretrain. The label of a job decides what it does."""

    uses = Uses.TASK_EACH
    watched = PretrainStudy.watched
    changed_questions = PretrainStudy.changed_questions

    def __init__(self) -> None:
        self.invalid: set[int] = set()  # seeds that check() refuses
        self.outcomes: dict[str, Outcome] = {}  # by label; a job without one finishes
        self.identified: list[Any] = []
        self.ran: list[str] = []
        self.summarized: list[tuple[str, str]] = []  # name and state
        self.baseline: Mapping[str, str] = {}

    def check(self, config: Any, ranks: int = 1) -> None:
        if config.seed in self.invalid:
            raise ConfigError(f"seed: {config.seed} is unlucky")

    def pinned(self, config: Any) -> Any:
        return changed(config, train=on_planned_device(config.train))

    def check_watched(self, config: Any) -> None:
        PretrainStudy().check_watched(config)

    def unused_settings(self, config: Any) -> dict[str, str]:
        return unused_messages(config.precision, config.norm, config.precision.gain)

    def identity_key(self, config: Any) -> Any:
        return config.data

    def identity(self, config: Any) -> tuple[str, dict[str, Any]]:
        self.identified.append(config.data)
        return "cpu", {"data": repr(config.data)}

    def run(self, config: Any, folder: RunFolder, label: str) -> str:
        self.ran.append(label)
        folder.update(state="running", steps=config.train.steps, reason=None)
        state = self.outcomes.get(label, lambda _: "finished")(folder)
        folder.update(state=state)
        return state

    def summarise(self, runs: Mapping[str, RunFolder], baseline: Mapping[str, str]) -> Summary:
        self.summarized += [(name, folder.status().state) for name, folder in runs.items()]
        self.baseline = baseline
        return Summary(f"{len(runs)} arms")


def composed(runs: Path, *overrides: str, **values: Any) -> Composed:
    """Return one job whose config has the given root values."""
    plain: dict[str, Any] = {
        "study": "pretrain",
        "experiment": "quick",
        "runs_dir": str(runs),
        "model": dict.fromkeys(("hidden_size", "ffn_size", "vocab_size"), 64)
        | dict.fromkeys(("num_layers", "num_heads", "num_kv_heads"), 1),
        "norm": {"kind": "rmsnorm"},
        "precision": {"schedule": [{"plan": {"layers.*": "bf16"}}]},
        "data": {"kind": "pysource"},
        "tokenizer": {"kind": "bytes"},
        "optimizer": {"lr": 1e-3},
        "schedule": {"kind": "cosine"},
        "train": {"steps": 10, "batch_size": 1, "sequence_length": 32},
        "tracking": {"uri": None},
    }
    return Composed(overrides, {"experiment": values.get("experiment", "quick"), "norm": "rmsnorm"}, plain | values)


def seeds(runs: Path, *numbers: int, **values: Any) -> list[Composed]:
    return [composed(runs, "+experiment=quick", f"seed={n}", seed=n, **values) for n in numbers]


def existing(jobs: list[Job], **status: object) -> RunFolder:
    folder = claim(jobs[0])
    folder.update(**status)
    return folder


def without(one: Composed, error: str) -> Composed:
    return dataclasses.replace(one, values=ConfigError(error))

"""Define the kinds of command that `benchmarks.soak` disturbs, and collect what disturbances must not change."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

from mxstudy.config import StudentTeacher
from mxstudy.tracking.columnar_journal import read_columns
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.found_runs import find_runs
from mxstudy.tracking.journal import read_journal
from mxstudy.train.checksums import HEADER

Left = dict[str, str]  # {what was left: its sha256 or its text}

CLOCK = ("time_s", "tokens_per_s", "steps_per_s", "mfu", "memory_gib")
PRETRAIN = (
    *("+experiment=quickstart", "precision=mxfp8", "norm=mxnorm_p2", "train.steps=24", "train.batch_size=2"),
    *("train.sequence_length=64", "model.hidden_size=32", "model.ffn_size=64", "model.num_layers=1"),
    *("model.num_heads=2", "model.num_kv_heads=1", "checkpoint.every_steps=4", "validation.every_steps=8"),
    *("validation.sequences=2", "data.validation_fraction=0.2", "data=text", "tokenizer=bytes"),
    *("train.deterministic=true", "train.compile=false", "cache_dir=cache"),
)
STACK = ("+experiment=student_teacher", "+debug=tiny", "runs_dir=runs", "train.steps=60", "checkpoint.every_steps=10")
PREPARE = ("+experiment=prepare_data", "data=text", "tokenizer=bytes", "workers=1", "cache_dir=cache")
EVALUATE = ("+experiment=olmes", "evaluation.tasks=[arc_easy,boolq]")
LOCAL = ("hydra/launcher=local", "hydra.launcher.cpus_per_task=1", "wait=true")


class Inputs:
    """What the commands read, in a folder that nothing disturbs: two corpora, questions, and a trained model."""

    def __init__(self, folder: Path) -> None:
        self.folder, draw = folder, random.Random(0)
        for name, documents in (("small", 40), ("large", 1200)):
            (folder / name).mkdir()
            for number in range(documents):
                words = " ".join(f"w{draw.randrange(97)}" for _ in range(60))
                (folder / name / f"{number:04}.txt").write_text(words)
        choices = {"text": ["ice", "rock", "air"], "label": ["A", "B", "C"]}
        arc = [{"question": f"What is {n}?", "choices": choices, "answerKey": "ABC"[n % 3]} for n in range(24)]
        boolq = [{"passage": f"Ice {n} -- Water.", "question": f"is {n} wet", "label": n % 2} for n in range(24)]
        for task, rows in (("arc_easy.test", arc), ("boolq.validation", boolq)):
            (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def corpus(self, name: str) -> str:
        return f"data.paths=['{self.folder / name}/*.txt']"

    @property
    def checkpoint(self) -> str:
        (trained,) = find_runs(self.folder / "runs")
        return f"checkpoint={trained.path}"


# The command of each kind by name. None depends on the folder that it runs in.
KINDS: dict[str, Callable[[Inputs], tuple[str, ...]]] = {
    "pre-training": lambda inputs: (*PRETRAIN, inputs.corpus("small")),
    "stack of students": lambda inputs: STACK,
    "preparation": lambda inputs: (*PREPARE, inputs.corpus("large")),
    "evaluation": lambda inputs: (*EVALUATE, inputs.checkpoint, f"evaluation.data_dir={inputs.folder}"),
    "sweep, local launcher": lambda inputs: (*PRETRAIN, inputs.corpus("small"), "seed=0,1", *LOCAL),
}


def left_in(folder: Path) -> Left:
    """Return what a finished command has left in its folder."""
    found: Left = {}
    for run in find_runs(folder / "runs"):
        found |= {f"{run.path.name} {name}": text for name, text in left_by(run)}
    for path in sorted((folder / "cache").rglob("*.bin")):
        found[str(path.relative_to(folder))] = sha256(path.read_bytes())
    return found


def left_by(run: RunFolder) -> Iterator[tuple[str, str]]:
    """Yield the state, losses, tensors of the last checkpoint, columns, tables and scores of a run."""
    yield "state", run.status().state
    if (run.path / "checkpoints").exists() and (steps := run.checkpoint_steps()):
        about = json.loads((run.checkpoints / f"step_{steps[-1]:08d}" / "checkpoint.json").read_text())
        tensors = {name: sums for own in about["checksums"].values() for name, sums in own.items() if name != HEADER}
        yield "checkpoint", digest([about["step"], tensors])
        yield "journal", digest([timeless(row) for row in read_journal(run.journal_path) if is_loss(row)])
    if run.columns.exists() and isinstance(config := run.config(), StudentTeacher):
        yield "columns", sha256(read_columns(run.columns, len(config.replicas)).tobytes())
    for path in sorted(run.path.glob("tables/*.parquet")):
        yield path.name, digest(parquet.read_table(path).to_pydict())
    for name in ("scores.json", "shards.json"):
        if (run.path / name).exists():
            yield name, sha256((run.path / name).read_bytes())


def is_loss(row: dict[str, Any]) -> bool:
    return bool({"loss", "validation_loss"} & row.keys()) or row.get("probe") == "replicas"


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in CLOCK}


def digest(values: Any) -> str:
    return sha256(json.dumps(values, sort_keys=True, default=str).encode())


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

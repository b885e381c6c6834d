"""What a trained model cannot do is refused before anything runs, in one line, with the full key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from composing import compose_job, validated
from each import each

from mxstudy.config import read_run
from mxstudy.reader import ConfigError
from mxstudy.studies import trained_model as of_checkpoint
from mxstudy.tracking.folder import RunFolder

EVALUATE = {"study": "evaluate", "checkpoint": "RUN"}
PERPLEXITY = {"study": "perplexity", "checkpoint": "RUN", "data": {"kind": "pysource"}}


@each(
    ("values", "message"),
    [
        ({}, "checkpoint: missing; it has no default"),
        ({"processes": 0}, "processes: must be positive, not 0"),
        ({"device": "gpu"}, "device: 'gpu' is not a choice"),
        ({"compute": "fp16"}, "compute: 'fp16' is not a choice"),
        ({"train": {"steps": 3}}, "train: no such key"),
    ],
)
@each("given", [EVALUATE, PERPLEXITY], ids=lambda given: given["study"])
def test_a_bad_value_of_either_is_refused(given: dict[str, Any], values: dict[str, Any], message: str) -> None:
    kept = given if values else {key: value for key, value in given.items() if key != "checkpoint"}
    assert refusal(kept | values).startswith(message)


@each(
    ("values", "message"),
    [
        ({"form": "mfc"}, "evaluation.form: 'mfc' is not a choice; did you mean 'mcf'?"),
        ({"tasks": ["piqa", "csqa", "piqa"]}, "evaluation.tasks: ['piqa', 'csqa', 'piqa'] names a task twice"),
        ({"shots": -1}, "evaluation.shots: must not be negative, not -1"),
        ({"task_shots": {"mmlu": -5}}, "evaluation.task_shots.mmlu: must not be negative, not -5"),
        (
            {"tasks": ["csqa"], "task_shots": {"piqa": 2, "mmlu": 5}},
            "evaluation.task_shots: mmlu, piqa is not one of the tasks",
        ),
        ({"limit": 0}, "evaluation.limit: must be positive, not 0; null is all"),
        ({"tokens_per_batch": 0}, "evaluation.tokens_per_batch: must be positive, not 0"),
    ],
)
def test_a_bad_value_of_the_questions_is_refused(values: dict[str, Any], message: str) -> None:
    assert refusal(EVALUATE | {"evaluation": values}) == message


@each("key", ["documents", "window", "stride", "tokens_per_batch"])
def test_a_perplexity_of_nothing_is_refused(key: str) -> None:
    assert refusal(PERPLEXITY | {key: 0}) == f"{key}: must be positive, not 0"
    assert refusal(PERPLEXITY | {"split": "test"}).startswith("split: 'test' is not a choice")


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        read_run(values)
    return str(caught.value)


OF_EITHER = [
    (["checkpoint=nowhere"], "'nowhere' is not a run's folder, and no run"),
    (["precision=fp32"], "asks for fp32"),
    (["norm=mxnorm_postround", "precision=mxfp8_e5m2"], "norm.format: E4M3"),
]
OF_QUESTIONS = [
    (["evaluation.tasks=[piqua]"], "'piqua' is not a task; did you mean 'piqa'"),
    (["evaluation.data_dir=nowhere"], "nowhere is not a folder"),
    (["evaluation.tasks=[csqa]", "evaluation.shots=6"], "6 shots were asked for, but csqa.train has 5"),
]
OF_A_CORPUS = [
    (
        ["window=65"],
        "window: 65 tokens are more than the 64 that .*/step_00000010 was trained on; use at most window=64",
    ),
    (["window=32", "stride=33"], "stride: 33 tokens would skip tokens between windows of 32; use at most stride=32"),
    (["split=validation", "data.validation_fraction=0"], "no document of the corpus is in its validation split; spl"),
    (["split=all", "data.paths=[empty.txt]"], "no document of the corpus is in its all split; the corpus has no text"),
    (["data.paths=[nowhere.txt]"], "'nowhere.txt' does not exist"),
]
REFUSED = [("olmes", *row) for row in OF_EITHER + OF_QUESTIONS]
REFUSED += [("perplexity", *row) for row in OF_EITHER + OF_A_CORPUS]


@pytest.mark.integration
@pytest.mark.parametrize(("experiment", "changed", "message"), REFUSED, ids=lambda part: " ".join(part))
def test_what_does_not_fit_the_checkpoint_or_the_data_is_refused(
    experiment: str, changed: list[str], message: str, trained: RunFolder, evaluation_sets: Path, here: Path
) -> None:
    (here / "a.txt").write_text("text")
    (here / "empty.txt").write_text("")
    before = sorted(here.iterdir())
    given = {
        "olmes": ["evaluation.tasks=[csqa,mmlu]", f"evaluation.data_dir={evaluation_sets}"],
        "perplexity": ["data=text", "data.paths=[a.txt]", "split=all"],
    }[experiment]
    keys = {word.partition("=")[0] for word in changed}
    kept = [word for word in [f"checkpoint={trained.path}", *given] if word.partition("=")[0] not in keys]
    with pytest.raises(ConfigError, match=message):
        validated(compose_job(f"+experiment={experiment}", *kept, *changed))
    assert sorted(here.iterdir()) == before


@pytest.mark.integration
def test_a_training_run_is_told_what_was_asked_and_nothing_by_a_rehearsal(
    trained: RunFolder, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        of_checkpoint, "add_rows", lambda uri, run, rows: told.extend(row["probe"] for row in rows if "probe" in row)
    )

    def tell(text: str, step: int, **choices: str) -> str | None:
        Path("a.txt").write_text(text)
        values = {"study": "perplexity", "split": "all", "checkpoint": str(trained.checkpoints / f"step_{step:08d}")}
        data = {"kind": "files", "format": "text", "paths": ["*.txt"]}
        config = read_run(values | {"data": data, "tracking": {"uri": "sqlite:///mlflow.db"}})
        folder = RunFolder.create(here / f"{len(list(here.iterdir()))}", config, "a" * 64, {"choices": choices})
        row = {"step": step, "probe": "perplexity", "time_s": 0.0, "values": {}}
        folder.journal_path.write_text(json.dumps(row) + "\n")
        if not text:
            Path("a.txt").unlink()
        return of_checkpoint.tell_training_run(config, folder)  # type: ignore[arg-type]

    tell("a text", 10)
    tell("a text", 5)
    tell("another text", 10)
    tell("a third text", 10, debug="tiny")
    assert re.match(r"the training's run was not told: data\.paths: .*does not exist", tell("", 10) or "")
    first, again, other = told
    assert first == again != other
    assert all(re.fullmatch("perplexity_[0-9a-f]{6}", name) for name in told)

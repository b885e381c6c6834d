"""Evaluation during training gives the scores of the checkpoint, and changes no loss."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from commands import run_here

from mxstudy import results
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.found_runs import find_runs
from mxstudy.tracking.journal import read_journal
from mxstudy.train.progress import Progress

TRAIN = ["+experiment=quickstart", "norm=mxnorm_p2", "precision=mxfp8", "+debug=tiny", "runs_dir=runs", "tracking=none"]
TASKS = "evaluation.tasks=[csqa,mmlu]"


def losses(run: RunFolder) -> list[tuple[Any, ...]]:
    rows = read_journal(run.journal_path)
    return [
        (row["step"], row.get("loss"), row.get("grad_norm"), row.get("validation_loss"))
        for row in rows
        if "probe" not in row
    ]


def scores(run: RunFolder) -> dict[int, dict[str, float]]:
    return {row["step"]: row["values"] for row in read_journal(run.journal_path) if row.get("probe") == "evaluation"}


@pytest.fixture(scope="module")
def told() -> list[str]:
    """Return what the run below prints about its evaluations."""
    return []


@pytest.fixture(scope="module")
def watched(evaluation_sets: Path, tmp_path_factory: pytest.TempPathFactory, told: list[str]) -> RunFolder:
    folder = tmp_path_factory.mktemp("watched")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "show_part", lambda _, what, done, total: told.append(f"{what} {done / total:.0%}"))
        with redirect_stdout(StringIO()) as printed:
            run_here(folder, *TRAIN, "evaluation.every_steps=4", TASKS, f"evaluation.data_dir={evaluation_sets}")
        told += printed.getvalue().splitlines()
    (found,) = find_runs(folder / "runs")
    return found


@pytest.mark.slow
def test_the_training_is_the_same(watched: RunFolder, trained: RunFolder) -> None:
    assert losses(watched) == losses(trained)
    assert watched.status().fingerprint == trained.status().fingerprint
    assert list(scores(watched)) == [3, 7, 9]
    assert len({values["csqa.cf/bits_per_char"] for values in scores(watched).values()}) == 3


@pytest.mark.integration
def test_an_evaluation_says_how_much_of_it_is_done(watched: RunFolder, told: list[str]) -> None:
    asked = [line for line in told if line.startswith("evaluation: ")]
    assert asked.count("evaluation: mmlu cf 100%") == 3
    assert asked[0].startswith("evaluation: csqa cf ")
    assert "validation 0%" in told


@pytest.mark.integration
def test_the_scores_are_printed(watched: RunFolder, told: list[str]) -> None:
    at = scores(watched)
    printed = [line for line in told if line.startswith("scores, ")]
    began = [f"scores, and bits a character, after {step + 1} steps" for step in at]
    assert [line.split(": ")[0] for line in printed] == began
    for line, values in zip(printed, at.values(), strict=True):
        for task in ("csqa", "mmlu"):
            score, bits = values[f"{task}.cf/score"], values[f"{task}.cf/bits_per_char"]
            assert f" {task} cf {score:.3f} (chance {values[f'{task}.cf/chance']:.3f}, {bits:.2f} bits)" in line


@pytest.mark.integration
def test_the_last_scores_are_those_of_the_checkpoint(watched: RunFolder, evaluation_sets: Path, tmp_path: Path) -> None:
    data = f"evaluation.data_dir={evaluation_sets}"
    words = ["+experiment=olmes", f"checkpoint={watched.path}", TASKS, data, "evaluation.form=cf", "tracking=none"]
    run_here(tmp_path, *words)
    (own,) = find_runs(tmp_path / "runs")
    (after,) = results.load([own.path], "evaluation").to_dict("records")
    for key, value in scores(watched)[9].items():
        assert after[key] == pytest.approx(value, abs=1e-6), key


@pytest.mark.integration
def test_a_model_without_an_answer_diverges_as_it_would_anyway(evaluation_sets: Path, tmp_path: Path) -> None:
    """An evaluation follows the update that makes the model NaN, before a loss shows it."""
    lost = ["optimizer.lr=1e38", "schedule=constant_no_warmup", "evaluation.every_steps=1", TASKS]
    run_here(tmp_path, *TRAIN, *lost, f"evaluation.data_dir={evaluation_sets}")
    (run,) = find_runs(tmp_path / "runs")
    assert run.status().state == "diverged"


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_compiled_training_is_the_same(evaluation_sets: Path, tmp_path: Path) -> None:
    asked = [TASKS, f"evaluation.data_dir={evaluation_sets}", "evaluation.every_steps=4"]
    for name, own in {"off": [], "on": asked}.items():
        (tmp_path / name).mkdir()
        run_here(tmp_path / name, *TRAIN, "train.compile=true", "model.num_layers=1", *own)
    off, on = (find_runs(tmp_path / name / "runs")[0] for name in ("off", "on"))
    assert losses(off) == losses(on)
    assert list(scores(on)) == [3, 7, 9]


@pytest.mark.integration
def test_a_run_that_was_not_evaluated_is_not_taken_for_one_that_was(
    trained: RunFolder, evaluation_sets: Path, tmp_path: Path
) -> None:
    asked = ["evaluation.every_steps=4", TASKS, f"evaluation.data_dir={evaluation_sets}"]
    with pytest.raises(SystemExit, match=r"evaluation: was off in .*; stale=rerun trains it again"):
        run_here(tmp_path, *TRAIN, *asked, f"runs_dir={trained.path.parents[1]}")
    with pytest.raises(SystemExit, match="'piqua' is not a task"):
        run_here(tmp_path, *TRAIN, "evaluation.every_steps=4", "evaluation.tasks=[piqua]")

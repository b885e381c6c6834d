"""The lower half of the MXFP8 recipe's figure 5 is drawn from trainings and evaluations written by hand."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from test_analysis import drawn
from tracked import make_folder, training_row, write_rows

from analysis import export
from analysis.recipe import fig05_reasoning
from mxstudy.tracking.folder import RunFolder

SHOTS = {"tasks": ["mmlu", "piqa"], "shots": 1, "task_shots": {"mmlu": 5}, "every_steps": 2}
OFF = {"bf16": 0.0, "mxfp8": 0.1}


def trained(runs: Path, precision: str, seed: int, evaluation: dict[str, Any], tasks: int = 9) -> RunFolder:
    name = f"{precision[0]}{seed}".ljust(64, "0").replace("m", "a")
    values = {"precision": plan(precision), "evaluation": evaluation, "seed": seed}
    folder = make_folder(runs, name, f"precision={precision}", **values)
    rows: list[dict[str, Any]] = [training_row(step) for step in range(4)]
    if evaluation:
        rows += [evaluation_row(step, precision, seed, step, tasks) for step in (1, 3)]
    write_rows(folder, rows)
    folder.update(state="finished")
    return folder


def plan(precision: str) -> dict[str, Any]:
    return {"schedule": [{"plan": {"layers.*": precision}}]}


def evaluation_row(step: int, precision: str, seed: int, last_step: int, tasks: int = 9) -> dict[str, Any]:
    scores = {"mmlu.mcf/score": 0.3 + OFF[precision] + 0.01 * seed, "mmlu.mcf/chance": 0.25}
    scores |= {f"average_of_{tasks}.cf/score": 0.4 + 0.05 * last_step, f"average_of_{tasks}.cf/chance": 0.35}
    return {"step": step, "probe": "evaluation", "values": scores}


def evaluated(runs: Path, training: RunFolder, precision: str, seed: int, last_step: int, **asked: Any) -> None:
    """Write an evaluation of the checkpoint after a step, which is named by the next step."""
    name = hashlib.sha256(f"{training.path} {last_step} {asked}".encode()).hexdigest()
    checkpoint = training.checkpoints / f"step_{last_step + 1:08}"
    about = {"study": "evaluate", "experiment": "nvidia_reasoning", "checkpoint": str(checkpoint)}
    questions = {key: value for key, value in SHOTS.items() if key != "every_steps"}
    folder = make_folder(runs, name, f"checkpoint={last_step}", **about | {"evaluation": questions} | asked)
    write_rows(folder, [evaluation_row(last_step + 1, precision, seed, last_step)])
    folder.update(state="finished")


@pytest.mark.integration
def test_scores_of_every_arm_stand_over_those_of_one_who_guesses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for precision in OFF:
        for seed in (0, 1):
            trained(tmp_path, precision, seed, SHOTS)
    mmlu, nine = drawn(fig05_reasoning, monkeypatch, "--runs", str(tmp_path)).axes
    assert (mmlu.get_title(), nine.get_title()) == ("MMLU, 5 shots", "average of nine tasks, 1 shot")
    lines = [(line.get_xdata(), line.get_ydata()) for line in mmlu.lines]
    assert [[*x] for x, _ in lines[:2]] == [[64, 128]] * 2  # tokens
    assert sorted(y[0] for _, y in lines[:2]) == pytest.approx([30.5, 40.5])
    assert [*lines[2][1]] == [25, 25]
    assert [*nine.lines[0].get_ydata()] == pytest.approx([45, 55])
    assert [*nine.lines[2].get_ydata()] == [35, 35]
    export.main(["--runs", str(tmp_path), "--name", "x", "--to", str(tmp_path / "out")])
    again, _ = drawn(fig05_reasoning, monkeypatch, "--runs", str(tmp_path / "out" / "x")).axes
    assert points(again) == points(mmlu)


def points(axes: Axes) -> list[tuple[list[float], list[float]]]:
    return [([*line.get_xdata()], [*line.get_ydata()]) for line in axes.lines]


@pytest.mark.integration
def test_evaluations_of_checkpoints_are_drawn_as_those_beside_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, runs, tables = (tmp_path / name for name in ("beside", "runs", "tables"))
    for precision in OFF:
        for seed in (0, 1):
            trained(beside, precision, seed, SHOTS)
            training = trained(runs, precision, seed, {})
            for last_step in (3, 1):
                evaluated(runs, training, precision, seed, last_step)
    evaluated(runs, training, "mxfp8", 1, 2, norm={"kind": "rmsnorm"})  # not as it was trained
    evaluated(runs, make_folder(tmp_path / "other", "c" * 64), "bf16", 0, 2)  # of another training
    given = [str(runs / "quick"), str(runs / "nvidia_reasoning")]
    panels = drawn(fig05_reasoning, monkeypatch, "--runs", *given).axes
    expected = drawn(fig05_reasoning, monkeypatch, "--runs", str(beside)).axes
    assert [points(axes) for axes in panels] == [points(axes) for axes in expected]
    assert [axes.get_title() for axes in panels] == [axes.get_title() for axes in expected]
    labels, named = (axes[0].get_legend_handles_labels()[1] for axes in (panels, expected))
    assert labels == named
    for path in given:
        export.main(["--runs", path, "--name", Path(path).name, "--to", str(tables)])
    exported = [str(tables / Path(path).name) for path in given]
    assert points(drawn(fig05_reasoning, monkeypatch, "--runs", *exported).axes[0]) == points(panels[0])
    one_arm = drawn(fig05_reasoning, monkeypatch, "--runs", *given, "--only", "precision=bf16").axes[0]
    assert len(one_arm.lines) == 2


def test_evaluations_without_their_trainings_or_trainings_without_any_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = trained(tmp_path, "bf16", 0, {})
    with pytest.raises(SystemExit):
        fig05_reasoning.main(["--runs", str(tmp_path)])
    assert "--runs: none of these runs was evaluated; evaluate checkpoints by" in capsys.readouterr().err
    evaluated(tmp_path, training, "bf16", 0, 3)
    with pytest.raises(SystemExit):
        fig05_reasoning.main(["--runs", str(tmp_path / "nvidia_reasoning")])
    said = capsys.readouterr().err
    assert said.startswith("--runs: has no training")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("evaluation", "tasks", "says"),
    [
        (SHOTS, 8, "no run was asked average_of_9.cf; evaluate checkpoints by"),
        (
            SHOTS | {"shots": 2, "task_shots": {"mmlu": 0}},
            9,
            "mmlu.mcf was asked with 5 and 0 shots; choose evaluations",
        ),
        (SHOTS | {"limit": 100}, 9, "mmlu.mcf was asked with several values of evaluation.limit; choose by --only"),
    ],
)
def test_what_is_not_the_figure_is_refused(
    evaluation: dict[str, Any], tasks: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, "mxfp8", 0, evaluation, tasks)
    trained(tmp_path, "bf16", 1, SHOTS, tasks)
    with pytest.raises(SystemExit):
        fig05_reasoning.main(["--runs", str(tmp_path)])
    said = capsys.readouterr().err
    assert says in said or says.replace("5 and 0", "0 and 5") in said

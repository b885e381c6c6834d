"""The lower half of the MXFP8 recipe's figure 5 is drawn from trainings written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_analysis import drawn
from tracked import make_folder, training_row, write_rows

from analysis import export
from analysis.recipe import fig05_reasoning

SHOTS = {"tasks": ["mmlu", "piqa"], "shots": 1, "task_shots": {"mmlu": 5}, "every_steps": 2}
OFF = {"bf16": 0.0, "mxfp8": 0.1}


def trained(runs: Path, precision: str, seed: int, evaluation: dict[str, Any], tasks: int = 9) -> None:
    name = f"{precision[0]}{seed}".ljust(64, "0").replace("m", "a")
    values = {"precision": {"schedule": [{"plan": {"layers.*": precision}}]}, "evaluation": evaluation, "seed": seed}
    folder = make_folder(runs, name, f"precision={precision}", **values)
    rows: list[dict[str, Any]] = [training_row(step) for step in range(4)]
    for step in (1, 3):
        scores = {"mmlu.mcf/score": 0.3 + OFF[precision] + 0.01 * seed, "mmlu.mcf/chance": 0.25}
        scores |= {f"average_of_{tasks}.cf/score": 0.4 + 0.05 * step, f"average_of_{tasks}.cf/chance": 0.35}
        rows.append({"step": step, "probe": "evaluation", "values": scores})
    write_rows(folder, rows)
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
    assert [[*line.get_ydata()] for line in again.lines] == [[*line.get_ydata()] for line in mmlu.lines]


@pytest.mark.parametrize(
    ("evaluation", "tasks", "says"),
    [
        (SHOTS, 8, "no run was asked average_of_9.cf; train with"),
        (SHOTS | {"shots": 2, "task_shots": {"mmlu": 0}}, 9, "runs with 5 and 0 shots of mmlu.mcf; choose by --only"),
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

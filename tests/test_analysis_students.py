"""Figures of the student-teacher study show what frames made by hand say."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from student_frames import curve, frame, replica
from test_analysis import drawn
from test_results_stacks import stack_folder

from analysis import style
from analysis.instability import fig03_overflow, fig05_gradient_bias, fig06_learning_rate_grid, fig09_depth_width
from analysis.students import arms, curves, losses, measures, sharpness

pytestmark = pytest.mark.usefixtures("figure_rules")
STEPS = 900


def two_arms() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return runs and metrics: FP32 learns, and one of MXFP8's three replicas is NaN from step 600 on."""
    fall = np.linspace(1.0, 0.1, STEPS)
    lost = np.where(np.arange(STEPS) < 600, fall, np.nan)
    lost[590:600] = 50.0
    runs = [replica("fp32", i, **{"choice.precision": "fp32"}) for i in range(3)]
    runs += [replica("mx", i, lost=590 if i == 2 else math.nan) for i in range(3)]
    metrics = [curve("fp32", i, (1 + 0.1 * i) * fall) for i in range(3)]
    metrics += [curve("mx", 0, fall), curve("mx", 1, 2 * fall), curve("mx", 2, lost)]
    return frame(*runs), pd.concat(metrics, ignore_index=True)


def test_a_panel_has_medians_a_line_of_what_diverged_and_a_cross_where_it_ends() -> None:
    runs, metrics = two_arms()
    figure = losses.draw(runs, metrics, [], [], ["precision"])
    (axes,) = figure.axes
    fp32, mx, thin, cross = axes.lines
    point = -(-STEPS // curves.POINTS)
    assert list(fp32.get_xdata()[:2]) == [0, point]
    assert fp32.get_ydata()[0] == pytest.approx(1.1 * np.linspace(1.0, 0.1, STEPS)[point // 2])
    assert mx.get_ydata()[-1] == pytest.approx(0.2, rel=0.02)  # the median of 0.1, 0.2 and what is no longer finite
    assert np.nanmax(thin.get_ydata()) == 50
    assert np.isnan(thin.get_ydata()[-1])
    assert (cross.get_marker(), cross.get_xdata()[0], cross.get_ydata()[0]) == ("x", 600, 50)
    assert [text.get_text() for text in axes.texts if "diverged" in text.get_text()] == [
        "0 of 3 diverged",
        "1 of 3 diverged",
    ]
    assert axes.get_yscale() == "log"
    assert figure.get_supylabel() == "training loss, mean squared error"


def test_losses_of_two_kinds_have_axes_and_units_of_their_own() -> None:
    runs, metrics = two_arms()
    runs["config.loss"] = runs["fingerprint"].map({"fp32": "mse", "mx": "kl"})
    figure = losses.draw(runs, metrics, ["loss"], [], ["precision"])
    titles = {axes.get_title(): axes.get_ylabel() for axes in figure.axes}
    assert titles == {"loss mse": "mean squared error", "loss kl": "KL divergence, nats"}
    assert figure.axes[0].get_ylim() != figure.axes[1].get_ylim()


@pytest.mark.integration
def test_a_stack_is_drawn_and_its_table_is_in_the_caption(tmp_path: Path, monkeypatch) -> None:
    stack_folder(tmp_path / "runs")
    arguments = ["--runs", str(tmp_path / "runs"), "--columns", "lr", "--lines", "norm"]
    figure = drawn(losses, monkeypatch, *arguments)
    assert [axes.get_title() for axes in figure.axes] == ["lr 0.0005", "lr 0.001"]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    losses.main(arguments)
    text = (tmp_path / "figures" / "student_losses.md").read_text()
    assert "- lr 0.0005, norm layernorm: 2 replicas (cccccccccccc)" in text
    assert "| lr 0.001, norm layernorm | 2 |" in text


def test_a_key_that_no_run_has_is_refused(tmp_path: Path, capsys) -> None:
    stack_folder(tmp_path / "runs")
    with pytest.raises(SystemExit):
        losses.main(["--runs", str(tmp_path / "runs"), "--columns", "colour"])
    assert "colour: is neither a group nor a field of these runs" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- grids


def test_learning_rates_are_columns_in_order_with_the_cosine_last() -> None:
    runs, metrics = [], []
    for kind, lr, depth in (("constant", 1e-3, 3), ("cosine", 1e-3, 3), ("constant", 1e-5, 3), ("constant", 1e-5, 6)):
        name = f"{kind} {lr} {depth}"
        sizes = {"config.model.num_layers": depth, "config.model.hidden_size": 256}
        runs.append(replica(name, lr=lr, **sizes, **{"config.schedule.kind": kind, "config.loss": "kl"}))
        metrics.append(curve(name, 0, np.linspace(1, 0.1, STEPS)))
    figure = fig06_learning_rate_grid.draw(frame(*runs), pd.concat(metrics))
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert {title: len(axes.lines) for title, axes in panels.items()} == {  # one line per size
        "lr 1e-05": 2,
        "lr 0.001": 1,
        "cosine lr 0.001": 1,
    }
    places = [panels[title].get_position().x0 for title in ("lr 1e-05", "lr 0.001", "cosine lr 0.001")]
    assert places == sorted(places)
    assert figure.get_supylabel() == "training loss, KL divergence, nats"
    assert [text.get_text() for text in figure.legends[0].get_texts()][:2] == ["L = 3, D = 256", "L = 6, D = 256"]


def test_a_cell_of_depth_and_width_counts_its_replicas() -> None:
    rows = [
        replica(f"{depth}-{width}", i, lost=9 if depth == 6 and i == 0 else math.nan, **sizes)
        for depth, width, i in product((3, 6), (256, 512), range(2))
        for sizes in [{"config.model.num_layers": depth, "config.model.hidden_size": width}]
    ]
    figure = fig09_depth_width.draw(frame(*rows))
    spikes, lost = figure.axes[:2]
    assert [text.get_text() for text in spikes.texts] == ["0", "0", "0.5", "0.5"]
    assert [text.get_text() for text in lost.texts] == ["0/2", "0/2", "1/2", "1/2"]
    assert [label.get_text() for label in lost.get_xticklabels()] == ["256", "512"]
    assert (lost.get_xlabel(), lost.get_ylabel()) == ("width", "depth, blocks")


# ---------------------------------------------------------------------------------------------------------- measures


def measured(**columns: object) -> pd.DataFrame:
    """Return measurements at steps 0 and 450 of the six replicas of `two_arms`."""
    rows = [
        {"fingerprint": name, "label": name, "replica": number, "step": step} | columns
        for name, number, step in product(("fp32", "mx"), range(3), (0, 450))
    ]
    return pd.DataFrame(rows)


def test_a_layer_s_several_gains_have_a_line_each() -> None:
    names = ("layers.0.attention.qkv.norm.weight", "layers.0.up.norm.weight", "layers.1.up.norm.weight")
    frame = measured(**{f"{name}/floor/overflow_fraction": 0.5 for name in names})
    gains = fig03_overflow.rows_of(frame)[0]
    assert list(gains.lines) == ["layer 0, qkv", "layer 0, up", "layer 1"]


def test_fractions_in_the_last_bin_are_percent_by_layer_or_over_layers() -> None:
    places = {"up.norm.weight": (0.5, 1.0), "up.input": (0.01, 0.02), "down.input": (0.01, 0.01), "output": (0.0, 0.1)}
    places |= {"up.weight": (0.2, 0.2), "down.weight": (0.3, 0.1)}
    count = "floor/overflow_fraction"
    columns = {f"layers.{i}.{name}/{count}": value[i] for name, value in places.items() for i in (0, 1)}
    rows = fig03_overflow.rows_of(measured(**columns, **{f"gaussian.E4M3/{count}": 0.0086}))
    gains, activations, _ = rows
    assert list(gains.lines) == ["layer 0", "layer 1"]
    assert gains.frame[gains.lines["layer 1"][0]].iloc[0] == 100
    means = [activations.frame[column].iloc[0] for column, _ in activations.lines.values()]
    assert means == pytest.approx([1.5, 1.0, 5.0])
    assert list(activations.levels.values()) == pytest.approx([0.86])
    runs, metrics = two_arms()
    figure = measures.draw(runs, metrics, arms.named(runs, ["precision"]), rows)
    panels = np.array(figure.axes).reshape(4, 2)
    assert [axes.get_title() for axes in panels[0]] == ["precision fp32", "precision mxfp8"]
    assert np.allclose(panels[0, 0].lines[1].get_ydata(), 100)
    assert panels[3, 0].get_ylabel() == "training loss,\nmean squared error"


@pytest.mark.integration
def test_both_kinds_of_gradient_bias_are_in_one_panel() -> None:
    def bias(ratio: float) -> pd.DataFrame:
        return measured(**{"model/ratio": ratio, "model/squared_ratio": ratio**2, "model/cosine": 1 - ratio**2 / 2})

    rows = fig05_gradient_bias.rows_of(bias(0.1), bias(1.4))
    assert [level for row in rows for level in row.levels.values()] == pytest.approx([math.sqrt(2), 2, 0])
    runs, metrics = two_arms()
    figure = measures.draw(runs, metrics, arms.named(runs, ["precision"]), rows)
    ratio = figure.axes[1]
    levels = [line.get_ydata()[0] for line in ratio.lines]
    assert sorted({round(level, 3) for level in levels}) == [0.1, 1.4, 1.414]
    assert ratio.get_yscale() == "log"
    assert len(ratio.lines) == 5  # two medians, the diverged replica's two, and the value of unrelated gradients


def test_sharpness_is_in_units_of_the_learning_rate() -> None:
    columns = {"lr": 1e-3, "hessian/eigenvalue": 1500.0, "hessian/stability": 1.7}
    of_sgd = sharpness.rows_of(measured(**columns))
    assert [list(row.lines) for row in of_sgd] == [["Hessian"], ["Hessian"]]
    assert of_sgd[0].frame[of_sgd[0].lines["Hessian"][0]].iloc[0] == pytest.approx(1.5)
    assert list(of_sgd[0].levels.values()) == [2.0]


def test_around_a_divergence_steps_are_those_from_there() -> None:
    runs, metrics = two_arms()
    rows = pd.concat([measured().assign(step=step) for step in (0, 100, 500, 590, 600, 700)]).drop_duplicates()
    found = measures.around_divergence(runs, rows[rows["step"] % 100 == 0], 300)
    assert found[["fingerprint", "replica"]].drop_duplicates().to_numpy().tolist() == [["mx", 2]]
    assert dict(zip(found["step"], rows["step"][rows["step"] % 100 == 0].unique()[2:], strict=True)) == {
        0: 500,
        100: 600,
        200: 700,
    }
    assert list(measures.around_divergence(runs, metrics, 2)["step"]) == [-2, -1, 0, 1, 2]


def test_what_was_measured_before_a_divergence_is_told_from_what_was_after_it() -> None:
    """The third replica of MXFP8 diverges at step 590, between the 66th and the 67th row."""
    runs, _ = two_arms()
    first, *later = (
        measured().drop_duplicates("fingerprint").assign(step=step, replica=2) for step in range(0, 900, 9)
    )
    rows = pd.concat([first, *later])
    row = measures.Row("size", rows.assign(size=rows["step"]), {"this": ("size", "red")})
    said = measures.medians(runs, arms.named(runs, ["precision"]), [row])
    assert [line for line in said.splitlines() if line.startswith("| precision")] == [
        "| precision fp32 | size of this | 446 (446 .. 446) | - | - | - | - |",
        "| precision mxfp8 | size of this | 292 (292 .. 292) | 585 (585 .. 585) | 5 .. 5 | 1 of 1 | 742 (742 .. 742) |",
    ]
    row = measures.Row("size", rows.assign(size=-rows["step"]), {"this": ("size", "red")})
    assert "| 0 of 1 |" in measures.medians(runs, arms.named(runs, ["precision"]), [row])


def test_a_stack_that_ended_early_counts_as_infinite_in_the_median() -> None:
    fall = np.linspace(1.0, 0.1, STEPS)
    lives, *dead = curve("lives", 0, fall), curve("dead", 0, fall[:600]), curve("dead", 1, fall[:600])
    for record in dead:
        record.loc[599, "grad_norm"] = np.inf  # the record's last step; its loss may be finite
    losses = curves.losses_by_replica(pd.concat([lives, *dead]))
    assert np.isfinite(losses.loc[:598]).all(axis=None)
    assert {run: np.isinf(losses[run]).sum() for run in losses} == {("lives", 0): 0, ("dead", 0): 301, ("dead", 1): 301}
    axes = style.plt.figure().subplots()
    curves.band(axes, losses, "black")
    style.plt.close("all")  # not a whole figure
    (median,) = axes.lines
    assert np.nanmax(median.get_xdata()[np.isfinite(median.get_ydata())]) < 600


def test_a_record_that_ends_while_its_replica_is_finite_is_not_infinite_after_it() -> None:
    """The same holds for replicas that are drawn from where each diverged, which have different steps left."""
    fall = np.linspace(1.0, 0.1, STEPS)
    losses = curves.losses_by_replica(pd.concat([curve("longer", 0, fall), curve("shorter", 0, fall[:600])]))
    assert not np.isinf(losses).any(axis=None)
    assert losses["shorter", 0].isna().sum() == STEPS - 600


def test_a_corner_counts_all_replicas_of_an_arm_and_says_which_are_open() -> None:
    rows = [replica("mx", 0, lost=4), replica("mx", 1), replica("mx", 2, **{"outcome.rising_at": 9})]
    everyone = frame(*rows)
    lost = everyone[everyone["diverged"] > 0]
    arm = arms.named(everyone, ["precision"])
    figure = measures.draw(lost, curve("mx", 0, np.ones(STEPS)), arm, [], everyone)
    assert [text.get_text() for text in figure.axes[-1].texts][-1] == "1 of 3 diverged, 1 open"

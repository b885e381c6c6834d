"""A sweep of pre-trainings ends with a row per arm, with its seeds' mean and interval, and counts everyone."""

import io
import math

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from arm_configs import pretrain
from each import each
from rich.console import Console

from mxstudy import results
from mxstudy.studies.pretrain.run import divergence
from mxstudy.studies.pretrain.tables import columns, in_one_line, legend, markdown_table, no_baseline, terminal_table

NAN = float("nan")


def swept(*arms, baseline=None):
    """Return runs of arms, each with its norm, losses by seed, and further values of the config.

    A run with a NaN loss has diverged.
    """
    rows = [
        {f"config.{key}": value for key, value in pretrain(norm, seed=seed, data_seed=seed, **others).items()}
        | {"choice.norm": norm, "choice.precision": "mxfp8", "fingerprint": f"{norm}{seed}{others}"}
        | {"state": "diverged" if math.isnan(loss) else "finished", "validation_loss": loss}
        | {"tokens_per_s": 1000.0 + seed, "mlflow_run_id": None}
        for norm, losses, *other in arms
        for others in (other[0] if other else {},)
        for seed, loss in enumerate(losses)
    ]
    return results.with_arms(pd.DataFrame(rows), baseline)


def table(runs):
    return results.arm_rows(runs, "validation_loss")


def test_an_arm_is_a_row_with_the_mean_of_its_seeds_and_the_difference_paired_by_seed():
    """Every row was once compared with `rmsnorm seed=0`."""
    rows = table(swept(("rmsnorm", [1.0, 2.0, 3.0]), ("mxnorm_p2", [1.1, 2.2, 3.3])))
    cells = columns(rows)
    assert cells["arm"] == ["rmsnorm", "mxnorm_p2"]
    assert cells["runs"] == ["3", "3"]
    assert cells["val loss"] == ["2.0000 ± 2.4841", "2.2000 ± 2.7326"]
    assert cells["diff"] == ["baseline", "+0.2000 ± 0.2484"]
    assert cells["tokens/s"] == ["1,001", "1,001"]
    assert "MLflow run" not in cells
    (line,) = legend(rows, {})
    assert "mean of the runs that finished" in line
    assert line.endswith("diff: minus that of rmsnorm, paired by seed")


def test_the_dead_are_counted_beside_the_mean_of_those_that_finished():
    rows = table(swept(("rmsnorm", [1.0, 2.0, 3.0]), ("mxnorm_p2", [NAN, 2.2, 3.3]), ("mxnorm_p1", [NAN, NAN])))
    cells = columns(rows)
    assert cells["runs"] == ["3", "3", "2"]
    assert cells["diverged"] == ["0", "1", "2"]
    assert cells["val loss"] == ["2.0000 ± 2.4841", "2.7500 ± 6.9884†", "-"]
    assert cells["diff"][1:] == ["+0.2500 ± 0.6353 (2 pairs)", "-"]
    assert legend(rows, {})[1:] == ["† mean of the runs that did not diverge: mxnorm_p2 2 of 3"]
    assert in_one_line(rows) == (
        "val loss: rmsnorm 2.0000 ± 2.4841, mxnorm_p2 2.7500 ± 6.9884 (1 diverged), mxnorm_p1 - (2 diverged)"
    )
    assert max(map(len, on_a_terminal(rows))) <= 80
    assert "(2 pairs)" in "".join(on_a_terminal(rows))


@each(("ours", "theirs"), [([1.1, 2.2], [1.0, NAN]), ([1.1, NAN], [1.0, 2.0])])
def test_pairs_that_are_missing_are_said(ours, theirs):
    cells = columns(table(swept(("rmsnorm", theirs), ("mxnorm_p2", ours))))
    assert cells["diff"][1] == "+0.1000 (1 pair)"


@each("baseline", [{}, {"norm": "rmsnorm"}, {"norm": "layernorm"}])
def test_a_sole_arm_is_compared_with_nothing(baseline):
    """It was once called its own baseline."""
    rows = table(swept(("rmsnorm", [1.0, 2.0]), baseline=baseline))
    assert "diff" not in columns(rows)
    assert "diff" not in legend(rows, baseline)[0]
    assert no_baseline(rows, baseline) == []


def test_learning_rates_are_compared_with_their_own_baseline():
    """They were once pooled as replicates."""
    slow, fast = {"optimizer__lr": 1e-3}, {"optimizer__lr": 2e-3}
    arms = [(norm, losses, lr) for lr, losses in ((slow, [1.0]), (fast, [5.0])) for norm in ("rmsnorm", "mxnorm_p2")]
    rows = table(swept(*arms, baseline={"norm": "rmsnorm"}))
    assert columns(rows)["diff"] == ["baseline", "+0.0000"] * 2
    assert (
        "minus that of the arm with norm=rmsnorm and everything else the same" in legend(rows, {"norm": "rmsnorm"})[0]
    )


@each("baseline", [{"nrom": "rmsnorm"}, {"norm": "layernorm"}])
def test_a_baseline_that_no_arm_has_is_said(baseline):
    rows = table(swept(("mxnorm_p1", [1.0]), ("mxnorm_p2", [1.0]), baseline=baseline))
    assert no_baseline(rows, baseline) == [f"baseline: no arm has {baseline}; using mxnorm_p1"]
    assert columns(rows)["diff"][0] == "baseline"
    assert no_baseline(rows, {"norm": "mxnorm_p2"}) == []


def on_a_terminal(rows, width=80):
    stream = io.StringIO()
    Console(file=stream, width=width).print(terminal_table(rows, width))
    return [line.rstrip() for line in stream.getvalue().splitlines() if line.strip()]


def test_single_runs_have_their_ids_where_these_fit():
    rows = table(swept(("rmsnorm", [5.0]), ("mxnorm_p1", [NAN])).assign(mlflow_run_id=["a" * 32, None]))
    wide = on_a_terminal(rows, 120)
    assert wide[2].split() == ["rmsnorm", "1", "0", "5.0000", "baseline", "1,000", "a" * 32]
    assert wide[3].split() == ["mxnorm_p1", "1", "1", "-", "-", "1,000", "-"]
    assert "a" * 32 not in "".join(on_a_terminal(rows))
    assert max(map(len, on_a_terminal(rows))) <= 80


def test_four_arms_of_three_seeds_fit_into_80_columns_and_no_name_is_cut():
    runs = swept(*((norm, [1.5, 2.5, 3.5]) for norm in ("rmsnorm", "mxnorm_p1", "mxnorm_p2")))
    assert max(map(len, on_a_terminal(table(runs)))) <= 80
    long = runs.assign(arm="optimizer.lr=" + runs["arm"] * 8, partner=None)
    lines = on_a_terminal(table(long))
    assert max(map(len, lines)) <= 80
    assert "".join("".join(lines).split()).count("mxnorm_p1") >= 5


def test_markdown_has_all_columns():
    runs = swept(("rmsnorm", [4.75]), ("mxnorm_p1", [5.0])).assign(mlflow_run_id=["a" * 32, None])
    assert markdown_table(table(runs)).splitlines() == [
        "| arm | runs | diverged | val loss | diff | tokens/s | MLflow run |",
        "|---|---:|---:|---:|---:|---:|---|",
        f"| rmsnorm | 1 | 0 | 4.7500 | baseline | 1,000 | {'a' * 32} |",
        "| mxnorm_p1 | 1 | 0 | 5.0000 | +0.2500 | 1,000 | - |",
    ]


def test_a_figure_has_a_band_an_arm_and_a_thin_line_for_each_that_died():
    runs = swept(("rmsnorm", [1.0, 2.0]), ("mxnorm_p2", [NAN, 2.0]))
    steps = range(5)
    rows = pd.DataFrame(
        [
            {"fingerprint": run["fingerprint"], "step": step, "loss": 9.0 - step + (run["unit"][-1] == "1")}
            for run in runs.to_dict("records")
            for step in (steps if run["state"] == "finished" else range(2))
        ]
    )
    one, other = results.curves_of(rows, runs, "loss", "step")
    figure, axes = plt.subplots()
    results.draw_arm(axes, one)
    assert list(axes.lines[0].get_ydata()) == [9.5 - step for step in steps]
    heights = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (5.0, 10.0)
    results.draw_arm(axes, other)
    mean, thin, cross = axes.lines[1:]
    assert (len(mean.get_xdata()), list(thin.get_xdata()), list(cross.get_xdata())) == (5, [0, 1], [1])
    assert list(other.less(one).columns) == ["data_seed=1 seed=1"]
    assert {line.get_color() for line in axes.lines[1:]} == {other.color} != {one.color}
    plt.close(figure)


def test_two_runs_of_one_arm_and_seed_are_no_curves():
    runs = swept(("rmsnorm", [1.0]), ("rmsnorm", [1.0])).assign(fingerprint=["a", "b"])
    rows = pd.DataFrame({"fingerprint": ["a", "b"], "step": 0, "loss": 1.0})
    with pytest.raises(ValueError, match="two runs of the arm 'mxfp8 rmsnorm' have the same seeds"):
        list(results.curves_of(rows, runs, "loss", "step"))


@each(
    ("losses", "grad_norms", "reason"),
    [
        ([5.5, NAN], [1.0, NAN], "loss nan at step 1; loss 5.5000 at step 0"),
        ([5.5, 9.25], [1.0, float("inf")], "grad_norm inf at step 1; loss 5.5000 at step 0"),
        ([NAN], [NAN], "loss nan at step 0"),
    ],
)
def test_a_divergence_is_told_with_the_last_loss_before_it(losses, grad_norms, reason):
    rows = [{"step": i, "loss": x, "grad_norm": g} for i, (x, g) in enumerate(zip(losses, grad_norms, strict=True))]
    assert divergence([{"step": 0, "parameters": 7}, *rows]) == reason

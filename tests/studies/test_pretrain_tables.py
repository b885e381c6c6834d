import io

import pandas as pd
import pytest
from each import each
from rich.console import Console

from mxstudy.studies.pretrain.run import divergence
from mxstudy.studies.pretrain.tables import baseline_arm, markdown_table, terminal_table
from mxstudy.tracking.arms import short

RUNS = pd.DataFrame(
    {
        "label": ["bf16 rmsnorm", "mxfp8 rmsnorm", "mxfp8 mxnorm_p1"],
        "choice.norm": ["rmsnorm", "rmsnorm", "mxnorm_p1"],
        "choice.precision": ["bf16", "mxfp8", "mxfp8"],
        "state": ["finished", "finished", "diverged"],
        "validation_loss": [5.0, 4.75, float("nan")],
        "tokens_per_s": [12345.6, 900.0, 800.0],
        "mlflow_run_id": ["a" * 32, None, "c" * 32],
    }
)


def test_the_baseline_is_the_first_arm_with_all_its_choices(capsys):
    assert baseline_arm(RUNS, {"norm": "rmsnorm", "precision": "mxfp8"})["label"] == "mxfp8 rmsnorm"
    assert baseline_arm(RUNS, {})["label"] == "bf16 rmsnorm"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("baseline", [{"nrom": "rmsnorm"}, {"norm": "layernorm"}])
def test_a_baseline_that_no_arm_has_is_said(baseline, capsys):
    assert baseline_arm(RUNS, baseline)["label"] == "bf16 rmsnorm"
    assert "no arm has" in capsys.readouterr().out


def on_a_terminal(runs, columns=80):
    stream = io.StringIO()
    Console(file=stream, width=columns).print(terminal_table(runs, runs.iloc[0], columns))
    return [line.rstrip() for line in stream.getvalue().splitlines() if line.strip()]


def test_the_table_shows_what_has_diverged_and_fits_into_80_columns():
    lines = on_a_terminal(RUNS.iloc[:2])
    assert [line.split() for line in (lines[0], *lines[2:])] == [
        ["arm", "val", "loss", "diff", "tokens/s", "MLflow", "run"],
        ["bf16", "rmsnorm", "5.0000", "+0.0000", "12,346", "a" * 32],
        ["mxfp8", "rmsnorm", "4.7500", "-0.2500", "900", "-"],
    ]
    assert max(map(len, lines)) <= 80


def test_where_names_are_long_the_ids_are_left_out_and_no_name_is_cut():
    lines = on_a_terminal(RUNS)
    assert lines[-1].split() == ["mxfp8", "mxnorm_p1", "(diverged)", "-", "-", "800"]
    assert max(map(len, lines)) <= 80
    label = "optimizer.lr=" + "6.103515625e-05 " * 8
    lines = on_a_terminal(RUNS.assign(label=label))
    assert max(map(len, lines)) <= 80
    assert "".join(lines).count("6.103515625e-05") == 3 * 8


def test_markdown_has_all_columns():
    assert markdown_table(RUNS, RUNS.iloc[1]).splitlines() == [
        "| arm | val loss | diff | tokens/s | MLflow run |",
        "|---|---:|---:|---:|---|",
        f"| bf16 rmsnorm | 5.0000 | +0.2500 | 12,346 | {'a' * 32} |",
        "| mxfp8 rmsnorm | 4.7500 | +0.0000 | 900 | - |",
        f"| mxfp8 mxnorm_p1 (diverged) | - | - | 800 | {'c' * 32} |",
    ]


def test_only_the_groups_own_names_are_left_out():
    assert short("precision=mxfp8 norm=rmsnorm seed=1") == "mxfp8 rmsnorm seed=1"
    assert short("optimizer.max_grad_norm=2 norm=rmsnorm") == "optimizer.max_grad_norm=2 rmsnorm"


NAN = float("nan")


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

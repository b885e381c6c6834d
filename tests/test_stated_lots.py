"""Lots whose rules were stated before go from tables made by hand to the verdicts and numbers of their pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from composing import compose
from fingerprints import fingerprint_of
from made_runs import runs_of, with_losses

from analysis.export import thinned
from analysis.ledger import instability_language
from analysis.ledger.claim import NOT_RUN, judge
from analysis.ledger.mxnorm_training import SENSITIVITY, WINDOW
from analysis.ledger.page import note_of
from analysis.ledger.rules import CONTRADICTED, REPRODUCED, UNCLEAR
from analysis.ledger.tables import Tables
from analysis.pages import stated_lots
from analysis.pages.language_models import LOSS, NORM_CHOICE
from analysis.recipe.arms_23m import BLOCKWISE, RECIPE, RECIPE_AGAIN, TENSOR, TOGETHER
from analysis.units import RATE, SEED
from mxstudy import results
from mxstudy.config import read_run

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[1]
PAIRED = stated_lots.PAIRED


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder whose results/ has the pilot's table alone, from which a lot's cost is computed."""
    monkeypatch.chdir(tmp_path)
    stated_lots.judged.cache_clear()
    (tmp_path / "results").mkdir()
    for path in (ROOT / "results").glob("mxnorm_equivalence_pilot_*"):
        (tmp_path / "results" / path.name).symlink_to(path)
    yield tmp_path / "results"
    stated_lots.judged.cache_clear()


def export(runs: pd.DataFrame, name: str, folder: Path) -> None:
    stated_lots.judged.cache_clear()
    results.write_table(thinned(runs, "runs", 1), folder / f"{name}_runs.parquet", {})


def verdicts(name: str) -> dict[str, str]:
    return {one.claim.id: one.counted_as for one in stated_lots.judged(name)}


def test_before_the_runs_a_page_says_so_with_the_price(tables: Path) -> None:
    assert {*verdicts("recipe_23m").values(), *verdicts(PAIRED).values()} == {NOT_RUN}
    assert stated_lots.decided("recipe_23m") == "0 of 25"
    assert (
        stated_lots.verdicts("recipe_23m").count("; 4 minutes of an H200 for 4 units") == 4
    )  # each of two tables is missing
    assert "\n- No effect in 5 of 5 rows: " in stated_lots.verdicts(PAIRED)
    assert {stated_lots.arms(RECIPE), stated_lots.by_rate(PAIRED), stated_lots.finished(PAIRED)} == {NOT_RUN}
    assert stated_lots.rounded_down(RECIPE) == NOT_RUN


LOSSES = {  # minus that of bf16
    "E4M3": 0.001,
    "E4M3, floor": 0.02,
    "E5M2 gradients": 0.0015,
    "E5M2 gradients, floor": 0.0016,
    "E5M2 weights": 0.03,
    "E5M2 activations": 0.0012,
    "forward only": 0.04,
    TENSOR: -0.03,
    BLOCKWISE: 0.001,
}
DECIDED = {
    "recipe-23m-ocp-worse-e4m3": REPRODUCED,
    "recipe-23m-ocp-worse-e5m2-grad": CONTRADICTED,
    "recipe-mxfp8-is-bf16-small": REPRODUCED,
    "recipe-23m-round-up-e5m2-grad": REPRODUCED,
    "recipe-23m-e5m2-weights": REPRODUCED,
    "recipe-23m-e5m2-weights-than-gradients": REPRODUCED,
    "recipe-23m-e5m2-activations": CONTRADICTED,
    "recipe-23m-e5m2-activations-than-gradients": CONTRADICTED,
    "recipe-23m-e5m2-gradients": REPRODUCED,
    "recipe-23m-fp8-loss": CONTRADICTED,
    "recipe-23m-fp8-blockwise": REPRODUCED,
    "instability-lm-e4m3-bf16-loss": REPRODUCED,
    "instability-lm-e4m3-forward-loss": CONTRADICTED,
    "te-e4m3-backward": REPRODUCED,
}


FORM_AGAIN = {one.id: NOT_RUN for one in RECIPE_AGAIN.comparisons}


def test_of_the_recipes_table_every_claim_is_decided_by_its_rule(tables: Path) -> None:
    runs = with_losses(RECIPE, LOSSES)
    export(runs, "recipe_23m", tables)
    assert verdicts("recipe_23m") == DECIDED | FORM_AGAIN | {"recipe-23m-fp8-blockwise": NOT_RUN}
    export(runs, "recipe_23m_blockwise", tables)  # that claim has a table of its own
    assert verdicts("recipe_23m") == DECIDED | FORM_AGAIN
    assert stated_lots.decided("recipe_23m") == "14 of 25"
    assert stated_lots.finished("recipe_23m") == "65 of 65"
    table = stated_lots.arms(RECIPE)
    assert table.count("\n") == 1 + len(RECIPE.arms)
    assert "| E5M2 weights | 5 of 5 | 3.2300 | +0.0300 |" in table
    assert stated_lots.rounded_down(RECIPE) == "8 of 20"  # E4M3 all, weights and activations none, gradients by chance
    rates = {one.claim.id: one.claim.rate for one in stated_lots.judged("recipe_23m")}
    for claims in TOGETHER:
        assert [rates[one.id] for one in claims] == pytest.approx([0.05 / len(claims)] * len(claims))


@pytest.mark.slow
def test_with_three_seeds_nothing_is_decided_and_a_run_that_diverged_is_no_equal(tables: Path) -> None:
    runs = with_losses(RECIPE, LOSSES)
    lost = (runs["config.seed"] == 4) & (runs["config.precision.schedule.0.plan.layers.*"] == "fp8_blockwise")
    runs.loc[lost, ["state", LOSS]] = "diverged", np.nan
    for name in ("recipe_23m", "recipe_23m_blockwise"):
        export(runs, name, tables)
    assert verdicts("recipe_23m") == DECIDED | FORM_AGAIN | {"recipe-23m-fp8-blockwise": UNCLEAR}
    assert f"| {BLOCKWISE} | 4 of 5 |" in stated_lots.arms(RECIPE)
    for name in ("recipe_23m", "recipe_23m_blockwise"):
        export(runs[runs["config.seed"] < 3], name, tables)
    assert {*verdicts("recipe_23m").values()} == {NOT_RUN}


def test_other_seeds_decide_rows_of_their_own_and_an_arm_without_runs_is_said(tables: Path) -> None:
    runs = with_losses(RECIPE_AGAIN, LOSSES)
    export(runs[runs["config.precision.schedule.0.plan.layers.*"] != "fp8_blockwise"], RECIPE_AGAIN.sweep, tables)
    as_before = {f"{one.id}-again": DECIDED[one.id] for one in RECIPE.comparisons}
    assert verdicts("recipe_23m") == dict.fromkeys(DECIDED, NOT_RUN) | as_before | {
        "recipe-23m-fp8-blockwise-again": NOT_RUN
    }
    assert f"| {BLOCKWISE} | not run |" in stated_lots.arms(RECIPE_AGAIN)
    assert "| E5M2 weights | 12 of 12 |" in stated_lots.arms(RECIPE_AGAIN)
    worse, alike = "recipe-23m-ocp-worse-e4m3-again", "recipe-mxfp8-is-bf16-small-again"
    assert float(stated_lots.mean_difference(worse)) == pytest.approx(0.02 - 0.001, abs=5e-4)
    assert 0 < float(stated_lots.at_most(alike)) < 0.005
    assert {stated_lots.needed_units(worse), stated_lots.needed_units(alike)} == {"0 of 12"}
    without_runs = "recipe-23m-fp8-blockwise-again"
    assert {of(without_runs) for of in (stated_lots.mean_difference, stated_lots.at_most)} == {NOT_RUN}
    export(runs, "recipe_23m_blockwise_again", tables)
    assert f"| {BLOCKWISE} | 12 of 12 | 4.0510 |  |  |" in stated_lots.arms(RECIPE_AGAIN)


FIRST_FORM = "optimizer.lr=1.220703125e-04,4.8828125e-04,1.953125e-03,7.8125e-03,3.125e-02,1.25e-01"


def test_the_rates_of_the_papers_figure_in_two_forms_and_seeds_that_no_run_has_had() -> None:
    jobs = compose(f"+sweep={PAIRED}")
    powers = {round(np.log2(one.values["optimizer"]["lr"])) for one in jobs}
    assert powers == {*range(-14, -2)}
    seeds = {one.values["seed"] for one in jobs}
    assert len(jobs) == 3 * 12 * len(seeds) == 144
    assert not seeds & set(results.load([ROOT / "results" / "lr_sensitivity"], "runs")[SEED])
    first = compose(f"+sweep={PAIRED}", "seed=4", FIRST_FORM)
    rates = [one.values["optimizer"]["lr"] for one in first]
    assert (len(rates), {*rates}) == (18, {2.0**power for power in range(-13, -2, 2)})
    assert {*WINDOW} <= {*rates}


MXFP8_STACK = "precision=mxfp8 seeds=[0,1,2,3] data_seed=27"
RATE_OF_PAIRS = "optimizer.lr=4.8828125e-04"


@pytest.mark.parametrize(
    ("command", "jobs"),
    [
        ("+sweep=recipe_23m seed=0", 13),
        ("+sweep=recipe_23m_again seed=5", 9),
        (f"+sweep={PAIRED} seed=4 {FIRST_FORM}", 18),
        (f"+sweep=fp4_where seed=0 {RATE_OF_PAIRS}", 11),
        (f"+sweep=fp4_rounding seed=0 train.steps=600 {RATE_OF_PAIRS}", 7),
        (f"+sweep=moe seed=0 train.steps=800 {RATE_OF_PAIRS}", 3),
        ("+sweep=olmo_gains seed=0", 7),
        ("+sweep=layernorm_affine seed=0 model.num_heads=4 train.steps=1221 train.batch_size=64 precision=mxfp8", 4),
        ("+sweep=spike_search_23m", 12),
        (f"+experiment=attention model=residual_mlp,residual_mlp_attention {MXFP8_STACK}", 2),
        (f"+experiment=optimizers optimizer=sgd,sgd_momentum {MXFP8_STACK}", 2),
        (f"+experiment=activations_and_norm model.num_layers=3,4 model.activation=gelu,swiglu {MXFP8_STACK}", 4),
        ("+sweep=depth_width seeds=[0,1] data_seed=27", 54),
    ],
)
def test_a_lots_command_has_the_jobs_of_its_plan(command: str, jobs: int) -> None:
    assert len({fingerprint_of(read_run(one.values)) for one in compose(*command.split())}) == jobs


def paired_runs(p1: float, p2: float) -> pd.DataFrame:
    """Return runs of the first form, best at 2^-9 for all norms, with MXNorm higher by `p1` and `p2` above 2^-6."""
    runs = runs_of(f"+sweep={PAIRED}", FIRST_FORM)
    loss = 2.6 + 0.2 * (np.log2(runs[RATE]) + 9).abs() + runs[SEED] / 100
    beyond = (runs[RATE] > 2.0**-6).astype(float) + np.random.default_rng(0).normal(0, 0.01, len(runs))
    loss += beyond * (p1 * (runs[NORM_CHOICE] == "mxnorm_p1") + p2 * (runs[NORM_CHOICE] == "mxnorm_p2"))
    return runs.assign(**{LOSS: loss, "loss": loss})


def test_learning_rates_are_judged_and_shown_by_norm(tables: Path) -> None:
    export(paired_runs(0.12, 0.005), PAIRED, tables)
    assert verdicts(PAIRED) == {
        "mxnorm-best-rate-p1": REPRODUCED,
        "mxnorm-best-rate-p2": REPRODUCED,
        "mxnorm-high-rates-p1": REPRODUCED,
        "mxnorm-high-rates-p2": CONTRADICTED,  # within the margin
        "mxnorm-high-rates-alive": REPRODUCED,  # none of 48
    }
    assert stated_lots.finished(PAIRED) == "72 of 72"
    rows = stated_lots.by_rate(PAIRED).splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == [f"2^{power}" for power in range(-13, -2, 2)]
    assert "2.655" in rows[4]  # at 2^-9 the mean of the seeds


def test_new_pairs_stand_in_for_the_two_of_older_code(tables: Path) -> None:
    for path in (ROOT / "results").glob("lr_sensitivity_runs*"):
        (tables / path.name).symlink_to(path)
    stated_lots.judged.cache_clear()
    assert SENSITIVITY == (PAIRED, "lr_sensitivity")
    assert {*verdicts(PAIRED).values()} == {NOT_RUN}  # two pairs
    export(paired_runs(0.12, 0.15), PAIRED, tables)
    assert {*verdicts(PAIRED).values()} == {REPRODUCED}
    assert all(one.units == 4 for one in stated_lots.judged(PAIRED))


def test_a_seed_without_its_runs_at_high_rates_is_not_counted(tables: Path) -> None:
    """A seed that was cut off at low rates would have its best rate there, and no divergence."""
    runs = paired_runs(0.12, 0.15)
    cut_off = (runs["config.seed"] == runs["config.seed"].max()) & (runs[RATE].astype(float) > 2.0**-9)
    export(runs[~cut_off], PAIRED, tables)
    claims = stated_lots.judged(PAIRED)
    assert {one.units for one in claims} == {3}
    assert all("without all runs: 1" in note_of(one) for one in claims)
    assert {*verdicts(PAIRED).values()} == {NOT_RUN}


@pytest.mark.parametrize("id", ["instability-lm-affine", "instability-lm-affine-rate"])
def test_gains_on_and_off_are_compared_at_one_rate(id: str) -> None:
    """Gains on and off are compared at one rate.

    Figure 12's first row once took both rates of its sweep for one arm, so that no run could have decided it.
    """
    runs = runs_of("+sweep=layernorm_affine", "seed=0,1,2,3").assign(loss=3.0)
    (claim,) = (claim for claim in instability_language.CLAIMS if claim.id == id)
    assert judge(claim, Tables(instead={"runs": runs})).units == 4

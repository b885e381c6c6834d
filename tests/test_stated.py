"""Sweeps of recipes have their stated arms, with five pairs each, rows that judge them, and figures that show them."""

from __future__ import annotations

import pandas as pd
import pytest
from each import slow_but
from made_runs import runs_of, with_losses

from analysis import arm_losses
from analysis.arm_losses import BY_SWEEP
from analysis.fp4 import errors
from analysis.fp4.arms import BF16
from analysis.ledger import fp4_recipes, recipe_23m
from analysis.ledger.claim import NOT_RUN, judge
from analysis.ledger.rules import CONTRADICTED, REPRODUCED, UNCLEAR
from analysis.ledger.tables import Tables
from analysis.stated import tokens_of
from analysis.units import STEPS, chosen

pytestmark = pytest.mark.usefixtures("figure_rules")
CLAIMS = {claim.id: claim for claim in (*fp4_recipes.CLAIMS, *recipe_23m.CLAIMS)}


@pytest.mark.integration
@pytest.mark.parametrize("name", slow_but(["fp4_signs", "fp4_tail", "recipe_23m", "recipe_23m_again"], BY_SWEEP))
def test_every_job_is_of_one_arm_and_every_arm_has_its_pairs_of_seeds(name: str) -> None:
    runs, arms = runs_of(f"+sweep={name}"), BY_SWEEP[name].arms
    are_of = pd.DataFrame({one: chosen(runs, arm) for one, arm in arms.items()})
    assert (are_of.sum(axis=1) == 1).all()
    for one in arms:
        own = runs[are_of[one]]
        assert sorted(own["config.seed"]) == [*BY_SWEEP[name].seeds]
        assert (own["config.seed"] == own["config.data_seed"]).all()
    tokens = runs["config.train.steps"] * runs["config.train.batch_size"] * runs["config.train.sequence_length"]
    assert tokens.min() == pytest.approx(4e7, rel=0.03)
    of = BY_SWEEP[name]
    assert len(of.seeds) * tokens_of(of, arms) == tokens.sum()


def test_every_comparison_is_of_two_of_its_arms_and_is_a_row_of_its_own() -> None:
    for of in BY_SWEEP.values():
        assert any(arm == BF16 or {**BF16, STEPS: arm.get(STEPS)} == arm for arm in of.arms.values())
        for one in of.comparisons:
            assert len({*one.pairs}) >= 2
            assert {*one.pairs} <= of.arms.keys()
            assert not (one.divergences and one.beside)
    not_computed = {"fp4-range-eden", "fp4-scales-oscireset"}
    assert {*CLAIMS} == {one.id for of in BY_SWEEP.values() for one in of.comparisons} | not_computed
    for claim in not_computed:
        assert judge(CLAIMS[claim], Tables(instead={"runs": runs_of("+sweep=fp4_signs")})).verdict == NOT_RUN


def test_a_difference_is_compared_with_another_one() -> None:
    """Stochastic rounding costs 0.05 more than rounding to nearest where values are clipped, and 0.01 elsewhere."""
    of = BY_SWEEP["fp4_clipping"]
    losses = {
        "S, floor": 0.25,
        "N, floor": 0.2,
        "S, floor, 3/4": 0.11,
        "N, floor, 3/4": 0.1,
        "S, ceil": 0.3,
        "N, ceil": 0.2,
    }
    runs = with_losses(of, losses)
    found = {one.id: judge(CLAIMS[one.id], Tables(instead={"runs": runs})) for one in of.comparisons}
    assert found["fp4-clipping-explains-headroom"].verdict == REPRODUCED
    assert found["fp4-clipping-explains-headroom"].evidence.found.value == pytest.approx(0.04, abs=1e-3)
    assert found["fp4-clipping-explains-ceil"].verdict == CONTRADICTED
    dead = chosen(runs, of.arms["S, floor"])
    died = Tables(instead={"runs": runs.assign(state=runs["state"].mask(dead, "diverged"))})
    assert judge(CLAIMS["fp4-clipping-dies"], died).verdict == REPRODUCED
    assert judge(CLAIMS["fp4-clipping-headroom"], died).verdict == UNCLEAR


def test_rows_are_judged_and_the_figure_shows_each_arms_loss_and_error() -> None:
    of = BY_SWEEP["fp4_signs"]
    runs = with_losses(of, {"none": 0.06, "all +1": 0.02, "by call": 0.05, "by call, after": 0.02})
    verdicts = {one.id: judge(CLAIMS[one.id], Tables(instead={"runs": runs})).verdict for one in of.comparisons}
    assert verdicts["fp4-signs-harm"] == verdicts["fp4-signs-hadamard"] == REPRODUCED
    assert verdicts["fp4-signs-help"] == CONTRADICTED
    assert verdicts["fp4-signs-after"] == REPRODUCED  # though no two runs end at the same loss
    found = arm_losses.losses(of, runs)
    assert {name: round(effect.value, 2) for name, effect in found.items()} == {
        **dict.fromkeys(of.arms.keys() - {"bf16"}, 0.0),
        "none": 0.06,
        "all +1": 0.02,
        "by call": 0.05,
        "by call, after": 0.02,
    }
    bias = pd.DataFrame({"fingerprint": runs["fingerprint"], "step": 600, "model/ratio": 0.5})
    figure = arm_losses.draw(of, runs, bias)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [*of.arms][1:]
    with pytest.raises(ValueError, match="no arm of fp4_signs has a pair of seeds with bf16"):
        arm_losses.draw(of, runs[~chosen(runs, BF16)], bias)


def test_the_dead_are_counted_beside_their_own_arm() -> None:
    of = BY_SWEEP["fp4_signs"]
    runs = with_losses(of, {"none": 0.06})
    dead = (chosen(runs, BF16) | chosen(runs, of.arms["none"])) & (runs["config.seed"] == 0)
    assert dead.sum() == 2
    figure = arm_losses.draw(of, runs.assign(state=runs["state"].mask(dead, "diverged")), None)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [f"{name} (1 died)" if name == "none" else name for name in [*of.arms][1:]]


def test_the_other_figure_shows_each_operands_noise_and_each_linears_gradient() -> None:
    """Runs of seed 1 are a decibel noisier, as is layer 1. The last measurement counts."""
    of = BY_SWEEP["fp4_where"]
    runs = runs_of(f"+sweep={of.sweep}")
    noisier = (runs["config.seed"] == 1).astype(float)
    places = {f"layers.{i}.{name}": float(i) for i in (0, 1) for name in errors.LINEARS}
    noise = {f"{name}/forward_x/sqnr_db": 20.0 - i - noisier for name, i in places.items()}
    turned = {f"{name}.weight/cosine": 0.9 - 0.1 * i for name, i in places.items()}
    frames = [
        pd.concat([runs[["fingerprint"]].assign(step=400, **dict.fromkeys(values, 0.0)), frame.assign(step=600)])
        for values in (noise, turned)
        for frame in [runs[["fingerprint"]].assign(**values)]
    ]
    saturation = frames[0][frames[0]["fingerprint"].isin(runs.loc[chosen(runs, of.arms["NV F"]), "fingerprint"])]
    figure = errors.draw(of, runs, saturation, frames[1])
    left, right = figure.axes
    assert [label.get_text() for label in left.get_yticklabels()] == [*of.arms]
    (line, point) = left.lines
    assert list(line.get_xdata()) == pytest.approx([18.8, 19.8])
    assert (point.get_xdata()[0], round(point.get_ydata()[0])) == (pytest.approx(19.3), [*of.arms].index("NV F"))
    assert len(right.lines) == 2 * len(errors.LINEARS) * len(of.arms)
    assert list(right.lines[0].get_xdata()) == pytest.approx([0.1, 0.2])
    alone = frames[1].assign(**{f"layers.{i}.attention.wo.weight/dgrad_w/ratio": 0.3 - 0.1 * i for i in (0, 1, 3)})
    panel = errors.draw(of, runs, saturation, alone).axes[2]
    assert len(panel.lines) == 2 * len(of.arms)
    assert list(panel.lines[0].get_xdata()) == pytest.approx([0.2, 0.3])
    with pytest.raises(ValueError, match="no run of an arm of fp4_where has measured its errors"):
        errors.draw(of, runs, saturation[:0], frames[1][:0])

"""The pilot of the main question has its rule, and the sweep and the claims are what it decided."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
import yaml

from analysis.ledger import mxnorm_training as claims
from analysis.ledger.claim import Claim, judge
from analysis.ledger.tables import Tables
from analysis.pages import pilot, spike_pilot
from mxstudy import results

ROOT = Path(__file__).parents[1]
LOW, HIGH = 2.0**-10, 2.0**-9


def at(rate: float, base: float, less: Sequence[float]) -> pd.DataFrame:
    rows = [
        {
            pilot.RATE: rate,
            pilot.SEED: seed,
            pilot.NORM_CHOICE: norm,
            pilot.LOSS: base + 0.1 * seed + own * (norm == pilot.ARM),
        }
        for seed, own in enumerate(less)
        for norm in (pilot.BASELINE, pilot.ARM)
    ]
    return pd.DataFrame(rows)


def spread(s: float) -> list[float]:
    """Return four differences with that standard deviation."""
    return [0.1 + sign * s * 0.75**0.5 for sign in (1, -1, 1, -1)]


@pytest.mark.parametrize(
    ("at_low", "at_high", "decided"),
    [
        ((2.0, 0.001), (1.9, 0.001), (HIGH, 8)),  # never fewer than eight
        ((1.8, 0.001), (1.9, 0.001), (LOW, 8)),
        ((2.0, 0.001), (1.9, 0.027), (HIGH, 10)),  # 2.93 * 0.027 / 0.026 is 3.04
        ((2.0, 0.001), (1.9, 0.050), (LOW, 8)),  # the best rate needs 32
        ((2.0, 0.040), (1.9, 0.050), (HIGH, 32)),  # both need more than 16
    ],
)
def test_the_rule(at_low: tuple[float, float], at_high: tuple[float, float], decided: tuple[float, int]) -> None:
    runs = pd.concat([at(rate, base, spread(s)) for rate, (base, s) in ((LOW, at_low), (HIGH, at_high))])
    assert pilot.decided(runs) == pilot.Plan(*decided)


def test_the_sweep_and_the_claims_are_what_the_pilot_decided() -> None:
    runs = results.load([ROOT / "results" / "mxnorm_equivalence_pilot"], "runs")
    plan = pilot.decided(runs)
    sweep = yaml.safe_load((ROOT / "sweeps" / "mxnorm_equivalence.yaml").read_text())
    varied = sweep["hydra"]["sweeper"]["params"]
    assert (sweep["optimizer"]["lr"], varied["seed"]) == (plan.rate, [*range(plan.pairs)])
    assert len(varied["norm"]) == pilot.ARMS
    assert {claim.needs for claim in stated()} == {plan.pairs}
    assert not set(varied["seed"]) & set(runs[pilot.SEED])


def test_no_claim_is_judged_by_the_pilot(tmp_path: Path) -> None:
    for table in (ROOT / "results").glob("mxnorm_equivalence_pilot_*"):
        (tmp_path / table.name).symlink_to(table)
    assert len(results.load([tmp_path / "mxnorm_equivalence_pilot"], "runs")) == 16
    assert all(judge(claim, Tables(tmp_path)).evidence is None for claim in claims.CLAIMS)


def stated() -> list[Claim]:
    """Return the claims whose rule was stated before, with the pilot's."""
    return [one for one in claims.CLAIMS if one.rule in (claims.STATED_ALIKE, claims.STATED_ABOVE)]


def test_the_pilot_of_spikes_takes_the_lowest_rate_with_a_spike_and_no_divergence() -> None:
    runs = pd.DataFrame(
        [
            {pilot.RATE: rate, spike_pilot.BETA2: beta2, "spikes": spikes, "state": state, pilot.LOSS: 3.0}
            for rate, beta2, spikes, state in (
                (LOW, 0.98, 0, "finished"),
                (LOW, 0.999, 0, "finished"),
                (HIGH, 0.98, 2, "diverged"),
                (HIGH, 0.999, 1, "finished"),
                (HIGH, 0.999, 0, "finished"),
                (2 * HIGH, 0.98, 3, "finished"),
            )
        ]
    )
    assert spike_pilot.chosen(runs) == (HIGH, 0.999)
    assert spike_pilot.chosen(runs[runs["spikes"] == 0]) is None

"""The ledger's judges of students and of forks count runs, data seeds and open runs as the rules say."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pandas as pd
import pytest
from each import each

from analysis.ledger.claim import Claim, judge
from analysis.ledger.documents import DOCUMENTS
from analysis.ledger.rules import UNCLEAR, higher
from analysis.ledger.students import Diverges, Intervention
from analysis.ledger.tables import Tables
from analysis.units import PLAN

ROOT = Path(__file__).parents[1]
ROWS = {claim.id: claim for claims in DOCUMENTS.values() for claim in claims}
MX, FP32 = {PLAN: "mxfp8"}, {PLAN: "fp32"}


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def stack(plan: str, data_seed: int, outcomes: str, **columns: object) -> pd.DataFrame:
    """Return one replica per letter: d diverged, o open, . neither."""
    rows = [
        {
            "fingerprint": f"{plan}{data_seed}",
            "replica": seed,
            "state": "finished",
            "commit": "a",
            "config.study": "student_teacher",
            PLAN: plan,
            "config.seed": seed,
            "config.data_seed": data_seed,
            "config.train.steps": 9000,
            "config.model.num_layers": 4,
            "config.model.hidden_size": 512,
            "outcome.diverged_at": 4000.0 if letter == "d" else math.nan,
            "outcome.rising_at": 8700.0 if letter == "o" else math.nan,
        }
        | columns
        for seed, letter in enumerate(outcomes)
    ]
    return pd.DataFrame(rows)


def of_students(judge: Diverges, *stacks: pd.DataFrame):
    return judge(Tables(instead={"runs": pd.concat(stacks, ignore_index=True)}))


def test_students_that_are_up_at_the_end_are_in_the_fraction() -> None:
    """9 of 32 have diverged by step 8,500, and 15 of 32 are up at the end. Neither is a share of 26."""
    stacks = [
        stack("mxfp8", seed, letters) for seed, letters in enumerate(("dddoo...", "ddoo....", "ddo.....", "ddo....."))
    ]
    found = of_students(Diverges((), MX), *stacks)
    assert found.found.value == pytest.approx(9 / 32)
    assert found.note == "9 of 32 diverged by step 8,500, 6 more are up at the end"
    assert found.found.count == 4  # data seeds
    assert of_students(Diverges((), MX, unstable=True), *stacks).found.value == pytest.approx(15 / 32)


def test_open_students_of_a_lot_that_was_stated_are_in_no_fraction() -> None:
    """results/prestated.md: a replica that is up at its end for fewer steps is counted, and is in no fraction."""
    for name in ("attention-less", "sgd", "fig-2-swiglu"):
        found = judge(ROWS[f"instability-{name}"], Tables())
        assert found.evidence is not None
        assert "up at the end and in no fraction" in found.evidence.note, name


def test_open_forks_are_in_no_fraction() -> None:
    """Leave the open one of a data seed's four forks out: one of the other three diverges, of the control none."""
    plan = "config.intervention.plan.layers.*"
    runs = pd.DataFrame(
        [("a", "finished", "x", "fp32", math.nan), ("b", "finished", "x", None, 0.0)],
        columns=["fingerprint", "state", "commit", plan, "config.intervention.perturbed_weight"],
    )
    forks = pd.DataFrame(
        [
            (name, "0.88", seed, 700.0 if letter == "d" else math.nan, 1400.0 if letter == "o" else math.nan)
            for name, letters in (("a", "do.."), ("b", "...."))
            for seed in range(4)
            for letter in letters
        ],
        columns=["fingerprint", "point", "data_seed", "diverged_at", "rising_at"],
    )
    change, against = {plan: "fp32"}, {"config.intervention.perturbed_weight": 0}
    found = Intervention("0.88", change, against)(Tables(instead={"runs": runs, "forks": forks}))
    assert found.found.value == pytest.approx(1 / 3)
    assert found.note == "4 of 12 diverged, 4 more are up at the end and in no fraction; 0 of 16 diverged"


@each("figure", ["2", "4", "5", "7", "9", "10"])
def test_a_figures_claims_that_were_stated_together_are_corrected_by_their_number(figure: str) -> None:
    """The rule for all student lots: all claims about one figure of the paper hold together at 95 %."""
    claims = [one for one in ROWS.values() if re.search(rf"figure {figure}[ab]?$", one.where)]
    students = [one for one in claims if one.kind == "students"]
    assert students
    assert {one.comparisons for one in students} == {len(students)}


def test_initial_seeds_of_a_data_seed_are_one_unit() -> None:
    stacks = [stack("mxfp8", seed, "dd.." if seed else "dddd") for seed in range(4)]
    stacks += [stack("fp32", seed, "..") for seed in range(4)]
    found = of_students(Diverges((), MX, FP32), *stacks).found
    assert sorted(found.units) == [0.5, 0.5, 0.5, 1.0]
    low, high = found.interval(0.95)
    assert 0 < low < found.value < high


def test_a_data_seed_counts_with_all_runs_of_both_arms_or_not_at_all() -> None:
    """Without its deeper runs data seed 4 would look as if MX never diverged, and 5 has no baseline."""
    depth = "config.model.num_layers"
    stacks = [
        stack(
            plan, seed, "d..." if plan == "mxfp8" else "....", **{"fingerprint": f"{plan}{seed}{layers}", depth: layers}
        )
        for plan in ("mxfp8", "fp32")
        for seed in range(6)
        for layers in (3, 4)
        if (plan, seed, layers) != ("mxfp8", 4, 4) and (plan, seed) != ("fp32", 5)
    ]
    found = of_students(Diverges((), MX, FP32, (depth,)), *stacks)
    assert (found.found.count, found.incomplete) == (4, 2)
    assert found.note.startswith("8 of 32 diverged by step 8,500; baseline: 0 of 32 diverged")


def test_settings_within_an_arm_are_named() -> None:
    stacks = [stack("mxfp8", seed, "d.", **{"config.student.gain": gain}) for seed, gain in enumerate(("mx", "bf16"))]
    claim = Claim(
        id="x", where="", says="", kind="students", there="", rule=higher(0.03, "ours"), judge=Diverges((), MX)
    )
    found = judge(claim, Tables(instead={"runs": pd.concat(stacks, ignore_index=True)}))
    assert (found.verdict, found.why) == (UNCLEAR, "student.gain differs within an arm")

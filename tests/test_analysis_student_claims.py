"""The students' claims are judged by data seeds, from frames made by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import pytest
from each import each
from scipy import stats
from student_frames import frame, replica

from analysis.instability import claims
from analysis.instability.claims import CLAIMS, LR, WIDTH, Finding, judged
from analysis.instability.fig03_overflow import COUNT
from analysis.ledger.claim import NOT_RUN, Claim, Evidence
from analysis.ledger.instability_runs import NOISE
from analysis.ledger.rules import CONTRADICTED, REPRODUCED, UNCLEAR, between
from analysis.ledger.tables import Missing, Tables
from analysis.pages import student_measurements
from analysis.statistics import Effect
from mxstudy.results import write_table

NONE = pd.DataFrame()
OF_MX, OF_GAINS, OF_INPUTS = (claim for claim in CLAIMS if claim.figure == 3)
(COMES_BACK,) = (claim for claim in CLAIMS if claim.of is claims.came_back)


RATES, OPEN = (2e-4, 4e-4, 6e-4), -1.0
NARROW, WIDE, OF_MIX, OF_RATES = (claim for claim in CLAIMS if claim.figure == 6)


def arm(precision: str, lost: dict[int, list[float]], **columns: object) -> list[dict[str, object]]:
    """Return replicas by data seed, with the steps at which they diverged, or NaN."""
    fidelity = {"mxfp8": "public_code", "fp32": "none"}[precision]
    shared = {"choice.precision": precision, "choice.fidelity": fidelity} | columns
    return [
        replica(f"{precision}{data}", i, lost=at, **{"config.data_seed": data, "best_loss": 0.1} | shared)
        for data, steps in lost.items()
        for i, at in enumerate(steps)
    ]


def stable(seeds: int, replicas: int = 1) -> dict[int, list[float]]:
    return {data: [math.nan] * replicas for data in range(seeds)}


def of(rows: list[dict[str, object]], claims: int = 1) -> Finding:
    return judged(OF_MX, frame(*rows), NONE, claims)


def test_the_unit_is_the_data_seed_and_open_replicas_are_left_out() -> None:
    ours = {0: [1, 1, math.nan, math.nan], 1: [1, 1, 1, math.nan], 2: [1] * 4, 3: [1, 1, 1, math.nan]}
    rows = [*arm("mxfp8", ours), *arm("fp32", stable(4, 2))]
    rows[2] |= {"outcome.rising_at": 900}
    found = of(rows)
    assert found.arm.to_dict() == pytest.approx({0: 2 / 3, 1: 0.75, 2: 1, 3: 0.75})
    assert (found.units, found.verdict, found.price) == (4, REPRODUCED, "")
    interval = stats.ttest_1samp(found.arm, 0).confidence_interval()
    assert (found.value, found.low) == (pytest.approx(found.arm.mean()), pytest.approx(min(interval.low, found.low)))
    assert of(rows, claims=3).low < found.low


def test_data_seeds_that_agree_still_have_an_interval() -> None:
    rows = [*arm("mxfp8", {data: [1.0] for data in range(4)}), *arm("fp32", stable(4))]
    found = of(rows)
    low = stats.binomtest(4, 4).proportion_ci(method="wilson").low
    assert found.low == pytest.approx(1 - math.hypot(1 - low, 1 - low))


def test_no_interval_leaves_what_a_share_can_be() -> None:
    """Student's interval over four data seeds, one of which differs, goes to 1.5 and beyond."""
    most = {0: [math.nan], 1: [1.0], 2: [1.0], 3: [1.0]}
    found = of([*arm("mxfp8", most), *arm("fp32", stable(4))])
    assert stats.ttest_1samp(found.arm, 0).confidence_interval().high > 1.5
    assert found.high == 1


@each(("seeds", "verdict"), [(0, NOT_RUN), (1, UNCLEAR), (3, UNCLEAR), (12, CONTRADICTED)])
def test_fewer_than_four_data_seeds_tell_nothing(seeds: int, verdict: str) -> None:
    same = stable(seeds, 4)
    assert of([*arm("mxfp8", same), *arm("fp32", same), *arm("fp32", {99: [math.nan]})]).verdict == verdict


def test_what_cannot_be_told_has_a_price() -> None:
    ours = {data: [1.0 if data % 2 else math.nan] * 4 for data in range(4)}
    found = of([*arm("mxfp8", ours), *arm("fp32", stable(4))])
    needed = int(found.price.split()[0])
    spread = found.arm.std(ddof=1)
    halves = [stats.t.ppf(0.975, n - 1) * spread / math.sqrt(n) for n in (needed - 1, needed)]
    assert found.verdict == UNCLEAR
    assert halves[1] < 0.5 <= halves[0]


def test_one_that_came_back_is_below_ten_times_its_best() -> None:
    rows = arm("mxfp8", {0: [5, 5, math.nan]}, **{"config.loss": "kl"})
    rows[0] |= {"loss": 0.9}
    runs = frame(*rows)
    assert claims.came_back(runs, NONE).fillna(-1).tolist() == [1, 0, -1]
    found = judged(COMES_BACK, runs, NONE, 1)
    assert (found.arm.to_dict(), found.verdict) == ({0: 0.5}, NOT_RUN)


def test_shares_are_those_before_the_divergence() -> None:
    runs = frame(*arm("mxfp8", {0: [100], 1: [math.nan], 2: [math.nan], 3: [math.nan]}))
    gain, up, down = (f"layers.0.up.{name}/{COUNT}" for name in ("norm.weight", "input", "weight"))
    rows = [
        {"fingerprint": f"mxfp8{data}", "replica": 0, "step": step, gain: share, up: share / 100, down: 1.0}
        for data in range(4)
        for step, share in ((0, 0.2), (50, 0.9 + 0.01 * data), (150, 0.0 if data else 1.0))
    ]
    gains, inputs = (judged(claim, runs, pd.DataFrame(rows), 1) for claim in (OF_GAINS, OF_INPUTS))
    assert gains.arm.to_dict() == pytest.approx({0: 0.9, 1: 0.91, 2: 0.92, 3: 0.93})
    assert gains.verdict == REPRODUCED
    assert inputs.arm[0] == pytest.approx((0.002 + 0.009) / 2)
    assert inputs.arm[1] == pytest.approx((0.002 + 0.0091) / 3)


def test_what_filled_the_last_bin_is_counted_to_the_divergence() -> None:
    of_arm = {"choice.teacher": "code"}
    runs = frame(*arm("mxfp8", {0: [400, math.nan]}, **of_arm), *arm("fp32", {0: [math.nan]}, **of_arm))
    gain = f"layers.0.up.norm.weight/{COUNT}"
    rows = [
        {"fingerprint": name, "replica": number, "step": step, gain: share}
        for name, number in (("mxfp80", 0), ("mxfp80", 1), ("fp320", 0))
        for step, share in ((100, 0.8), (200, 1.0), (300, 0.25), (400, 1.0))
    ]
    lines = claims.filled(runs, pd.DataFrame(rows)).splitlines()
    mx, fp32 = "precision mxfp8, fidelity public_code", "precision fp32, fidelity none"
    assert lines[2] == f"| {mx}, teacher code | 2 of 2 | 1 of 2 | 100 | 300 | 0 of 1 | 0.25 |"
    assert lines[3] == f"| {fp32}, teacher code | 1 of 1 | 0 of 1 | 100 | 400 | 0 of 0 | - |"


def test_the_report_has_a_line_a_claim(tmp_path, capsys) -> None:
    runs = pd.DataFrame(arm("mxfp8", {0: [1.0], 1: [1.0]}, **{"config.model.init": "torch"}))
    write_table(runs, tmp_path / "t_runs.parquet", {})
    claims.main(["--runs", str(tmp_path / "t"), "--figure", "11"])
    printed = capsys.readouterr().out
    assert "| smaller initial weights diverge less often in MXFP8 | - | - | 0 | not run | - |" in printed
    assert "0: 1, 1: 1" in printed


def grid(precision: str, width: int, lost: dict[int, list[float]]) -> list[dict[str, object]]:
    """Return replicas by data seed, with the steps at which they diverged, or NaN, or OPEN.

    Each data seed has six replicas, two per rate.
    """
    rows = []
    for data, steps in lost.items():
        for i, at in enumerate(steps):
            own = {"config.data_seed": data, "config.seed": i % 2, LR: RATES[i // 2], WIDTH: width}
            own |= {"config.model.num_layers": 4, "choice.precision": precision}
            own |= {"choice.fidelity": "none" if precision == "fp32" else "public_code"}
            own |= {"outcome.rising_at": 6700 if at == OPEN else math.nan}
            name = f"{precision}{width}-{data}"
            rows.append(replica(name, i, lost=math.nan if at == OPEN else at, **{"best_loss": 0.1} | own))
    return rows


NEVER = [math.nan] * 6


def test_fp32_is_stable_where_none_of_24_diverges_or_is_open() -> None:
    runs = frame(*grid("fp32", 512, dict.fromkeys(range(4), NEVER)))
    found = judged(NARROW, runs, NONE, 4)
    highest = stats.binomtest(0, 24).proportion_ci(1 - 0.05 / 4, method="wilson").high
    assert (found.high, found.verdict) == (pytest.approx(highest), REPRODUCED)
    assert judged(WIDE, runs, NONE, 4).verdict == NOT_RUN
    lost = dict.fromkeys(range(4), NEVER) | {3: [*NEVER[:5], OPEN]}
    found = judged(NARROW, frame(*grid("fp32", 512, lost)), NONE, 4)
    assert (found.arm[3], found.verdict) == (pytest.approx(1 / 6), UNCLEAR)
    seeds = int(found.price.split()[0])
    assert seeds > 4
    tight = stats.binomtest(seeds // 4, 6 * seeds).proportion_ci(1 - 0.05 / 4, method="wilson").high
    assert tight < 2 / 9


def test_fp32_is_not_stable_where_most_replicas_are_lost() -> None:
    lost = {data: [math.nan, 900, 800, OPEN, 700, 600] for data in range(4)}
    assert judged(WIDE, frame(*grid("fp32", 768, lost)), NONE, 4).verdict == CONTRADICTED


def test_open_replicas_leave_with_their_partners() -> None:
    ours = {data: [math.nan, math.nan, 900, 900, 900, 900] for data in range(4)}
    theirs = dict.fromkeys(range(4), NEVER) | {0: [OPEN, math.nan, math.nan, math.nan, math.nan, 50]}
    found = judged(OF_MIX, frame(*grid("mx_mix", 512, ours), *grid("fp32", 512, theirs)), NONE, 4)
    assert found.arm.to_dict() == pytest.approx({0: 4 / 5, 1: 4 / 6, 2: 4 / 6, 3: 4 / 6})
    assert found.baseline.to_dict() == pytest.approx({0: 1 / 5, 1: 0, 2: 0, 3: 0})
    assert (found.units, found.widths, found.verdict) == (4, [512], REPRODUCED)


def test_a_width_without_four_data_seeds_is_left_out_where_another_has_them() -> None:
    some = [900.0] * 6
    narrow = [*grid("mx_mix", 512, dict.fromkeys(range(4), some)), *grid("fp32", 512, dict.fromkeys(range(4), NEVER))]
    wide = [*grid("mx_mix", 768, dict.fromkeys(range(4), NEVER)), *grid("fp32", 768, dict.fromkeys(range(3), NEVER))]
    found = judged(OF_MIX, frame(*narrow, *wide), NONE, 4)
    assert (found.widths, found.value, found.verdict) == ([512], 1, REPRODUCED)
    both = judged(OF_MIX, frame(*narrow, *wide, *grid("fp32", 768, {3: NEVER})), NONE, 4)
    assert (both.widths, both.value) == ([512, 768], 0.5)
    few = judged(OF_MIX, frame(*wide), NONE, 4)
    assert (few.widths, few.units, few.verdict) == ([768], 3, UNCLEAR)
    assert judged(OF_MIX, frame(*grid("fp32", 512, {0: NEVER})), NONE, 4).verdict == NOT_RUN
    assert judged(OF_MIX, frame(*grid("fp32", 512, {0: NEVER}), *grid("mx_mix", 512, {1: NEVER})), NONE, 4).units == 0


def test_rates_are_paired_within_a_data_seed() -> None:
    most = [math.nan, math.nan, 5, 5, 900, 900]
    lost = dict.fromkeys(range(4), most) | {2: [math.nan, OPEN, 5, 5, 900, math.nan]}
    found = judged(OF_RATES, frame(*grid("mx_mix", 512, lost)), NONE, 4)
    assert found.arm.to_dict() == {0: 1, 1: 1, 2: 1, 3: 1}
    assert found.verdict == REPRODUCED
    nowhere = judged(OF_RATES, frame(*grid("mx_mix", 512, dict.fromkeys(range(20), NEVER))), NONE, 4)
    assert (nowhere.value, nowhere.verdict) == (0, CONTRADICTED)


def test_figure_6_is_described_by_width_and_rate(tmp_path, capsys) -> None:
    lost = {0: [math.nan, math.nan, 900, OPEN, 900, 900]}
    rows = [*grid("mx_mix", 512, lost), *grid("fp32", 512, {0: [*NEVER[:4], 70, math.nan]})]
    write_table(pd.DataFrame(rows), tmp_path / "t_runs.parquet", {})
    claims.main(["--runs", str(tmp_path / "t"), "--figure", "6"])
    printed = capsys.readouterr().out
    assert "| in MX mix instabilities come with larger rates | arm, width 512 | 0: 1 |" in printed
    assert "| 512 | 0.0004 | 0 of 2 | 1 of 1 | 1 | 0 | 1 |" in printed
    assert "| 512 | 0.0006 | 1 of 2 | 2 of 2 | 2 | 0 | 1 |" in printed
    assert "| precision mx_mix, hidden_size 512, lr 0.0004 | 2 |" in printed


# ------------------------------------------------------------------------------------------------------- on their page


def test_a_claim_with_fewer_data_seeds_than_others_has_dashes_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows keep the claims' order, and one without tables has dashes alone."""

    def claim(name: str, found: dict[int, float]) -> Claim:
        def judge(tables: Tables) -> Evidence:
            if not found:
                raise Missing("no runs")
            return Evidence(Effect(pd.Series(found)), "data seeds")

        return replace(NOISE[0], id=name, judge=judge, rule=between(0, 2, "ours"))

    whole = claim("whole", {47: 1.0, 48: 1.01, 49: 0.99, 50: 1.002})
    rows = (claim("part", {48: 0.12345, 50: 0.5}), whole, claim("none", {}))
    monkeypatch.setattr(student_measurements, "NOISE", rows)
    lines = [line.strip("| ").split(" | ") for line in student_measurements.by_data_seed().splitlines()]
    assert lines[0] == ["row", *(f"data seed {seed}" for seed in (47, 48, 49, 50)), "rule", "verdict"]
    assert [line[:-2] for line in lines[2:]] == [
        ["part", "-", "0.1235", "-", "0.5"],
        ["whole", "1", "1.01", "0.99", "1.002"],
        ["none", "-", "-", "-", "-"],
    ]
    assert [line[-1] for line in lines[2:]] == ["not run, fewer than 4 units", REPRODUCED, NOT_RUN]

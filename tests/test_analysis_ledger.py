"""The ledger's rules and judges are right for runs made by hand, its list only grows, its page says what tables say."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from each import each

from analysis.ledger import page
from analysis.ledger.claim import IMPOSSIBLE, KINDS, NOT_RUN, PRETRAINING, Claim, judge
from analysis.ledger.documents import DOCUMENTS
from analysis.ledger.page import note_of, pages, tidy
from analysis.ledger.rules import CONTRADICTED, REPRODUCED, UNCLEAR, Rule, any_higher, any_lower, between, equal, higher
from analysis.ledger.tables import Tables
from analysis.ledger.training import Difference
from analysis.statistics import LEAST_UNITS, Effect, Exact, student
from analysis.units import MLP, PLAN, WIDTH, scale
from mxstudy.results import ConfigError

ROOT = Path(__file__).parents[1]
ROWS = {claim.id: claim for claims in DOCUMENTS.values() for claim in claims}
RMS, P2 = {"config.norm.kind": "rmsnorm"}, {"config.norm.kind": "mxnorm"}
MX, FP32 = {PLAN: "mxfp8"}, {PLAN: "fp32"}


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def effect(*units: float, died: int = 0) -> Effect:
    return Effect(pd.Series(units, dtype=float), died=(died, 2 * len(units)))


# --------------------------------------------------------------------------------------------------------------- rules

ALIKE, WORSE = equal(0.03, "ours"), higher(0.03, "ours")
NEAR, FAR, WIDE = (0.01, 0.012, 0.008, 0.01), (0.5, 0.51, 0.49, 0.5), (0.2, -0.3, 0.1, -0.1)


@each(
    ("rule", "units", "verdict"),
    [
        (ALIKE, NEAR, REPRODUCED),
        (ALIKE, FAR, CONTRADICTED),
        (ALIKE, WIDE, UNCLEAR),
        (ALIKE, NEAR[:2], UNCLEAR),  # two runs per arm are too few
        (WORSE, FAR, REPRODUCED),
        (WORSE, [-unit for unit in FAR], CONTRADICTED),
        (WORSE, NEAR, CONTRADICTED),  # different from 0, but within what counts as equal
        (WORSE, WIDE, UNCLEAR),
        (between(0.4, 0.6, "ours"), FAR, REPRODUCED),
        (between(0.6, math.inf, "ours"), FAR, CONTRADICTED),
    ],
)
def test_an_interval_decides(rule: Rule, units: Sequence[float], verdict: str) -> None:
    assert rule.verdict(effect(*units)) == verdict


def test_equivalence_is_two_one_sided_tests() -> None:
    """The interval has 90 %: half-widths of 0.024 and 0.034 around 0 are decided by that alone."""
    units = (0.02, -0.02, 0.02, -0.02)
    assert effect(*units).interval(0.95)[1] > 0.03 > effect(*units).interval(0.90)[1]
    assert ALIKE.verdict(effect(*units)) == REPRODUCED
    assert between(-0.03, 0.03, "ours").verdict(effect(*units)) == UNCLEAR


def test_a_small_difference_that_is_clear_is_reproduced_only_where_any_difference_was_claimed() -> None:
    small = effect(0.01, 0.011, 0.009, 0.01)
    assert higher(0.05, "ours").verdict(small) == CONTRADICTED
    assert any_higher(0.05, "ours").verdict(small) == REPRODUCED
    assert any_lower(0.05, "ours").verdict(small) == CONTRADICTED


def test_no_arm_of_which_a_run_died_is_called_alike() -> None:
    assert ALIKE.verdict(effect(*NEAR, died=1)) == UNCLEAR
    assert WORSE.verdict(effect(*NEAR, died=1)) == UNCLEAR


def test_the_price_is_how_many_units_with_this_mean_and_spread_would_tell() -> None:
    """Check by hand: the 90 % interval has a half-width of 0.028 with five units, and of 0.035 with four."""
    near_0 = effect(0.02, -0.02, 0.03, -0.03)
    assert ALIKE.needed(near_0) == 5
    assert ALIKE.needed(effect(0.03, -0.03)) == 8
    assert ALIKE.needed(effect(*WIDE)) is None
    assert ALIKE.needed(effect(*NEAR, died=1)) is None
    always = (pd.Series([1.0] * 8), pd.Series([0.0] * 8))
    assert WORSE.needed(Effect(pd.Series([1.0, 1.0]), outcomes=always)) == LEAST_UNITS


def test_each_row_that_cannot_tell_says_what_would() -> None:
    rows = json.loads((ROOT / "results/claims.json").read_text())
    unclear = [row for row in rows if row["verdict"] == UNCLEAR and row["n"] > 1 and "no run spikes" not in row["note"]]
    assert len(unclear) > 20
    assert [row["id"] for row in unclear if not row["note"].endswith(" would tell")] == []


def test_arithmetic_needs_no_units() -> None:
    assert between(1, 2, "ours").verdict(Exact(1.5)) == REPRODUCED
    assert between(1, 2, "ours").verdict(Exact(2.5)) == CONTRADICTED
    assert (tidy(1e-16), tidy(math.nan), tidy(1.23456)) == (0.0, None, 1.235)


# ------------------------------------------------------------------------------------------------------ trained models


def trained(norm: str, losses: Sequence[float], **columns: object) -> pd.DataFrame:
    """Return one run for each loss, with seeds from 0."""
    rows = [
        {
            "fingerprint": f"{norm}{seed}{columns}",
            "state": "finished" if math.isfinite(loss) else "diverged",
            "commit": "a",
            "config.study": "pretrain",
            "config.norm.kind": norm,
            "config.seed": seed,
            "config.data_seed": seed,
            "config.model.num_layers": 2,
            "config.model.hidden_size": 64,
            "config.train.steps": 10,
            "config.train.batch_size": 100,
            "config.train.sequence_length": 1000,
            "loss": loss,
            "validation_loss": loss,
        }
        | columns
        for seed, loss in enumerate(losses)
    ]
    return pd.DataFrame(rows)


def verdict_on(rule: Rule, *frames: pd.DataFrame, over: Sequence[str] = ()):
    claim = Claim(
        id="x", where="", says="", kind=PRETRAINING, there="", rule=rule, judge=Difference((), P2, RMS, over=over)
    )
    return judge(claim, Tables(instead={"runs": pd.concat(frames, ignore_index=True)}))


BASE, SAME = [2.0, 2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7], [2.005, 2.1, 2.2, 2.305, 2.4, 2.5, 2.605, 2.7]


BOTH = (("rmsnorm", BASE), ("mxnorm", SAME))


def test_an_arm_of_which_six_of_eight_diverged_is_not_reproduced() -> None:
    whole = verdict_on(ALIKE, trained("rmsnorm", BASE), trained("mxnorm", SAME))
    assert (whole.verdict, whole.units) == (REPRODUCED, 8)
    assert whole.evidence is not None
    assert whole.evidence.here == "2 x 64, 1M tokens"
    dead = [math.inf] * 3 + [math.nan] * 3
    found = verdict_on(ALIKE, trained("rmsnorm", BASE), trained("mxnorm", [*dead, *SAME[6:]]))
    assert (found.verdict, found.units) == (UNCLEAR, 2)
    assert found.evidence is not None
    assert found.evidence.note == "6 of 8 died; 0 of 8 died"


def test_two_runs_an_arm_are_counted_as_not_run() -> None:
    found = verdict_on(ALIKE, trained("rmsnorm", BASE[:2]), trained("mxnorm", SAME[:2]))
    assert (found.verdict, found.counted_as) == (UNCLEAR, NOT_RUN)
    four = verdict_on(ALIKE, trained("rmsnorm", BASE[:4]), trained("mxnorm", SAME[:4]))
    assert (four.verdict, four.counted_as) == (REPRODUCED, REPRODUCED)


def test_runs_of_two_codes_are_not_pooled() -> None:
    """Seed 0 at three commits is one seed, and the code with most pairs is taken."""
    others = [trained(norm, [loss], commit=c) for norm, loss in (("rmsnorm", 2.0), ("mxnorm", 9.0)) for c in "bc"]
    found = verdict_on(ALIKE, trained("rmsnorm", BASE), trained("mxnorm", SAME), *others)
    assert (found.verdict, found.units) == (REPRODUCED, 8)
    apart = verdict_on(ALIKE, trained("rmsnorm", BASE), trained("mxnorm", SAME, commit="b"))
    assert (apart.verdict, apart.why) == (UNCLEAR, "no seed has all arms in one code")
    assert (found.evidence.others, found.shown_verdict) == (0, REPRODUCED)
    halves = [trained(norm, losses).assign(commit=["a"] * 4 + ["b"] * 4) for norm, losses in BOTH]
    mixed = verdict_on(equal(0.001, "ours"), *halves)
    assert (mixed.units, mixed.evidence.others, mixed.shown_verdict) == (4, 4, "cannot tell (mixed code)")
    assert note_of(mixed).startswith("pairs of seeds of other code: 4; ")
    digests = [trained(norm, losses, commit=norm, code="d") for norm, losses in BOTH]
    assert verdict_on(ALIKE, *digests).units == 8  # if there is a digest, it decides in place of the commit


def test_learning_rates_are_no_replicates() -> None:
    frames = [
        trained(norm, losses, **{"config.optimizer.lr": rate})
        for norm, losses in (("rmsnorm", BASE[:4]), ("mxnorm", SAME[:4]))
        for rate in (1e-3, 1e-2)
    ]
    assert verdict_on(ALIKE, *frames).why == "optimizer.lr differs within an arm"
    assert verdict_on(ALIKE, *frames, over=["config.optimizer.lr"]).units == 4


def test_what_was_stated_before_decides_the_equivalence_of_norms() -> None:
    """Lot 4's 90 % interval, corrected for three comparisons, lies inside +-0.026 or above it."""
    p2 = {"config.norm.p": 2.0}
    for offsets, verdict in (((0.001, 0.003), REPRODUCED), ((0.2, 0.21), CONTRADICTED), ((-0.1, 0.1), UNCLEAR)):
        losses = [loss + offsets[seed % 2] for seed, loss in enumerate(BASE)]
        runs = pd.concat([trained("rmsnorm", BASE), trained("mxnorm", losses, **p2)], ignore_index=True)
        found = judge(ROWS["mxnorm-loss-125m-p2"], Tables(instead={"runs": runs}))
        assert (found.verdict, found.claim.rate) == (verdict, pytest.approx(0.05 / 3))


@each("name", ["mxnorm-loss-125m-p1", "mxnorm-loss-125m-p2", "mxnorm-postround-worse"])
def test_the_interval_that_decides_the_equivalence_is_the_one_that_was_stated(name: str) -> None:
    """Student's alone: of eight pairs a bootstrap's reaches further, and no rule asked for one."""
    evidence = judge(ROWS[name], Tables()).evidence
    assert evidence is not None
    effect, level = evidence.found, 1 - 0.1 / 3
    assert isinstance(effect, Effect)
    assert (effect.count, effect.interval(level)) == (8, student(effect.units, level))


@each(("name", "units"), [("most", 85), ("almost-all", 85), ("mxfp8", 85), ("one-pass", 85), ("tokens", 17)])
def test_a_shape_that_was_timed_in_several_formats_is_one_unit(name: str, units: int) -> None:
    """85 shapes of 17 hidden sizes, each in three formats and two block sizes: 510 rows are not 510 units."""
    found = judge(ROWS[f"mxnorm-kernel-{name}"], Tables()).evidence
    assert found is not None
    assert found.found.count == units == ROWS[f"mxnorm-kernel-{name}"].needs


@each(
    ("name", "arm", "baseline", "own"),
    [
        ("recipe-mixture-of-experts", ("rmsnorm", "mxfp8"), ("rmsnorm", "bf16"), {MLP: "moe"}),
        ("mxnorm-loss-1b-p2", ("mxnorm", "mxfp8"), ("rmsnorm", "mxfp8"), {WIDTH: 2048}),
        ("instability-lm-starcoder", ("rmsnorm", "mxfp8"), ("rmsnorm", "bf16"), {"choice.data": "starcoder"}),
    ],
)
def test_a_claim_about_some_models_is_not_judged_by_others(
    name: str, arm: tuple[str, str], baseline: tuple[str, str], own: dict[str, object]
) -> None:
    """A report once called the claim about a mixture of experts reproduced, by runs of a small dense Llama."""
    for values, is_told in (({MLP: "swiglu", WIDTH: 64, "choice.data": "pysource"}, False), (own, True)):
        other = {"config.norm.p": 2.0, "config.model.num_heads": 4}
        parts = [trained(norm, BASE, **{PLAN: plan} | other | values) for norm, plan in (arm, baseline)]
        found = judge(ROWS[name], Tables(instead={"runs": pd.concat(parts, ignore_index=True)}))
        assert (found.evidence is not None) == is_told, (name, found)


def test_the_scale_of_a_short_run_is_not_zero_tokens() -> None:
    assert scale(trained("rmsnorm", BASE, **{"config.train.sequence_length": 205})) == "2 x 64, 0.2M tokens"


def test_a_rule_that_was_stated_before_decides_and_the_general_one_is_shown_where_it_differs() -> None:
    found = judge(ROWS["instability-window-fp32-512"], Tables())
    assert (found.verdict, found.units) == (UNCLEAR, 4)
    assert found.evidence is not None
    assert "by the general rules" in found.evidence.note
    assert found.evidence.note.endswith(REPRODUCED)


# -------------------------------------------------------------------------------------------------------- list and page


def test_the_list_only_grows() -> None:
    """A new row is added to tests/claim_ids.txt as well, and none is ever removed."""
    recorded = (ROOT / "tests/claim_ids.txt").read_text().split()
    ids = [claim.id for claims in DOCUMENTS.values() for claim in claims]
    assert len(ids) == len(set(ids)) >= 60
    assert set(recorded) == set(ids)
    assert {claim.kind for claim in ROWS.values()} == set(KINDS)


def test_without_tables_all_but_formulas_is_not_run(tmp_path: Path) -> None:
    empty = Tables(tmp_path)
    for claim in ROWS.values():
        if claim.kind != "arithmetic":
            assert judge(claim, empty).verdict in (NOT_RUN, IMPOSSIBLE), claim.id


@pytest.mark.integration
def test_the_pages_are_what_the_tables_say() -> None:
    for path, text in pages(Tables()).items():
        assert path.read_text() == text, f"{path} is not what the tables say; run `make claims`"


@pytest.mark.integration
def test_a_readme_without_the_marks_of_the_sums_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text("<!-- make claims -->\nand a text below\n")
    monkeypatch.setattr(page, "README", tmp_path / "README.md")
    with pytest.raises(ConfigError, match="each must be there once"):
        pages(Tables())


def test_a_row_of_the_json_has_its_rule_effect_and_verdict() -> None:
    rows = {row["id"]: row for row in json.loads((ROOT / "results/claims.json").read_text())}
    assert rows.keys() == ROWS.keys()
    decided = [row for row in rows.values() if row["verdict"] in (REPRODUCED, CONTRADICTED)]
    assert all(row["effect"] is not None and row["rule"] and row["n"] >= 1 for row in decided)
    assert all(row["interval"][0] <= row["effect"] <= row["interval"][1] for row in decided)
    assert all(row["claim"] == ROWS[name].says for name, row in rows.items())
    assert all(row["note"] for row in rows.values() if row["verdict"] in (NOT_RUN, IMPOSSIBLE))
    sampled = partial(filter, lambda row: row["kind"] in ("students", "pre-training", "evaluation"))
    assert all(row["n"] >= 4 for row in sampled(decided))

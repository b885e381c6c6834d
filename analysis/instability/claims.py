"""The instability paper's claims about students, judged by the rules that results/prestated.md states.

The unit is the data seed: the replicas of an arm that share one are averaged first. Intervals hold for all claims of a
figure at once (95 %, Bonferroni). Open replicas are in no fraction.

python -m analysis.instability.claims --runs runs/overflow --figure 3
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from analysis.compare import CONFIDENCE
from analysis.instability.fig03_overflow import COUNT
from analysis.students.arms import REPLICA, ended, named
from analysis.style import load, parser
from mxstudy import results

REPRODUCED, CONTRADICTED, UNCLEAR, NOT_RUN = "reproduced", "contradicted", "cannot tell", "not run"
LEAST_UNITS, MOST_UNITS = 4, 400
HALF_OF_FIGURE_6 = 2 / 9  # at 5e-4 six runs of MXFP8 against two of FP32, of nine sizes
LAST_BIN = "last_bin"
FILLED = 0.75
FILLED_COLUMNS = ("arm", "filled", "of these diverged", "from step", "to step", "filled at the end", "share at the end")
FILLED_LEGEND = """\
Filled: at least 75 % of the first block's gains are in the last bin in a measurement before the divergence, or in the
whole run; of these diverged: less those that are open. From, to: medians over replicas of the first and the last such
step. At the end: in the last measurement before a divergence, of the replicas that diverged; its median."""

Arm = Mapping[str, str]
Quantity = Callable[[pd.DataFrame, pd.DataFrame], pd.Series]


def diverged(runs: pd.DataFrame, last_bin: pd.DataFrame) -> pd.Series:
    return runs["diverged"]


def came_back(runs: pd.DataFrame, last_bin: pd.DataFrame) -> pd.Series:
    """Return, for runs that diverged, 1 where the loss ends below 10 times its best, else 0; NaN for all others."""
    is_back = (runs["loss"].astype(float) < 10 * runs["best_loss"].astype(float)).astype(float)
    return is_back.where(runs["diverged"] > 0)


def first_gains(runs: pd.DataFrame, last_bin: pd.DataFrame) -> pd.Series:
    """The largest share of the first block's gains in the last bin that was measured before the divergence."""
    return of_replicas(runs, last_bin, last_bin[first_gain(last_bin)], "max")


def first_gain(last_bin: pd.DataFrame) -> str:
    """The column with the share of the first block's gains."""
    (name,) = (name for name in last_bin if name.startswith("layers.0.") and name.endswith(f".norm.weight/{COUNT}"))
    return str(name)


def inputs(runs: pd.DataFrame, last_bin: pd.DataFrame) -> pd.Series:
    """The share of the linears' inputs in the last bin: mean over layers, and over measurements before divergence."""
    shares = last_bin.filter(regex=rf"^layers\.\d+\.(up|down)\.input/{COUNT}$").mean(axis=1)
    return of_replicas(runs, last_bin, shares, "mean")


def of_replicas(runs: pd.DataFrame, measured: pd.DataFrame, values: pd.Series, how: str) -> pd.Series:
    rows = measured[[*REPLICA, "step"]].assign(value=values).merge(runs[[*REPLICA, "outcome.diverged_at"]])
    before = rows[~(rows["step"] >= rows["outcome.diverged_at"])]
    found = before.groupby(REPLICA)["value"].agg(how)
    return pd.Series(found.reindex(pd.MultiIndex.from_frame(runs[REPLICA])).to_numpy(), runs.index)


@dataclass(frozen=True, eq=False)
class Claim:
    """`arm`, less `baseline` if there is one, in `of`. `reproduced`, `contradicted`: where the interval has to lie."""

    figure: int
    source: str
    says: str
    of: Quantity
    arm: Arm
    reproduced: tuple[float, float]
    contradicted: tuple[tuple[float, float], ...]
    baseline: Arm = field(default_factory=dict)


def more(figure: int, source: str, says: str, of: Quantity, arm: Arm, baseline: Arm) -> Claim:
    """Return the claim that a quantity is larger, by any amount; contradicted below half of what figure 6 shows."""
    return Claim(figure, source, says, of, arm, (0, np.inf), ((-np.inf, HALF_OF_FIGURE_6),), baseline)


def less(figure: int, source: str, says: str, of: Quantity, arm: Arm, baseline: Arm) -> Claim:
    return Claim(figure, source, says, of, arm, (-np.inf, 0), ((-HALF_OF_FIGURE_6, np.inf),), baseline)


MX = {"choice.precision": "mxfp8", "choice.fidelity": "public_code"}
FP32 = {"choice.precision": "fp32", "choice.fidelity": "none"}
KL, MSE = {"config.loss": "kl"}, {"config.loss": "mse"}
XAVIER, TORCH = {"config.model.init": "xavier"}, {"config.model.init": "torch"}
CLAIMS = (
    more(3, "figure 3, centre", "MXFP8 diverges more often than FP32", diverged, MX, FP32),
    Claim(
        3,
        "section 5.1; figure 3, centre",
        "before a divergence at least three quarters of the first block's gains are in the last bin",
        first_gains,
        MX,
        (FILLED, np.inf),
        ((-np.inf, FILLED),),
    ),
    Claim(
        3,
        "section 5.1; figure 3, right",
        "about 1 % of the activations, 0.5 to 2 %, is in the last bin",
        inputs,
        MX,
        (0.005, 0.02),
        ((-np.inf, 0.005), (0.02, np.inf)),
    ),
    more(8, "figure 8", "with KL, too, MXFP8 diverges more often than FP32", diverged, MX | KL, FP32 | KL),
    more(8, "figure 8", "with KL more of what diverges comes back than with MSE", came_back, MX | KL, MX | MSE),
    less(11, "figure 11", "smaller initial weights diverge less often in MXFP8", diverged, MX | XAVIER, MX | TORCH),
)


class Finding(NamedTuple):
    """`arm`, `baseline`: by data seed; `low`, `high`: of the mean, or of the mean difference; NaN if there is none."""

    arm: pd.Series
    baseline: pd.Series
    value: float
    low: float
    high: float
    units: int
    verdict: str
    price: str


def judged(claim: Claim, runs: pd.DataFrame, last_bin: pd.DataFrame, claims: int) -> Finding:
    """`runs` of `students.arms.ended`; `claims`: as many are judged at once."""
    level = 1 - (1 - CONFIDENCE) / claims
    values = claim.of(runs, last_bin) if len(runs) else pd.Series(dtype=float)
    ours, theirs = (values[chosen(runs, arm)].dropna() for arm in (claim.arm, claim.baseline))
    one, other = (part.groupby(runs["config.data_seed"]).mean() for part in (ours, theirs))
    units = (one - other).dropna() if claim.baseline else one
    if len(units) < 2:
        nothing = UNCLEAR if len(units) else NOT_RUN
        return Finding(one, other, units.mean(), np.nan, np.nan, len(units), nothing, "-")
    half = stats.t.ppf((1 + level) / 2, len(units) - 1) * stats.sem(units)
    intervals = [(units.mean() - half, units.mean() + half)]
    if claim.baseline and claim.of in (diverged, came_back):  # data seeds that agree leave Student's no width
        intervals.append(newcombe(ours, theirs, level))
    low, high = min(low for low, _ in intervals), max(high for _, high in intervals)
    verdict = UNCLEAR
    if len(units) >= LEAST_UNITS:
        if any(a < low and high < b for a, b in claim.contradicted):
            verdict = CONTRADICTED
        if claim.reproduced[0] < low and high < claim.reproduced[1]:
            verdict = REPRODUCED
    price = needed(claim, units, level) if verdict == UNCLEAR else "-"
    return Finding(one, other, float(units.mean()), float(low), float(high), len(units), verdict, price)


def chosen(runs: pd.DataFrame, arm: Arm) -> pd.Series:
    """Which runs are of the arm: none, where it says nothing."""
    is_of = pd.Series(bool(arm), index=runs.index)
    for column, value in arm.items():
        is_of &= runs[column] == value if column in runs else False
    return is_of


def newcombe(ours: pd.Series, theirs: pd.Series, level: float) -> tuple[float, float]:
    """Return the interval of a difference of fractions, replicas taken as independent (Newcombe 1998, method 10)."""

    def wilson(outcomes: pd.Series) -> tuple[float, float, float]:
        found = stats.binomtest(int(outcomes.sum()), len(outcomes)).proportion_ci(level, method="wilson")
        return float(outcomes.mean()), float(found.low), float(found.high)

    (p, p_low, p_high), (q, q_low, q_high) = wilson(ours), wilson(theirs)
    return p - q - np.hypot(p - p_low, q_high - q), p - q + np.hypot(p_high - p, q - q_low)


def needed(claim: Claim, units: pd.Series, level: float) -> str:
    """How many data seeds would tell, were their mean and spread what these have."""
    mean, spread = units.mean(), units.std(ddof=1)
    for n in range(max(len(units), LEAST_UNITS), MOST_UNITS + 1):
        half = stats.t.ppf((1 + level) / 2, n - 1) * spread / np.sqrt(n)
        if any(a < mean - half and mean + half < b for a, b in (claim.reproduced, *claim.contradicted)):
            return f"{n} data seeds"
    return f"over {MOST_UNITS} data seeds"


def report(runs: pd.DataFrame, last_bin: pd.DataFrame, figure: int) -> str:
    """Return Markdown: a line for each claim, then each data seed's numbers."""
    claims = [claim for claim in CLAIMS if claim.figure == figure]
    found = {claim: judged(claim, runs, last_bin, len(claims)) for claim in claims}
    level = 100 * (1 - (1 - CONFIDENCE) / len(claims))
    rows = [
        (claim.says, shown(f.value), between(f.low, f.high), f.units, f.verdict, f.price) for claim, f in found.items()
    ]
    columns = ("claim", "mean", f"{level:.1f} %", "data seeds", "verdict", "what would tell")
    seeds = [
        (claim.says, name, ", ".join(f"{seed}: {value:.3g}" for seed, value in part.items()))
        for claim, f in found.items()
        for name, part in (("arm", f.arm), ("baseline", f.baseline))
        if len(part)
    ]
    return "\n\n".join(
        [
            results.markdown(columns, rows, left=["claim", "verdict", "what would tell"]),
            results.markdown(("claim", "of", "by data seed"), seeds, left=["claim", "of", "by data seed"]),
        ]
    )


def filled(runs: pd.DataFrame, last_bin: pd.DataFrame) -> str:
    """Return Markdown: for each arm the replicas whose first block's gains are mostly in the last bin, and when.

    A description, added after the runs were seen: it decides nothing.
    """
    name = first_gain(last_bin)
    rows = []
    for arm, own in runs.groupby(named(runs, ["precision", "fidelity", "teacher"]), sort=False):
        measured = last_bin[[*REPLICA, "step"]].assign(share=last_bin[name])
        measured = measured.merge(own[[*REPLICA, "outcome.diverged_at", "diverged"]])
        before = measured[~(measured["step"] >= measured["outcome.diverged_at"])]
        by_replica = before[before["share"] >= FILLED].groupby(REPLICA)
        full = by_replica.agg(first=("step", "min"), last=("step", "max"), diverged=("diverged", "first"))
        ends = before[before["outcome.diverged_at"].notna()].sort_values("step").groupby(REPLICA).tail(1)["share"]
        rows.append(
            (
                arm,
                f"{len(full)} of {len(own)}",
                f"{full['diverged'].sum():.0f} of {full['diverged'].count()}",
                f"{full['first'].median():,.0f}" if len(full) else "-",
                f"{full['last'].median():,.0f}" if len(full) else "-",
                f"{(ends >= FILLED).sum()} of {len(ends)}",
                f"{ends.median():.2g}" if len(ends) else "-",
            )
        )
    return results.markdown(FILLED_COLUMNS, rows, left=["arm"]) + f"\n\n{FILLED_LEGEND}"


def shown(value: float) -> str:
    return f"{value:+.3g}" if np.isfinite(value) else "-"


def between(low: float, high: float) -> str:
    return f"{shown(low)} .. {shown(high)}" if np.isfinite(low) else "-"


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--figure", type=int, required=True, choices=sorted({claim.figure for claim in CLAIMS}))
    given = options.parse_args(arguments)
    is_measured = any(claim.of in (first_gains, inputs) for claim in CLAIMS if claim.figure == given.figure)
    last_bin = load(options, given.runs, LAST_BIN) if is_measured else pd.DataFrame()
    runs = ended(load(options, given.runs, "runs"))
    print(report(runs, last_bin, given.figure))
    if is_measured:
        print(f"\n{filled(runs, last_bin)}")


if __name__ == "__main__":
    main()

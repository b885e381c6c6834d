"""Judge the instability paper's claims about students by the rules stated in results/prestated.md.

The unit is the data seed: the replicas of an arm that share a data seed are averaged first. Intervals hold for all
claims of a figure jointly (95 %, Bonferroni). As was stated then, open replicas are in no fraction, except in claims
about stability, which count them as unstable.

python -m analysis.instability.claims --runs runs/overflow --figure 3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.command import Parser, command
from analysis.instability.fig03_overflow import COUNT
from analysis.ledger.claim import NOT_RUN
from analysis.ledger.rules import UNCLEAR, Rule, any_higher, any_lower, between
from analysis.statistics import ALPHA, DIFFERENCE, LEAST_UNITS, SHARE, Effect, joint_level
from analysis.students import arms as replicas
from analysis.students.arms import REPLICA, before_divergence, ended_replicas, middle_step, named, table
from analysis.style import runs_option
from analysis.units import DATA_SEED, SEED, WIDTH, Arm, chosen, less
from mxstudy import results

OF_FIGURE_6 = (2 / 9, "half of its figure 6's difference at 5e-4: six of nine sizes minus two")
MORE, LESS = any_higher(*OF_FIGURE_6), any_lower(*OF_FIGURE_6)
STABLE = between(-np.inf, 2 / 9, "its figure 6: at 5e-4 two of nine sizes are unstable in FP32")
LAST_BIN = "last_bin"
FILLED = 0.75
FILLED_COLUMNS = ("arm", "filled", "of these diverged", "from step", "to step", "filled at the end", "share at the end")
FILLED_LEGEND = """\
Filled: at least 75 % of the first block's gains are in the last bin in a measurement before the divergence, or in the
whole run if there is none; of these diverged: without open replicas. From, to: medians over replicas of the first and
the last such step. At the end: in the last measurement before a divergence, of the replicas that diverged; its
median."""

LR = "lr"
PAIRED_COLUMNS = ("width", "learning rate", "FP32", "MX mix", "pairs", "FP32 alone", "MX mix alone")
PAIRED_LEGEND = """\
Diverged: of all replicas that are not open. Pairs: two replicas with the same width, rate, data seed and initial seed,
neither of them open. Alone: the pairs that diverge in that precision only."""

Quantity = Callable[[pd.DataFrame, pd.DataFrame], pd.Series]


def diverged(runs: pd.DataFrame, last_bin: pd.DataFrame) -> pd.Series:
    return runs["diverged"]


def without_open(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs with `diverged` NaN for those that are open."""
    return runs.assign(diverged=runs["diverged"].mask(runs["open"])) if len(runs) else runs


def unstable(runs: pd.DataFrame, last_bin: pd.DataFrame) -> pd.Series:
    """Return 1 for runs that diverged or are open (the loss ends over 10 times its best), else 0."""
    return replicas.unstable(runs).astype(float)


def came_back(runs: pd.DataFrame, last_bin: pd.DataFrame) -> pd.Series:
    """Return, for runs that diverged, 1 where the loss ends below 10 times its best, else 0, and NaN for all others."""
    is_back = (runs["loss"].astype(float) < 10 * runs["best_loss"].astype(float)).astype(float)
    return is_back.where(runs["diverged"] > 0)


OF_RUNS = (diverged, unstable, came_back)  # quantities that are 0 or 1 for a run, so that a mean is a fraction


def first_gains(runs: pd.DataFrame, last_bin: pd.DataFrame) -> pd.Series:
    """Return each run's largest share of the first block's gains in the last bin, before its divergence."""
    return of_replicas(runs, last_bin, last_bin[first_gain(last_bin)], "max")


def first_gain(last_bin: pd.DataFrame) -> str:
    """Return the column with the share of the first block's gains in the last bin."""
    (name,) = (name for name in last_bin if name.startswith("layers.0.") and name.endswith(f".norm.weight/{COUNT}"))
    return str(name)


def inputs(runs: pd.DataFrame, last_bin: pd.DataFrame) -> pd.Series:
    """Return each run's share of linears' inputs in the last bin before divergence, as a mean over layers and steps."""
    shares = last_bin.filter(regex=rf"^layers\.\d+\.(up|down)\.input/{COUNT}$").mean(axis=1)
    return of_replicas(runs, last_bin, shares, "mean")


def of_replicas(runs: pd.DataFrame, measured: pd.DataFrame, values: pd.Series, how: str) -> pd.Series:
    rows = measured[[*REPLICA, "step"]].assign(value=values).merge(runs[[*REPLICA, "outcome.diverged_at"]])
    found = before_divergence(rows).groupby(REPLICA)["value"].agg(how)
    return pd.Series(found.reindex(pd.MultiIndex.from_frame(runs[REPLICA])).to_numpy(), runs.index)


@dataclass(frozen=True, eq=False)
class PrestatedClaim:
    """A claim about the quantity `of` in `arm`, minus that in `baseline` if there is one.

    `pairs` are the columns, beside the data seed, in which a replica and its partner in the other arm agree. If it is
    empty, replicas are not paired.
    """

    figure: int
    says: str
    of: Quantity
    rule: Rule
    arm: Arm
    baseline: Arm = field(default_factory=dict)
    pairs: Sequence[str] = ()


MX = {"choice.precision": "mxfp8", "choice.fidelity": "public_code"}
FP32 = {"choice.precision": "fp32", "choice.fidelity": "none"}
MIX = {"choice.precision": "mx_mix", "choice.fidelity": "public_code"}
KL, MSE = {"config.loss": "kl"}, {"config.loss": "mse"}
XAVIER, TORCH = {"config.model.init": "xavier"}, {"config.model.init": "torch"}

CLAIMS = (
    PrestatedClaim(3, "MXFP8 diverges more often than FP32", diverged, MORE, MX, FP32),
    PrestatedClaim(
        3,
        "before a divergence at least three quarters of the first block's gains are in the last bin",
        first_gains,
        between(FILLED, np.inf, '"nearly 75 %"'),
        MX,
    ),
    PrestatedClaim(
        3,
        "about 1 % of the activations, 0.5 to 2 %, is in the last bin",
        inputs,
        between(0.005, 0.02, "a factor of 2"),
        MX,
    ),
    *(
        PrestatedClaim(6, f"at width {width} FP32 is stable at 2e-4 to 6e-4", unstable, STABLE, FP32 | {WIDTH: width})
        for width in (512, 768)
    ),
    PrestatedClaim(
        6,
        "at 2e-4 to 6e-4 MX mix diverges more often than FP32",
        diverged,
        MORE,
        MIX,
        FP32,
        pairs=(WIDTH, LR, SEED),
    ),
    PrestatedClaim(
        6,
        "in MX mix instabilities come with larger rates",
        diverged,
        MORE,
        MIX | {LR: 6e-4},
        MIX | {LR: 2e-4},
        pairs=(WIDTH, SEED),
    ),
    PrestatedClaim(8, "with KL, too, MXFP8 diverges more often than FP32", diverged, MORE, MX | KL, FP32 | KL),
    PrestatedClaim(8, "with KL more of what diverges comes back than with MSE", came_back, MORE, MX | KL, MX | MSE),
    PrestatedClaim(11, "smaller initial weights diverge less often in MXFP8", diverged, LESS, MX | XAVIER, MX | TORCH),
)


def of_figure(figure: int) -> list[PrestatedClaim]:
    """Return the claims of a figure, which are judged jointly."""
    return [claim for claim in CLAIMS if claim.figure == figure]


class Finding(NamedTuple):
    """A judged claim. `arm` and `baseline` are means by data seed, and `effect` is the mean, or the mean difference.

    `low` and `high` are its interval, NaN if there is none. `price` says how many data seeds would decide, if that
    can be said. `widths` are those that a claim with pairs covers.
    """

    arm: pd.Series
    baseline: pd.Series
    effect: Effect
    low: float
    high: float
    verdict: str
    price: str
    widths: Sequence[int] = ()

    @property
    def value(self) -> float:
        return self.effect.value

    @property
    def units(self) -> int:
        return self.effect.count


def judged(claim: PrestatedClaim, runs: pd.DataFrame, last_bin: pd.DataFrame, claims: int) -> Finding:
    """Judge one of `claims` claims that are judged jointly. `runs` are from `students.arms.ended_replicas`."""
    rate, runs = ALPHA / claims, without_open(runs)
    values = claim.of(runs, last_bin) if len(runs) else pd.Series(dtype=float)
    ours = values[chosen(runs, claim.arm)]
    theirs = values[chosen(runs, claim.baseline)] if claim.baseline else values[:0]
    widths: Sequence[int] = ()
    if claim.pairs and len(runs):
        ours, theirs, widths = partners(ours, theirs, runs, claim.pairs)
    arms = [part.dropna() for part in (ours, theirs)]
    one, other = (part.groupby(runs[DATA_SEED]).mean() for part in arms)
    compared = 2 if claim.baseline else 1
    effect = Effect(
        less([one, other][:compared]),
        outcomes=tuple(arms[:compared]) if claim.of in OF_RUNS else (),
        bootstrapped=False,
        limits=DIFFERENCE if claim.baseline else SHARE,
    )
    verdict = claim.rule.verdict(effect, rate) if effect.count else NOT_RUN
    price = claim.rule.price(effect, "data seeds", rate) if verdict == UNCLEAR else ""
    return Finding(one, other, effect, *effect.interval(1 - rate), verdict, price, widths)


def partners(
    ours: pd.Series, theirs: pd.Series, runs: pd.DataFrame, pairs: Sequence[str]
) -> tuple[pd.Series, pd.Series, list[int]]:
    """Return the replicas of both arms whose partner is not open, and the widths that are covered.

    A width is covered if both arms share at least `LEAST_UNITS` data seeds there, or as many as any width has.
    """
    one, other = (runs.loc[part.index, [WIDTH, DATA_SEED]].drop_duplicates() for part in (ours, theirs))
    seeds = one.merge(other)[WIDTH].value_counts()
    widths = sorted(int(width) for width in seeds.index[seeds >= min(LEAST_UNITS, seeds.max())])
    identity = pd.Series(list(runs[[DATA_SEED, *pairs]].itertuples(index=False, name=None)), runs.index)
    ours, theirs = (part[runs.loc[part.index, WIDTH].isin(widths)].dropna() for part in (ours, theirs))
    of_ours, of_theirs = identity[ours.index], identity[theirs.index]
    return ours[of_ours.isin(set(of_theirs))], theirs[of_theirs.isin(set(of_ours))], widths


def report(runs: pd.DataFrame, last_bin: pd.DataFrame, figure: int) -> str:
    """Return Markdown with one line per claim, then the numbers of each data seed."""
    claims = of_figure(figure)
    found = {claim: judged(claim, runs, last_bin, len(claims)) for claim in claims}
    level = 100 * joint_level(len(claims))
    rows = [
        (claim.says, shown(f.value), from_to(f.low, f.high), f.units, f.verdict, f.price or "-")
        for claim, f in found.items()
    ]
    columns = ("claim", "mean", f"{level:.1f} %", "data seeds", "verdict", "what would tell")
    seeds = [
        (claim.says, name + of_widths(f.widths), ", ".join(f"{seed}: {value:.3g}" for seed, value in part.items()))
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


def filling(runs: pd.DataFrame, last_bin: pd.DataFrame) -> tuple[pd.DataFrame, pd.Series]:
    """Return when replicas have most of the first block's gains in the last bin, and the share before a divergence.

    The first table has, by replica, the first and last such step before its divergence, and `diverged`. The second has,
    for the replicas that diverged, the share in the last measurement before that.
    """
    measured = last_bin[[*REPLICA, "step"]].assign(share=last_bin[first_gain(last_bin)])
    measured = measured.merge(runs[[*REPLICA, "outcome.diverged_at", "diverged"]])
    before = before_divergence(measured)
    by_replica = before[before["share"] >= FILLED].groupby(REPLICA)
    full = by_replica.agg(first=("step", "min"), last=("step", "max"), diverged=("diverged", "first"))
    ends = before[before["outcome.diverged_at"].notna()].sort_values("step").groupby(REPLICA).tail(1)["share"]
    return full, ends


def filled(runs: pd.DataFrame, last_bin: pd.DataFrame) -> str:
    """Return Markdown: for each arm, how many replicas have most of the first block's gains in the last bin, and when.

    This description was added after the runs were seen. It decides no claim.
    """
    runs = without_open(runs)
    rows = []
    for arm, own in runs.groupby(named(runs, ["precision", "fidelity", "teacher"]), sort=False):
        full, ends = filling(own, last_bin)
        rows.append(
            (
                arm,
                f"{len(full)} of {len(own)}",
                f"{full['diverged'].sum():.0f} of {full['diverged'].count()}",
                middle_step(full["first"]),
                middle_step(full["last"]),
                f"{(ends >= FILLED).sum()} of {len(ends)}",
                f"{ends.median():.2g}" if len(ends) else "-",
            )
        )
    return results.markdown(FILLED_COLUMNS, rows, left=["arm"]) + f"\n\n{FILLED_LEGEND}"


def of_widths(widths: Sequence[int]) -> str:
    return f", width {' and '.join(map(str, widths))}" if widths else ""


def by_width_and_rate(runs: pd.DataFrame) -> str:
    """Return Markdown: by width and learning rate, how many diverged in FP32, in MX mix, and in only one of them.

    This is a description. It decides no claim.
    """
    rows = []
    for (width, rate), own in without_open(runs).groupby([WIDTH, LR]):
        one, other = (own.loc[chosen(own, arm), "diverged"].dropna() for arm in (FP32, MIX))
        fp32, mix = (part.groupby([own[DATA_SEED], own[SEED]]).first() for part in (one, other))
        less = (fp32 - mix).dropna()
        counts = [f"{part.sum():.0f} of {len(part)}" for part in (one, other)]
        rows.append((width, f"{rate:g}", *counts, len(less), *replicas.alone(less)))
    return results.markdown(PAIRED_COLUMNS, rows) + f"\n\n{PAIRED_LEGEND}"


def shown(value: float) -> str:
    return f"{value:+.3g}" if np.isfinite(value) else "-"


def from_to(low: float, high: float) -> str:
    return f"{shown(low)} .. {shown(high)}" if np.isfinite(low) else "-"


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = Parser(__doc__)
    runs_option(options, required=True)
    options.add_argument("--figure", type=int, required=True, choices=sorted({claim.figure for claim in CLAIMS}))
    given = options.parse_args(arguments)
    is_measured = any(claim.of in (first_gains, inputs) for claim in of_figure(given.figure))
    last_bin = results.load(given.runs, LAST_BIN) if is_measured else pd.DataFrame()
    runs = ended_replicas(results.load(given.runs, "runs"))
    print(report(runs, last_bin, given.figure))
    if is_measured:
        print(f"\n{filled(runs, last_bin)}")
    if given.figure == 6 and len(runs):
        print(f"\n{by_width_and_rate(runs)}\n\n{table(runs, named(runs, ['precision', 'model.hidden_size', LR]))}")


if __name__ == "__main__":
    main()

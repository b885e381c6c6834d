"""Make the parts of the pages about language models and their norms, from their tables."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pandas as pd

from analysis.pages.marks import Parts, benchmark, least_and_most, rows_of
from analysis.statistics import CONFIDENCE, student
from analysis.units import RATE, SEED, power
from mxstudy.results import bin_edges, markdown

NORMS = {"rmsnorm": "RMSNorm", "mxnorm_p1": "MXNorm p=1", "mxnorm_p2": "MXNorm p=2"}
PRECISIONS = {"bf16": "bf16", "mxfp8": "MXFP8"}
PRECISION_CHOICE, NORM_CHOICE = "choice.precision", "choice.norm"
LOSS = "validation_loss"


def arm_of(run: pd.Series) -> str:
    return f"{PRECISIONS[run[PRECISION_CHOICE]]} {NORMS[run[NORM_CHOICE]]}"


def loss_of(runs: pd.DataFrame, seed: int, norm: str, precision: str | None = None) -> float:
    """Return the validation loss of the one run with these choices, or NaN if there is none."""
    chosen = (runs[SEED] == seed) & (runs[NORM_CHOICE] == norm)
    found = runs.loc[chosen if precision is None else chosen & (runs[PRECISION_CHOICE] == precision), LOSS]
    assert len(found) < 2, f"{len(found)} runs with {norm} and seed {seed}"
    return float(found.iloc[0]) if len(found) else np.nan


# ------------------------------------------------------------------------------------------------ pre-training


@cache
def pretrained() -> pd.DataFrame:
    return rows_of("runs", "mxnorm_pretrain", "mxnorm_pretrain_seed1")


@cache
def before() -> pd.DataFrame:
    """Return the runs at the earlier commit, where bf16 has several seeds."""
    return rows_of("runs", "mxnorm_pretrain_faaaffd", "mxnorm_pretrain_seeds")


def arms() -> str:
    runs, cells = pretrained(), []
    for _, run in runs.iterrows():
        less = run[LOSS] - loss_of(runs, run[SEED], "rmsnorm", "mxfp8")
        cells.append(
            (
                arm_of(run),
                run[SEED],
                run["fingerprint"][:12],
                f"{run[LOSS]:.4f}",
                f"{less:+.4f}" if less else "0",
                f"{run['tokens_per_s']:,.0f}",
                f"{run['mfu']:.3f}",
                f"{run['memory_gib']:.1f} GiB",
            )
        )
    columns = ["arm", "seed", "fingerprint", "validation loss", "minus MXFP8 RMSNorm of that seed", "tokens/s", "MFU"]
    return markdown([*columns, "memory"], cells, left=["arm", "seed", "fingerprint"])


def earlier() -> str:
    runs = before()
    seeds = sorted(runs[SEED].unique())
    order = runs.drop_duplicates([PRECISION_CHOICE, NORM_CHOICE])
    columns = ["at commit `faaaffd`, one seed for weights and data", *map(str, seeds), "mean", "standard deviation"]
    cells = []
    for _, arm in order.iterrows():
        losses = [loss_of(runs, seed, arm[NORM_CHOICE], arm[PRECISION_CHOICE]) for seed in seeds]
        some = pd.Series(losses).dropna()
        spread = [f"{some.mean():.4f}", f"{some.std():.4f}"] if len(some) > 1 else ["", ""]
        cells.append([arm_of(arm), *("" if np.isnan(loss) else f"{loss:.4f}" for loss in losses), *spread])
    return markdown(columns, cells, left=columns)


def lower(seed: int) -> str:
    runs = pretrained()
    return f"{loss_of(runs, seed, 'rmsnorm', 'mxfp8') - loss_of(runs, seed, 'mxnorm_p2', 'mxfp8'):.3f}"


def other_way() -> str:
    runs = before()
    return f"{loss_of(runs, 0, 'mxnorm_p2', 'mxfp8') - loss_of(runs, 0, 'rmsnorm', 'mxfp8'):.3f}"


def spread_of_seeds() -> float:
    runs = before()
    return float(runs.loc[runs[PRECISION_CHOICE] == "bf16", LOSS].std())


def over(norm: str, seed: int, other: str, other_seed: int, precision: str) -> float:
    """Return the tokens/s of an MXFP8 run divided by those of another run."""
    rate = pretrained().set_index([NORM_CHOICE, SEED, PRECISION_CHOICE])["tokens_per_s"]
    return float(rate[norm, seed, "mxfp8"] / rate[other, other_seed, precision])


def faster_gpu() -> str:
    """Return by how much the GPU that did not train bf16 is faster in MXFP8, with either norm."""
    found = over("rmsnorm", 1, "rmsnorm", 0, "mxfp8"), over("mxnorm_p2", 0, "mxnorm_p2", 1, "mxfp8")
    return least_and_most(100 * (pd.Series(found) - 1), ".1f") + " %"


def spread_of_speed() -> str:
    """Return the largest distance of a run's 10th or 90th percentile of tokens/s from its median."""
    metrics = rows_of("metrics", "mxnorm_pretrain", "mxnorm_pretrain_seed1")
    of_run = metrics.groupby("fingerprint")["tokens_per_s"].quantile([0.1, 0.5, 0.9]).unstack()
    return f"{100 * (of_run.div(of_run[0.5], axis=0) - 1).abs().max().max():.1f} %"


@cache
def output_rms() -> pd.DataFrame:
    """Return the RMS of MXNorm's outputs by run and step.

    The columns are the norms in MX except the two of the first layer.
    """
    labels = rows_of("runs", "mxnorm_pretrain").query(f"`{NORM_CHOICE}`.str.startswith('mxnorm')")["fingerprint"]
    found = rows_of("norm_output_rms", "mxnorm_pretrain")
    found = found[found["fingerprint"].isin(labels)].sort_values("step").set_index(["fingerprint", "step"])
    return found.filter(regex=r"^layers\.[1-9].*/rms$")


def rms_at(step: str) -> str:
    """Return the least and the most over norms and runs, at the first or at the last step."""
    at = output_rms().groupby(level=0).first() if step == "first" else output_rms().groupby(level=0).last()
    return least_and_most(at.stack(), ".2f")


@cache
def histograms() -> pd.DataFrame:
    norms = rows_of("runs", "mxnorm_pretrain")[["fingerprint", NORM_CHOICE]]
    return rows_of("activation_histograms", "mxnorm_pretrain").merge(norms)


def bound_of(histograms: pd.DataFrame, norm: str) -> str:
    """Return the bound of the outputs of a norm that is in MX."""
    (bound,) = histograms.loc[histograms[NORM_CHOICE] == norm, "layers.0.ffn_norm/bound"].unique()
    return f"{bound:.1f}".removesuffix(".0")


def bound(norm: str) -> str:
    return bound_of(histograms(), norm)


def of_bins(counts: np.ndarray) -> str:
    """Return the bin of the largest magnitude that a histogram counts: '26.9 to 32'."""
    filled, edges = np.flatnonzero(counts), bin_edges()
    far = max(((-edges[filled[0] + 1], -edges[filled[0]]), (edges[filled[-1]], edges[filled[-1] + 1])))
    return " to ".join(f"{edge:.3g}" if edge < 1000 else f"{edge:,.0f}" for edge in far)


def tails(*norms: str) -> str:
    """Return the outermost bins of the fifth block's outputs: the least to the most over norms."""
    own = histograms()[histograms()[NORM_CHOICE].isin(norms)].filter(regex=r"^layers\.4\..*/output$")
    ends = [float(word) for counts in own.to_numpy().ravel() for word in of_bins(np.asarray(counts)).split(" to ")]
    return f"{min(ends):.1f} to {max(ends):.1f}"


def plain_over_bf16() -> str:
    """Return the tokens/s of MXFP8 divided by those of bf16 in compiled PyTorch, at the earlier commit."""
    runs = before().query(f"`{NORM_CHOICE}` == 'rmsnorm' and `{SEED}` == 0").set_index(PRECISION_CHOICE)["tokens_per_s"]
    return f"{runs['mxfp8'] / runs['bf16']:.2f}"


def of_corpus(key: str) -> int:
    """Return a number of the corpus, over both splits."""
    return sum(split[key] for split in benchmark("mxnorm_pretrain_shards")["splits"].values())


PRETRAIN: Parts = {
    **{f"bound of {norm}": partial(bound, norm) for norm in NORMS},
    "tails of p=2": partial(tails, "mxnorm_p2"),
    "tails of the others": partial(tails, "rmsnorm", "mxnorm_p1"),
    "plain MXFP8 over bf16": plain_over_bf16,
    "spread of tokens/s": spread_of_speed,
    "spikes": lambda: f"{pretrained()['spikes'].sum():.0f}",
    "corpus": lambda: f"{of_corpus('bytes') / 1e6:.1f} MB in {of_corpus('documents'):,} documents",
    "duplicates": lambda: str(of_corpus("duplicates")),
    "arms": arms,
    "earlier": earlier,
    "range": lambda: f"{pretrained()[LOSS].max() - pretrained()[LOSS].min():.3f}",
    "seed 0": partial(lower, 0),
    "seed 1": partial(lower, 1),
    "below the unigram entropy": lambda: f"{(pretrained()['unigram_entropy_nats'] - pretrained()[LOSS]).min():.1f}",
    "unigram entropy": lambda: f"{pretrained()['unigram_entropy_nats'].iloc[0]:.4f}",
    "other way": other_way,
    "RMS at the start": partial(rms_at, "first"),
    "RMS at the end": partial(rms_at, "last"),
    "largest RMS": lambda: f"{output_rms().max().max():.2f}",
    "MXFP8 over bf16": lambda: f"{over('rmsnorm', 0, 'rmsnorm', 0, 'bf16'):.2f}",
    "MXNorm over bf16": lambda: f"{over('mxnorm_p2', 1, 'rmsnorm', 0, 'bf16'):.2f}",
    "the other GPU": faster_gpu,
    "spread": lambda: f"{spread_of_seeds():.3f}",
    "spread of a difference": lambda: f"{2**0.5 * spread_of_seeds():.3f}",
}


# ---------------------------------------------------------------------------------------------- learning rates


def sensitivity_runs() -> pd.DataFrame:
    return rows_of("runs", "lr_sensitivity")


@cache
def losses_by_rate() -> pd.DataFrame:
    """Return losses by rate and seed (rows) and norm (columns)."""
    return sensitivity_runs().pivot(index=[RATE, SEED], columns=NORM_CHOICE, values=LOSS)


@cache
def less_rmsnorm() -> pd.DataFrame:
    """Return MXNorm's losses minus RMSNorm's, by rate and seed (rows) and norm (columns)."""
    return losses_by_rate().drop(columns="rmsnorm").sub(losses_by_rate()["rmsnorm"], axis=0)


def sensitivity() -> str:
    cells = []
    for rate, losses in losses_by_rate().groupby(level=RATE):
        half = losses.diff().abs().iloc[-1] / 2
        said = [f"{losses[norm].mean():.3f} +- {half[norm]:.3f}" for norm in NORMS]
        less = [losses[norm] - losses["rmsnorm"] for norm in NORMS if norm != "rmsnorm"]
        cells.append([power(rate), *said, *(", ".join(f"{one:+.3f}" for one in each) for each in less)])
    seeds = ", ".join(map(str, losses_by_rate().index.unique(SEED)))
    columns = ["lr", *NORMS.values(), *(f"{p} minus RMSNorm, seed {seeds}" for p in ("p=1", "p=2"))]
    return markdown(columns, cells, left=columns)


def best_rate() -> str:
    best = {power(rate) for rate in losses_by_rate().groupby(level=RATE).mean().idxmin()}
    return " and ".join(sorted(best))


def beyond() -> pd.DataFrame:
    """Return MXNorm's losses minus RMSNorm's at 2^-5 and 2^-3."""
    return less_rmsnorm().loc[2.0**-5 :]


def interval(norm: str, rate: float) -> str:
    low, high = student(less_rmsnorm().loc[rate, norm], CONFIDENCE)
    return f"{low:+.2f} .. {high:+.2f}"


def apart(rate: float) -> str:
    """Return the least and the most, over norms, by which the two seeds of a norm differ at a rate."""
    losses = losses_by_rate().loc[rate]
    return least_and_most(losses.max() - losses.min(), ".2f")


def both_norms(rate: float) -> str:
    """Return the absolute mean differences of p=1 and p=2."""
    return " and ".join(f"{abs(value):.3f}" for value in less_rmsnorm().loc[rate].mean()[["mxnorm_p1", "mxnorm_p2"]])


def repeats() -> str:
    """Return the most by which a difference at the two lowest rates differs between seeds."""
    lowest = less_rmsnorm().loc[: 2.0**-11].groupby(level=RATE)
    return f"{(lowest.max() - lowest.min()).max().max():.3f}"


def at_best(norm: str) -> str:
    return f"{less_rmsnorm().loc[2.0**-9, norm].mean():+.2f}"


SENSITIVITY: Parts = {
    "unigram entropy": lambda: f"{sensitivity_runs()['unigram_entropy_nats'].iloc[0]:.4f}",
    "parameters": lambda: f"{sensitivity_runs()['parameters'].iloc[0] / 1e6:.1f}",
    "interval of p=2 at 2^-3": partial(interval, "mxnorm_p2", 2.0**-3),
    "seeds apart at the best": partial(apart, 2.0**-9),
    "at 2^-13": partial(both_norms, 2.0**-13),
    "at 2^-11": partial(both_norms, 2.0**-11),
    "repeats": repeats,
    "losses": sensitivity,
    "best rate": best_rate,
    "above": lambda: f"{int((beyond() > 0).sum().sum())} of {beyond().size}",
    "up to": lambda: f"{beyond().max().max():.2f}",
    "at the best, p=1": partial(at_best, "mxnorm_p1"),
    "at the best, p=2": partial(at_best, "mxnorm_p2"),
}

"""Make the parts of the page about the spike proxy: losses, and the inputs and outputs of its norms."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pandas as pd

from analysis.pages.language_models import LOSS, NORM_CHOICE, NORMS, bound_of, loss_of, of_bins
from analysis.pages.marks import Parts, benchmark, least_and_most, one_or_range, rows_of
from analysis.units import SEED
from mxstudy.results import markdown, smoothed

MXNORMS = ("mxnorm_p1", "mxnorm_p2")
SEEDS = (0, 1)


def proxy_runs() -> pd.DataFrame:
    return rows_of("runs", "spike_proxy")


def of_run(rows: pd.DataFrame, norm: str, seed: int) -> pd.DataFrame:
    """Return the rows of one run, by step."""
    runs = proxy_runs()
    (run,) = runs.loc[(runs[NORM_CHOICE] == norm) & (runs[SEED] == seed), "fingerprint"]
    return rows[rows["fingerprint"] == run].sort_values("step").set_index("step")


def table() -> str:
    runs, rms = proxy_runs(), rows_of("norm_output_rms", "spike_proxy")
    last = rms.sort_values("step").groupby("fingerprint").tail(1).set_index("fingerprint").filter(regex="/rms$")
    cells = []
    for _, run in runs.iterrows():
        cells.append(
            (
                NORMS[run[NORM_CHOICE]],
                run[SEED],
                run["fingerprint"][:12],
                f"{run[LOSS]:.4f}",
                f"{run['spike_score']:.1f}",
                one_or_range(last.loc[run["fingerprint"]], ".2f").replace(" to ", " .. "),
            )
        )
    columns = [
        *("norm", "seed", "fingerprint", "validation loss", "spike score"),
        "RMS of the norms' outputs at the end, least .. largest",
    ]
    return markdown(columns, cells, left=columns)


def of_proxy(norm: str, seed: int) -> str:
    """Return by how much a norm's validation loss differs from RMSNorm's, without the sign."""
    runs = proxy_runs()
    return f"{abs(loss_of(runs, seed, norm) - loss_of(runs, seed, 'rmsnorm')):.3f}"


def largest(side: str, norm: str, seed: int) -> str:
    """Return the bin of the largest input or output of any norm with MX operands, in the last histogram."""
    seen = rows_of("activation_histograms", "spike_proxy")
    last = of_run(seen, norm, seed).iloc[-1]
    return of_bins(
        np.sum([last[name] for name in seen if name.endswith(f"/{side}") and name != f"norm/{side}"], axis=0)
    )


# -------------------------------------------------------------------------------------------------------------- losses


@cache
def losses(norm: str, seed: int) -> pd.Series:
    return of_run(rows_of("metrics", "spike_proxy"), norm, seed)["loss"]


def largest_rise(after: int) -> str:
    """Return the largest rise of a loss from one step to the next, after step `after`."""
    return f"{max(losses(norm, seed).diff().loc[after + 1 :].max() for norm in NORMS for seed in SEEDS):.2f}"


def apart(norm: str, seed: int) -> pd.Series:
    """Return a norm's smoothed loss minus RMSNorm's, as the figure has them."""
    return smoothed(losses(norm, seed)) - smoothed(losses("rmsnorm", seed))


def lead(seed: int) -> str:
    """Return the largest leads of the MXNorms after step 200: the least and the most."""
    return least_and_most(pd.Series([-apart(norm, seed).loc[200:].min() for norm in MXNORMS]), ".2f")


def in_the_end() -> str:
    """Return the largest difference from step 800 on."""
    return f"{max(apart(norm, seed).loc[800:].abs().max() for norm in MXNORMS for seed in SEEDS):.3f}"


# --------------------------------------------------------------------------------------------------------------- norms


def output_rms(norm: str, seed: int) -> pd.DataFrame:
    found = of_run(rows_of("norm_output_rms", "spike_proxy"), norm, seed)
    return found.filter(regex=r"^layers\..*/rms$")


def off_one(norm: str, seed: int) -> str:
    """Return how far from 1 a norm's outputs are at most, from step 100 on."""
    return f"{100 * (output_rms(norm, seed).loc[100:] - 1).abs().max().max():.0f} %"


def least_at_the_end(norm: str, seed: int) -> str:
    return f"{output_rms(norm, seed).iloc[-1].min():.2f}"


def massive(norm: str, seed: int) -> str:
    """Return the largest activation into any norm but the decoder's last, at the end."""
    found = of_run(rows_of("outlier_features", "spike_proxy"), norm, seed)
    return f"{found.filter(regex=r'^layers.*/absmax$').iloc[-1].max():.0f}"


def bound(norm: str) -> str:
    norms = proxy_runs()[["fingerprint", NORM_CHOICE]]
    return bound_of(rows_of("activation_histograms", "spike_proxy").merge(norms), norm)


def median_of(column: str, form: str) -> str:
    return f"{proxy_runs()[column].median():{form}}"


def of_training(key: str) -> float:
    return float(benchmark("spike_proxy_shards")["splits"]["train"][key])


PROXY: Parts = {
    "runs": table,
    "spikes": lambda: f"{proxy_runs()['spikes'].sum():.0f}",
    "largest rise": partial(largest_rise, 120),
    "lead, seed 0": partial(lead, 0),
    "trail, seed 1": lambda: f"{apart('mxnorm_p2', 1).loc[200:].max():.2f}",
    "in the end": in_the_end,
    "p=1, seed 1, off 1": partial(off_one, "mxnorm_p1", 1),
    "p=1, seed 0, at the end": lambda: f"{output_rms('mxnorm_p1', 0).iloc[-1].max():.2f}",
    **{f"p=2, seed {seed}, at the end": partial(least_at_the_end, "mxnorm_p2", seed) for seed in SEEDS},
    **{f"bound of {norm}": partial(bound, norm) for norm in NORMS},
    **{f"{norm}, seed {seed}": partial(of_proxy, norm, seed) for norm in MXNORMS for seed in SEEDS},
    **{
        f"largest {side} of {norm}, seed {seed}": partial(largest, side, norm, seed)
        for side in ("input", "output")
        for norm in NORMS
        for seed in SEEDS
    },
    **{f"massive, {norm}, seed {seed}": partial(massive, norm, seed) for norm in NORMS for seed in SEEDS},
    "tokens/s": partial(median_of, "tokens_per_s", ",.0f"),
    "memory": partial(median_of, "memory_gib", ".0f"),
    "MFU": partial(median_of, "mfu", ".2f"),
    "tokens": lambda: f"{of_training('tokens') / 1e6:.1f}",
    "documents": lambda: f"{of_training('documents'):,.0f}",
}

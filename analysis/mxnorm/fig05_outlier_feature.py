"""Loss (top) and largest activations (bottom), one column per run (MXNorm paper, figure 5).

The activations are, by step around the first spike of each run (dotted), the absmax over tokens of the residual
stream's largest features at one norm. If no run has a recorded spike, they are the largest activation at every norm
over the whole training, by tokens.

python -m analysis.mxnorm.fig05_outlier_feature --runs runs/outlier_feature
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from analysis.command import command
from analysis.style import TWO_COLUMNS, caption, figure_parser, heading, load_chosen, load_or_none, plt, save
from mxstudy.results import in_tokens

FEATURES = 24  # number of features in a heat map


def around_spikes(rings: pd.DataFrame, norm: str | None) -> dict[str, tuple[pd.DataFrame, int | None]]:
    """Return, by run, absmax around its first spike by feature (rows, largest on top) and step, and the spike's step.

    `norm` names the norm. If it is None, it is the one at which a single feature is farthest above the median.
    """
    maps: dict[str, tuple[pd.DataFrame, int | None]] = {}
    for run, own in rings.groupby("fingerprint", sort=False):
        first = own[own["spike"] == own["spike"].min()]
        values = {name: np.stack(one["absmax"].to_list(), axis=1) for name, one in first.groupby("norm", sort=False)}
        name = norm or max(values, key=lambda name: values[name].max() / np.median(values[name]))
        if name not in values:
            raise ValueError(f"--norm: no norm is called {name}; choose from {', '.join(values)}")
        frame = pd.DataFrame(values[name], columns=first.loc[first["norm"] == name, "step"])
        top = frame.max(axis=1).nlargest(FEATURES).index
        maps[str(run)] = frame.loc[top].rename_axis(index=f"feature at {name}"), int(first["spike"].iloc[0])
    return maps


def over_training(rows: pd.DataFrame, norm: str | None) -> dict[str, tuple[pd.DataFrame, int | None]]:
    """Return, by run, the absmax by norm (rows) and tokens (columns), and None for the spike.

    `norm` chooses a single norm.
    """
    columns = [column for column in rows if column.endswith("/absmax")]
    chosen = [column for column in columns if norm is None or column == f"{norm}/absmax"]
    if not chosen:
        raise ValueError(f"--norm: no norm is called {norm}; choose from {', '.join(c[:-7] for c in columns)}")
    return {
        str(run): (own.set_index("tokens")[chosen].T.rename(index=lambda name: name.removesuffix("/absmax")), None)
        for run, own in rows.groupby("fingerprint", sort=False)
    }


def draw(maps: dict[str, tuple[pd.DataFrame, int | None]], metrics: pd.DataFrame) -> Figure:
    size, shares = (TWO_COLUMNS, 4.2), {"height_ratios": (1, 3)}
    figure, panels = plt.subplots(2, len(maps), figsize=size, sharex="col", squeeze=False, gridspec_kw=shares)
    values = np.concatenate([heat.to_numpy().ravel() for heat, _ in maps.values()])
    color = LogNorm(values[values > 0].min(), values.max())
    for (top, bottom), (run, (heat, spike)) in zip(panels.T, maps.items(), strict=True):
        x = str(heat.columns.name)
        losses = metrics[(metrics["fingerprint"] == run) & metrics[x].between(heat.columns[0], heat.columns[-1])]
        top.plot(losses[x], losses["loss"], color="black", linewidth=0.8)
        top.set_title(heading(losses["name"].iloc[0]), fontsize=6)
        top.sharey(panels[0, 0])
        top.tick_params(labelleft=top is panels[0, 0])
        image = bottom.pcolormesh(heat.columns, np.arange(len(heat)), heat, norm=color, cmap="magma", rasterized=True)
        bottom.grid(False)
        bottom.tick_params(axis="x", labelsize=6, rotation=45 if len(maps) > 4 else 0)
        if spike is None:
            in_tokens(bottom, label="")
        for axes in (top, bottom):
            if spike is not None:
                axes.axvline(spike, color="0.5", linestyle=":", linewidth=1)
        some = np.linspace(0, len(heat) - 1, min(len(heat), 12)).astype(int)
        bottom.set_yticks(some, heat.index[some] if spike is not None or bottom is panels[1, 0] else [""] * len(some))
        bottom.tick_params(axis="y", labelsize=6)
        bottom.set_ylabel(heat.index.name, fontsize=7)
        bottom.invert_yaxis()
    panels[0, 0].set_ylabel("training loss,\nnats a token")
    figure.supxlabel("training tokens" if spike is None else "step", fontsize=8)
    figure.colorbar(image, ax=panels[1], label="largest |activation|", aspect=30)
    return figure


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = figure_parser("mxnorm_fig05_outlier_feature", __doc__)
    options.add_argument("--norm", metavar="NAME", help="such as layers.0.ffn_norm")
    chosen = options.parse_args(arguments)
    (metrics,) = load_chosen(options, chosen, "metrics")
    rings = load_or_none(chosen.runs, "spike_rings")
    has_rings = rings is not None and rings["fingerprint"].isin(metrics["fingerprint"]).any()
    kind, summary = ("spike_rings", around_spikes) if has_rings else ("outlier_features", over_training)
    (rows,) = load_chosen(options, chosen, kind)
    with options.usage_errors():
        maps = summary(rows, chosen.norm)
    save(draw(maps, metrics), chosen, caption(rows, __doc__, chosen.runs))


if __name__ == "__main__":
    main()

"""Speedup of norm and cast by MXNorm (MXNorm paper, figure 8), one panel per format and block size.

Solid: MXNorm in one pass over compiled RMSNorm and cast. Dashed: over our RMSNorm and cast in one pass, which isolates
the effect of the norm. Dotted: compiled MXNorm over compiled RMSNorm, as in the paper. By hidden size, one colour per
number of tokens. Titles: geometric means. Above 1, MXNorm is faster.

python -m analysis.mxnorm.fig08_kernels --runs runs/kernels.json
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.command import command
from analysis.style import ONE_COLUMN, TWO_COLUMNS, make_figure, plt
from mxstudy.results import legend

SPEEDUPS: dict[str, tuple[Any, str]] = {  # {column: line, name}
    "over_compiled_rmsnorm": ("-", "MXNorm in one pass over compiled RMSNorm and cast"),
    "over_one_pass_rmsnorm": ("--", "the same over RMSNorm and cast in one pass"),
    "compiled_over_compiled_rmsnorm": (":", "both compiled"),
}


def draw(rows: pd.DataFrame) -> Figure:
    """Draw the figure. `rows` have format, block_size, hidden_size, tokens, and each of SPEEDUPS."""
    formats, blocks = (sorted(rows[key].unique()) for key in ("format", "block_size"))
    size = (TWO_COLUMNS if len(blocks) > 1 else ONE_COLUMN, 0.35 * TWO_COLUMNS * len(formats))
    figure, panels = plt.subplots(len(formats), len(blocks), figsize=size, sharex=True, sharey=True, squeeze=False)
    tokens = sorted(rows["tokens"].unique())
    colors = dict(zip(tokens, plt.cm.viridis(np.linspace(0, 0.9, len(tokens))), strict=True))
    for (fmt, block_size), cases in rows.groupby(["format", "block_size"]):
        axes = panels[formats.index(fmt), blocks.index(block_size)]
        axes.axhline(1, color="0.6", linewidth=0.6)
        for number, of_tokens in cases.sort_values("hidden_size").groupby("tokens"):
            for speedup, (line, _) in SPEEDUPS.items():
                label = f"{number:,} tokens" if line == "-" else None
                axes.plot(of_tokens["hidden_size"], of_tokens[speedup], line, color=colors[number], label=label)
        ours, one_pass, compiled = (np.exp(np.log(cases[speedup]).mean()) for speedup in SPEEDUPS)
        means = f"solid {ours:.2f}, dashed {one_pass:.3f}, dotted {compiled:.2f}"
        axes.set_title(f"{fmt}, B = {block_size}:\n{means}", fontsize=8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
    for axes in panels[-1]:
        axes.set_xlabel("hidden size")
    for axes in panels[:, 0]:
        axes.set_ylabel("speedup")
    legend(figure, *(plt.Line2D([], [], color="0.4", linestyle=line, label=name) for line, name in SPEEDUPS.values()))
    return figure


@command
def main(arguments: Sequence[str] | None = None) -> None:
    make_figure("mxnorm_fig08_kernels", __doc__, arguments, draw, "benchmark")


if __name__ == "__main__":
    main()

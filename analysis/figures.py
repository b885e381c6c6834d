"""Every figure and table: draws those that results/ backs, and says which commands make the runs of the others.

python -m analysis.figures [NAME ...]
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path("results")


@dataclass(frozen=True)
class Figure:
    """`name`: of a module of analysis. `kinds`: the rows that it is drawn from; `results`: the tables of results/ that
    have them, by what their names begin with, or None. `command`: what makes such runs."""

    name: str
    shows: str
    kinds: tuple[str, ...]
    command: str
    runs: str
    results: str | None = None

    def backing(self) -> list[Path]:
        """The tables of results/ that it is drawn from."""
        return [RESULTS / f"{self.results}_{kind}.parquet" for kind in self.kinds] if self.results else []


APPROXIMATION = ("python -m mxstudy +experiment=approximation", "runs/approximation")
PROBED = ("python -m mxstudy +sweep=mxnorm_pretrain probe=activations", "runs/mxnorm_pretrain", "mxnorm_pretrain")
SIZES = (
    "python -m mxstudy +experiment=lr_sensitivity model=llama_125m,llama_250m,llama_1b train.steps=5000,10000,20000",
    "runs/lr_sensitivity",
)
FIGURES = (
    Figure("loss_curves", "training losses", ("metrics",), *PROBED),
    Figure("mxnorm_fig02_approximation", "MXNorm paper, figure 2", ("distributions", "fidelity"), *APPROXIMATION),
    Figure("mxnorm_theorem1_bounds", "MXNorm paper, Theorem 1, lemmas", ("convergence", "bounds"), *APPROXIMATION),
    Figure("mxnorm_fig06_norm_rms", "MXNorm paper, figure 6", ("norm_output_rms",), *PROBED),
    Figure("mxnorm_fig07_histograms", "MXNorm paper, figure 7", ("activation_histograms",), *PROBED),
    Figure("mxnorm_figa3_spike_scores", "MXNorm paper, figure A.3", ("runs",), *PROBED),
    Figure("cast_quality", "every format, scale rule and rounding", ("quality",), *APPROXIMATION),
    Figure("instability_table02_scaling_fits", "instability paper, table 2", ("runs",), *SIZES),
    Figure("formats_table", "MXFP8 recipe, table 1", ("formats",), *APPROXIMATION),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a figure that is backed could not be drawn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all if none is given")
    names = parser.parse_args(arguments).names
    known = {figure.name: figure for figure in FIGURES}
    for name in set(names) - known.keys():
        parser.error(f"no figure is called {name}; choose from {', '.join(known)}")
    chosen = [known[name] for name in names] or list(FIGURES)
    backed = [figure for figure in chosen if figure.backing() and all(path.exists() for path in figure.backing())]
    failed = [figure.name for figure in backed if not draw(figure)]
    rest = [figure for figure in chosen if figure not in backed]
    if rest:
        print("\nnot backed by results/; these commands make the runs, minutes on a laptop or days on GPUs:")
    for figure in rest:
        print(f"  {figure.name}: {figure.shows}\n    {figure.command}")
        print(f"    python -m analysis.{figure.name} --runs {figure.runs}")
    if failed:
        print(f"could not be drawn: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def draw(figure: Figure) -> bool:
    try:
        importlib.import_module(f"analysis.{figure.name}").main(["--runs", str(RESULTS / str(figure.results))])
    except (Exception, SystemExit):  # one that fails must not keep the others from being drawn
        traceback.print_exc()
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())

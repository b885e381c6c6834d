"""The element formats as a Markdown table (MXFP8 recipe, table 1), beside the paper's numbers.

python -m analysis.recipe.formats_table --runs runs/approximation
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from analysis.command import command
from analysis.ledger.arithmetic import FORMATS
from analysis.style import load_last, save_table, table_parser
from mxstudy import results

COLUMNS = ("format", "max", "min subnormal", "binades", "scale", "the paper prints")


def markdown(rows: pd.DataFrame) -> str:
    cells = []
    for row in rows.itertuples():
        printed = ", ".join(words(*FORMATS[row.format])) if row.format in FORMATS else "-"
        cells.append((row.format, *words(row.max, row.min_subnormal, row.binades), row.scale, printed))
    return results.markdown(COLUMNS, cells, left=COLUMNS) + "\n"


def words(largest: float, smallest: float, binades: float) -> tuple[str, str, str]:
    mantissa, exponent = math.frexp(largest)
    return f"{2 * mantissa:g} * 2^{exponent - 1}", f"2^{math.log2(smallest):.0f}", f"{binades:.1f}"


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = table_parser("formats_table", __doc__)
    chosen = options.parse_args(arguments)
    save_table(markdown(*load_last(options, chosen, "formats")), chosen.name)


if __name__ == "__main__":
    main()

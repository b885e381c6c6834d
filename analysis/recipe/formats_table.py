"""The element formats as a Markdown table (MXFP8 recipe, table 1), beside the paper's numbers.

python -m analysis.recipe.formats_table --runs runs/approximation
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from analysis.command import command
from analysis.style import load_last, save_table, table_parser
from mxstudy import results

COLUMNS = ("format", "max", "min subnormal", "binades", "scale", "the paper prints")
# Maximum, smallest number, binades. The smallest of E3M2 is a misprint: the printed binades need 2^-4.
PRINTED = {
    "E4M3": "1.75 * 2^8, 2^-9, 17.8",
    "E5M2": "1.75 * 2^15, 2^-16, 31.8",
    "E3M2": "1.75 * 2^4, 2^-3, 8.8",
    "E2M3": "1.875 * 2^2, 2^-3, 5.9",
    "E2M1": "1.5 * 2^2, 2^-1, 3.6",
}


def markdown(rows: pd.DataFrame) -> str:
    cells = []
    for row in rows.itertuples():
        mantissa, exponent = math.frexp(row.max)
        largest, smallest = f"{2 * mantissa:g} * 2^{exponent - 1}", f"2^{math.log2(row.min_subnormal):.0f}"
        cells.append((row.format, largest, smallest, f"{row.binades:.1f}", row.scale, PRINTED.get(row.format, "-")))
    return results.markdown(COLUMNS, cells, left=COLUMNS) + "\n"


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = table_parser("formats_table", __doc__)
    chosen = options.parse_args(arguments)
    save_table(markdown(*load_last(options, chosen, "formats")), chosen.name)


if __name__ == "__main__":
    main()

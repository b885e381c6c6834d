"""The parts of the page about kernels, from the JSON of benchmarks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis.pages.marks import Parts, benchmark, rows
from mxstudy.results import markdown


def means(fmt: str, block: int, large: bool = False) -> dict[str, Any]:
    all_of_them = benchmark("kernels")["settings"]["geometric_means"]
    (found,) = (
        one
        for one in all_of_them
        if (one["format"], one["block_size"]) == (fmt, block) and (one["of"] != "all") == large
    )
    return dict(found)


def kernels() -> str:
    cells = []
    for fmt in ("E4M3", "E2M1"):
        for block in (16, 32, 64):
            every, large = means(fmt, block), means(fmt, block, large=True)
            cells.append(
                (
                    fmt,
                    block,
                    f"{every['over_compiled_rmsnorm']:.2f}",
                    f"{every['over_one_pass_rmsnorm']:.3f}",
                    f"{every['compiled_over_compiled_rmsnorm']:.2f}",
                    f"{every['mxnorm_of_floor']:.3f}",
                    f"{large['mxnorm_of_floor']:.3f}",
                    f"{large['least_mxnorm_of_floor']:.3f}",
                )
            )
    shapes, of_large = means("E4M3", 32)["cases"], means("E4M3", 32, large=True)["cases"]
    columns = [
        *("format", "B", "over compiled RMSNorm", "over one-pass RMSNorm", "compiled MXNorm over compiled RMSNorm"),
        *(f"share of the floor, {shapes} shapes", f"{of_large} shapes of 2^25 elements and more", "the least of these"),
    ]
    return markdown(columns, cells, left=["format"])


def layers() -> str:
    found = pd.DataFrame(rows("layers"))
    said = {
        ("mxnorm", "compiled"): "compiled MXNorm",
        ("rmsnorm", "one_pass"): "RMSNorm in one pass",
        ("mxnorm", "one_pass"): "MXNorm in one pass",
    }
    cells = []
    for (norm, by), words in said.items():
        own = found[(found["norm"] == norm) & (found["kernels"] == by)]
        over = [own.loc[own["precision"] == precision, "over_compiled_rmsnorm"] for precision in ("MXFP8", "NVFP4")]
        cells.append((words, *(f"{mean_of(x):.3f} ({x.min():.3f} .. {x.max():.3f})" for x in over)))
    return markdown(["", "MXFP8", "NVFP4"], cells, left=["", "MXFP8", "NVFP4"])


def mean_of(values: pd.Series) -> float:
    """Return the geometric mean."""
    return float(np.exp(np.log(values).mean()))


def of_layers(precision: str, by: str) -> float:
    all_of_them = benchmark("layers")["settings"]["geometric_means"]
    (found,) = (one for one in all_of_them if (one["precision"], one["mxnorm_by"]) == (precision, "one_pass"))
    return float(found[by])


def kernel(fmt: str, block: int, column: str, digits: int) -> str:
    return f"{means(fmt, block)[column]:.{digits}f}"


KERNELS: Parts = {
    "kernels": kernels,
    "layers": layers,
    "E4M3": lambda: kernel("E4M3", 32, "over_compiled_rmsnorm", 2),
    "E2M1": lambda: kernel("E2M1", 16, "over_compiled_rmsnorm", 2),
    "RMSNorm in E4M3": lambda: kernel("E4M3", 32, "one_pass_rmsnorm_over_compiled", 2),
    "RMSNorm in E2M1": lambda: kernel("E2M1", 16, "one_pass_rmsnorm_over_compiled", 2),
    "compiled E4M3": lambda: kernel("E4M3", 32, "compiled_over_compiled_rmsnorm", 2),
    "compiled E2M1": lambda: kernel("E2M1", 16, "compiled_over_compiled_rmsnorm", 2),
    "layer in MXFP8": lambda: f"{100 * (of_layers('MXFP8', 'over_compiled_rmsnorm') - 1):.1f} %",
    "layer in NVFP4": lambda: f"{100 * (of_layers('NVFP4', 'over_compiled_rmsnorm') - 1):.1f} %",
    "one pass in MXFP8": lambda: f"{of_layers('MXFP8', 'speedup'):.3f}",
    "one pass in NVFP4": lambda: f"{of_layers('NVFP4', 'speedup'):.3f}",
}

"""Make the parts of the page about kernels, from the JSON of benchmarks."""

from __future__ import annotations

from functools import cache, partial
from statistics import geometric_mean
from typing import Any

import pandas as pd

from analysis.pages.marks import Parts, benchmark, frame, least_and_most
from mxstudy.results import markdown

FORMATS, BLOCKS = ("E4M3", "E2M1"), (16, 32, 64)


def means(fmt: str, block: int, large: bool = False) -> dict[str, Any]:
    all_of_them = benchmark("kernels")["settings"]["geometric_means"]
    (found,) = (
        one
        for one in all_of_them
        if (one["format"], one["block_size"]) == (fmt, block) and (one["of"] != "all") == large
    )
    return dict(found)


def kernels() -> str:
    cells, with_torchao = [], "over_torchao" in means("E4M3", 32)
    for fmt in FORMATS:
        for block in BLOCKS:
            every, large = means(fmt, block), means(fmt, block, large=True)
            cells.append(
                (
                    fmt,
                    block,
                    f"{every['over_compiled_rmsnorm']:.2f}",
                    f"{every['over_one_pass_rmsnorm']:.3f}",
                    *([f"{every['over_torchao']:.2f}"] if with_torchao else []),
                    f"{every['compiled_over_compiled_rmsnorm']:.2f}",
                    f"{every['mxnorm_of_floor']:.3f}",
                    f"{large['mxnorm_of_floor']:.3f}",
                    f"{large['least_mxnorm_of_floor']:.3f}",
                )
            )
    shapes, of_large = means("E4M3", 32)["cases"], means("E4M3", 32, large=True)["cases"]
    columns = [
        *("format", "B", "over compiled RMSNorm", "over one-pass RMSNorm"),
        *(["over RMSNorm with torchao's cast, compiled"] if with_torchao else []),
        "compiled MXNorm over compiled RMSNorm",
        *(f"share of the floor, {shapes} shapes", f"{of_large} shapes of 2^25 elements and more", "the least of these"),
    ]
    return markdown(columns, cells, left=["format"])


def layers() -> str:
    found = frame("layers")
    said = {
        ("mxnorm", "compiled"): "compiled MXNorm",
        ("rmsnorm", "one_pass"): "RMSNorm in one pass",
        ("mxnorm", "one_pass"): "MXNorm in one pass",
    }
    cells = []
    for (norm, by), words in said.items():
        own = found[(found["norm"] == norm) & (found["kernels"] == by)]
        over = [own.loc[own["precision"] == precision, "over_compiled_rmsnorm"] for precision in ("MXFP8", "NVFP4")]
        cells.append((words, *(f"{geometric_mean(x):.3f} ({x.min():.3f} .. {x.max():.3f})" for x in over)))
    return markdown(["", "MXFP8", "NVFP4"], cells, left=["", "MXFP8", "NVFP4"])


def of_layers(precision: str, by: str) -> float:
    all_of_them = benchmark("layers")["settings"]["geometric_means"]
    (found,) = (one for one in all_of_them if (one["precision"], one["mxnorm_by"]) == (precision, "one_pass"))
    return float(found[by])


def in_percent(precision: str) -> str:
    """Return by how much compiled RMSNorm's layers are slower than those with MXNorm in one pass."""
    return f"{100 * (of_layers(precision, 'over_compiled_rmsnorm') - 1):.1f} %"


def kernel(fmt: str, block: int, column: str) -> str:
    return f"{means(fmt, block)[column]:.2f}"


@cache
def shapes() -> pd.DataFrame:
    """Return the cases with their numbers of elements."""
    found = frame("kernels")
    return found.assign(elements=found["hidden_size"] * found["tokens"])


@cache
def large() -> pd.DataFrame:
    """Return the cases of 2^25 elements and more."""
    return shapes().query("elements >= 2**25")


def gains(fmt: str) -> str:
    """Return the least and the most by which MXNorm is faster than RMSNorm in one pass, over blocks."""
    over = pd.Series([means(fmt, block)["over_one_pass_rmsnorm"] for block in BLOCKS])
    return least_and_most(100 * (over - 1), ".1f") + " %"


def gains_of_shapes(fmt: str) -> str:
    found = shapes().query("format == @fmt")["over_one_pass_rmsnorm"]
    return least_and_most(100 * (found - 1), "+.0f") + " %"


def least() -> str:
    """Return the large case that is farthest from its floor: '0.911 (E2M1 in blocks of 64, ...)'."""
    one = large().loc[large()["mxnorm_of_floor"].idxmin()]
    shape = f"{one['format']} in blocks of {one['block_size']}, {one['tokens']:,} rows of {one['hidden_size']:,}"
    times = f"{one['mxnorm_one_pass_us']:.1f} us where the floor is {one['floor_us']:.1f}"
    return f"{one['mxnorm_of_floor']:.3f} ({shape}: {times})"


def over_alike(fmt: str) -> str:
    """Return by how many percent the kernel beats the fastest copy that moves as much, on average over large cases."""
    return f"{100 * (large().query('format == @fmt')['mxnorm_of_alike'].mean() - 1):.1f}"


def of_all_blocks(column: str) -> str:
    """Return the least and the most over formats and blocks. A `column` that is a share is of the large cases."""
    cases = [(fmt, block) for fmt in FORMATS for block in BLOCKS]
    is_share = column.endswith("of_floor")
    return least_and_most(pd.Series([means(*case, large=is_share)[column] for case in cases]), ".2f")


def share_of_a_layer() -> str:
    own = frame("layers").query("norm == 'mxnorm' and kernels == 'one_pass'")
    return least_and_most(100 * own["norm_us"] / own["layer_us"], ".0f") + " %"


def copies_lead() -> str:
    """Return by how many microseconds, at most, `copy_` beats the fastest copy that moves as much, below 2^27."""
    found = large().query("elements < 2**27")
    return f"{(found['alike_us'] - found['floor_us']).max():.1f}"


def at_2_25(fmt: str, column: str) -> str:
    """Return the geometric mean over the cases of 2^25 elements."""
    found = large().query("elements == 2**25 and format == @fmt")
    return f"{geometric_mean(found.assign(alike_of_floor=found['floor_us'] / found['alike_us'])[column]):.2f}"


def largest() -> pd.DataFrame:
    return large().query("elements >= 2**29")


def rates(column: str) -> str:
    """Return the least and the most TB/s of the largest cases."""
    return least_and_most(largest()["bytes"] / largest()[column] / 1e6, ".2f")


def spread(cases: pd.DataFrame, column: str) -> str:
    """Return half the interquartile range as a share of the median, the median over the cases."""
    half = (cases[f"{column}_q3_us"] - cases[f"{column}_q1_us"]) / 2
    return f"{100 * (half / cases[f'{column}_us']).median():.1f} %"


def spread_of_layers(precision: str) -> str:
    return spread(frame("layers").query("precision == @precision"), "layer")


MODES = {
    "dynamic": "with the number of tokens left open and tuned on the most",
    "static": "for every number of tokens",
    "autotuned": "so with max-autotune",
}


def compiled_as() -> str:
    modes = [MODES[mode] for mode in benchmark("kernels")["settings"]["compiled_as"]]
    return ", ".join(modes) + ("; the fastest of these counts" if len(modes) > 1 else "")


SHAPE = ["format", "block_size", "hidden_size", "tokens"]  # columns that tell one case from another
GPU_OF_MODES = {"kernels_modes": "H200", "kernels_modes_h100": "H100"}


@cache
def modes() -> pd.DataFrame:
    """Return the cases whose baselines are the fastest of three compilations, of both GPUs."""
    return pd.concat([frame(table).assign(gpu=gpu) for table, gpu in GPU_OF_MODES.items()], ignore_index=True)


def over_the_fastest() -> str:
    """Return a table of the speedups over the fastest of three compilations, by GPU, format and shape."""
    shown = ("over_compiled_rmsnorm", "over_torchao", "compiled_over_compiled_rmsnorm")
    cells = [
        (
            *(one["gpu"], one["format"], f"{one['tokens']:,} x {one['hidden_size']:,}", one["rmsnorm_compiled_by"]),
            *(f"{one[column]:.2f}" for column in shown),
        )
        for _, one in modes()
        .sort_values(["gpu", "format", "hidden_size", "tokens"], ascending=[True, False, True, True])
        .iterrows()
    ]
    columns = [
        *("GPU", "format", "shape", "fastest compilation", "over compiled RMSNorm"),
        *("over compiled RMSNorm with torchao's cast", "compiled MXNorm over compiled RMSNorm"),
    ]
    return markdown(columns, cells, left=columns[:4])


def of_modes(column: str, gpu: str, fmt: str) -> str:
    """Return the geometric mean over the shapes of one GPU and format."""
    return f"{geometric_mean(modes().query('gpu == @gpu and format == @fmt')[column]):.2f}"


def over_the_first() -> str:
    """Return the speedup over the first compilation alone, in the shapes of the H200 that all three have."""
    both = modes().query("gpu == 'H200'")[SHAPE].merge(frame("kernels"), on=SHAPE)
    return f"{geometric_mean(both['over_compiled_rmsnorm']):.2f}"


def bandwidth_of_the_h100() -> str:
    """Return the floors' bandwidth on the H100 over that on the H200, in the same large shapes."""
    both = modes().query("gpu == 'H100'").merge(large(), on=SHAPE, suffixes=("", "_h200"))
    return f"{geometric_mean(both['floor_us_h200'] / both['floor_us']):.2f}"


def on_both_gpus() -> pd.DataFrame:
    """Return the shapes in E2M1 of the H100, tuned, and of the H200, compiled the first way (columns ..._h200)."""
    tuned = modes().query("gpu == 'H100' and format == 'E2M1'")
    return tuned.merge(frame("kernels"), on=SHAPE, suffixes=("", "_h200"))


def h100_over_h200(column: str) -> str:
    both = on_both_gpus()
    return f"{geometric_mean(both[column] / both[f'{column}_h200']):.2f}"


def e2m1_over_e4m3(column: str) -> float:
    """Return E2M1's time divided by E4M3's, B = 16, as the geometric mean over the shapes."""
    found = shapes().query("block_size == 16")
    us = found.pivot_table(column, ["hidden_size", "tokens"], "format")
    return geometric_mean(us["E2M1"] / us["E4M3"])


def with_a_cast_as_to_e4m3() -> str:
    """Return the speedup over compiled RMSNorm in E2M1, B = 16, if its cast took no longer than that to E4M3."""
    return f"{means('E2M1', 16)['over_compiled_rmsnorm'] / e2m1_over_e4m3('rmsnorm_compiled_us'):.2f}"


KERNELS: Parts = {
    "compiled as": compiled_as,
    "compiled E2M1 over E4M3": lambda: f"{e2m1_over_e4m3('rmsnorm_compiled_us'):.2f}",
    "one pass E2M1 over E4M3": lambda: f"{e2m1_over_e4m3('rmsnorm_one_pass_us'):.2f}",
    "E2M1 with a cast as to E4M3": with_a_cast_as_to_e4m3,
    "shapes": lambda: str(means("E4M3", 32)["cases"]),
    "lead of copy_": copies_lead,
    **{f"best of the seven at 2^25, {fmt}": partial(at_2_25, fmt, "alike_of_floor") for fmt in FORMATS},
    **{f"over alike at 2^25, {fmt}": partial(at_2_25, fmt, "mxnorm_of_alike") for fmt in FORMATS},
    "GB of the largest": lambda: least_and_most(largest()["bytes"] / 1e9, ".1f"),
    "TB/s of the largest": partial(rates, "mxnorm_one_pass_us"),
    "TB/s of their floors": partial(rates, "floor_us"),
    "spread": lambda: spread(shapes(), "mxnorm_one_pass"),
    "spread of the floor": lambda: spread(shapes(), "floor"),
    **{f"spread of layers in {precision}": partial(spread_of_layers, precision) for precision in ("MXFP8", "NVFP4")},
    **{f"gain in {fmt}": partial(gains, fmt) for fmt in FORMATS},
    **{f"gain in {fmt}, of shapes": partial(gains_of_shapes, fmt) for fmt in FORMATS},
    **{f"{fmt} over alike": partial(over_alike, fmt) for fmt in FORMATS},
    "large cases": lambda: str(len(large())),
    "least": least,
    "by copy_": lambda: f"{(large()['floor_by'] == 'copy_').sum()} of {len(large())}",
    "least over alike": lambda: f"{large()['mxnorm_of_alike'].min():.3f}",
    "share of a layer": share_of_a_layer,
    "over one pass": partial(of_all_blocks, "over_one_pass_rmsnorm"),
    "of the floor": partial(of_all_blocks, "mxnorm_of_floor"),
    "least of the floor": lambda: f"{large()['mxnorm_of_floor'].min():.2f}",
    "kernels": kernels,
    "over the fastest": over_the_fastest,
    "over the first, mean": over_the_first,
    "bandwidth of the H100": bandwidth_of_the_h100,
    "over the first, E2M1": lambda: f"{geometric_mean(on_both_gpus()['over_compiled_rmsnorm_h200']):.2f}",
    "one pass, H100 over H200": partial(h100_over_h200, "mxnorm_one_pass_us"),
    "compiled, H100 over H200": partial(h100_over_h200, "rmsnorm_compiled_us"),
    **{
        f"{said}, {gpu}, {fmt}": partial(of_modes, column, gpu, fmt)
        for gpu, fmt in (("H200", "E4M3"), ("H100", "E4M3"), ("H100", "E2M1"))
        for said, column in (
            ("over the fastest", "over_compiled_rmsnorm"),
            ("over torchao", "over_torchao"),
            ("compiled MXNorm", "compiled_over_compiled_rmsnorm"),
            ("tuned, over one pass", "over_one_pass_rmsnorm"),
        )
    },
    "shapes of all modes, H200": lambda: str((modes()["gpu"] == "H200").sum()),
    "shapes of all modes, H100": lambda: str(len(modes().query("gpu == 'H100' and format == 'E4M3'"))),
    "layers": layers,
    **{
        f"{said}{fmt}": partial(kernel, fmt, block, column)
        for fmt, block in (("E4M3", 32), ("E2M1", 16))
        for said, column in (
            ("", "over_compiled_rmsnorm"),
            ("RMSNorm in ", "one_pass_rmsnorm_over_compiled"),
            ("compiled ", "compiled_over_compiled_rmsnorm"),
        )
    },
    **{f"layer in {precision}": partial(in_percent, precision) for precision in ("MXFP8", "NVFP4")},
    "one pass in MXFP8": lambda: f"{of_layers('MXFP8', 'speedup'):.3f}",
    "one pass in NVFP4": lambda: f"{of_layers('NVFP4', 'speedup'):.3f}",
}

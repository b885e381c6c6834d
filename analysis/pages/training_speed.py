"""Make the parts of the pages about the cost of a training step, from the JSON of benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd

from analysis.pages.marks import Parts, benchmark, least_and_most, row, rows
from mxstudy.results import markdown

STEPS = {  # {arm of the benchmark: its name on the page}
    "bf16": "bf16",
    "bf16, fused": "bf16, in the same kernels",
    "bf16, inductor": "bf16 as PyTorch compiles it",
    "bf16, inductor, roundings kept": "the same, roundings kept",
    "bf16, inductor, recomputing": "the same, all but GEMMs and attention recomputed",
    "bf16, fused, recomputing MLPs": "bf16, in the same kernels, the first product of some MLPs recomputed",
    "bf16, fused, full checkpointing": "bf16, in the same kernels, whole blocks recomputed",
    "mxfp8, rmsnorm": "MXFP8, RMSNorm",
    "mxfp8, rmsnorm, recomputing MLPs": "MXFP8, RMSNorm, the first product of some MLPs recomputed",
    "mxfp8, mxnorm_p2": "MXFP8, MXNorm p=2",
    "mxfp4, rmsnorm": "MXFP4, RMSNorm",
    "nvfp4, rmsnorm": "NVFP4 with all its parts, RMSNorm",
    "nvfp4 without random parts, rmsnorm": "NVFP4 without Hadamard transform and stochastic rounding",
    "plain, rmsnorm": "the same, compiled from plain PyTorch, RMSNorm",
    "plain, mxnorm_p2": "the same, compiled from plain PyTorch, MXNorm p=2",
    "torchao, rmsnorm": "torchao's MXTensor, RMSNorm",
    "plain sr_rht_2d, rmsnorm": "MXFP8 with all three, compiled from plain PyTorch, RMSNorm",
    "sr_rht_2d, rmsnorm": "MXFP8 with all three, RMSNorm",
}
READINGS = {"sm_mhz": "SM clock, MHz", "power_w": "power, W", "temperature_c": "temperature, C"}  # readings of the GPU
FUSED = "train_step_fused_llama_1b"  # with every arm in the fused blocks
SIZES = ("llama_125m", "llama_1b", "llama_125m_small", "llama_1b_small")


def baseline(name: str) -> str:
    """Return the arm that the others are compared with. Older files do not name it."""
    return str(benchmark(name)["settings"].get("baseline", "bf16"))


def step_of(size: str) -> str:
    """Return the table of a size. Files with readings of the GPU have a column for each."""
    name = f"train_step_{size}"
    settings = benchmark(name)["settings"]
    small = f", FFN {settings['ffn']}, vocabulary {settings['vocabulary']:,}" if size.endswith("_small") else ""
    head = f"step of {settings['model']}{small}"
    places = -3 if settings["model"] == "llama_125m" else -2
    readings = {key: said for key, said in READINGS.items() if f"{key}_median" in rows(name)[0]}
    cells = []
    for one in rows(name):
        is_base = one["arm"] == baseline(name)
        cells.append(
            (
                STEPS[one["arm"]],
                plus_minus(one["step_ms"], one["spread_ms"], 1),
                "1" if is_base else plus_minus(one["over_bf16"], one["over_bf16_spread"], 3),
                f"{one['peak_gib']:.1f}",
                "1" if is_base else f"{one['peak_over_bf16']:.3f}",
                f"{round(one['tokens_per_s'], places):,.0f}",
                f"{one['mfu']:.3f}",
                *(" / ".join(f"{one[f'{key}_{which}']:.0f}" for which in ("min", "median", "max")) for key in readings),
            )
        )
    columns = [head, "ms, +- half the quartiles' range", "over bf16", "peak, GiB", "over bf16", "tokens/s", "MFU"]
    return markdown(
        [*columns, *(f"{said}, least / median / largest" for said in readings.values())], cells, left=[head]
    )


def plus_minus(value: float, spread: float, digits: int) -> str:
    return f"{value:.{digits}f} +- {spread:.{digits}f}"


def of_steps(kind: str, column: str) -> str:
    """Return the least and the most of a column over the four sizes, for the arms whose names begin with `kind`."""
    found = [one[column] for size in SIZES for one in rows(f"train_step_{size}") if one["arm"].startswith(kind)]
    return least_and_most(pd.Series(found), ".2f")


def mfu(size: str) -> str:
    return f"{row(f'train_step_{size}', arm=baseline(f'train_step_{size}'))['mfu']:.3f}"


def of_settings(name: str, form: str, unit: float = 1) -> str:
    """Return the least and the most of a setting that was measured with each size."""
    found = pd.Series([benchmark(f"train_step_{size}")["settings"][name] / unit for size in SIZES])
    return least_and_most(found, form)


def whole_step(name: str, arm: str) -> dict[str, float]:
    """Return the GPU time in ms and the number of kernels of a step. bf16 is the baseline."""
    kernels = benchmark(name)["settings"]["kernels"][baseline(name) if arm == "bf16" else arm]
    (whole,) = (one for one in kernels if one["kernel"] == "all")
    return dict(whole)


def profiled(arm: str, column: str) -> str:
    return f"{whole_step('train_step_llama_125m', arm)[column]:.0f}"


def fused(arm: str, column: str) -> str:
    one = row(FUSED, arm=arm)
    return f"{one[column]:.3f}"


def idle() -> str:
    return f"{row(FUSED, arm=baseline(FUSED))['step_ms'] - whole_step(FUSED, 'bf16')['ms']:.0f}"


def gpu_times() -> str:
    """Return a table of each arm's GPU time of a step, and of that time divided by two others."""
    times = {arm: whole_step(FUSED, arm)["ms"] for arm in benchmark(FUSED)["settings"]["kernels"]}
    bases = (baseline(FUSED), "mxfp8, rmsnorm")
    cells = [(STEPS[arm], f"{ms:.1f}", *(f"{ms / times[base]:.3f}" for base in bases)) for arm, ms in times.items()]
    head = "kernels of a step of llama_1b"
    return markdown([head, "ms", "over bf16's", "over MXFP8's"], cells, left=[head])


def rounds() -> str:
    """Return the rounds of each size: '19, 9, 35 and 16'."""
    *most, last = (str(rows(f"train_step_{size}")[0]["rounds"]) for size in SIZES)
    return f"{', '.join(most)} and {last}"


TRAIN_STEP: Parts = {
    "rounds": rounds,
    "floor": lambda: of_settings("floor_over_bf16", ".2f"),
    "copy": lambda: of_settings("copied_bytes_per_s", ".2f", 1e12),
    **{
        f"{column} of {arm}": partial(profiled, arm, column)
        for arm in ("bf16", "mxfp8, rmsnorm", "torchao, rmsnorm")
        for column in ("ms", "calls")
    },
    **{size: partial(step_of, size) for size in SIZES},
    "time": lambda: of_steps("mxfp8", "over_bf16"),
    "memory": lambda: of_steps("mxfp8", "peak_over_bf16"),
    "plain": lambda: of_steps("plain,", "over_bf16"),
    "torchao": lambda: of_steps("torchao", "over_bf16"),
    **{f"MFU of {size}": partial(mfu, size) for size in SIZES},
    "fused": partial(step_of, "fused_llama_1b"),
    "kernels": gpu_times,
    "idle": idle,
    **{
        f"over_bf16 of fused {arm}": partial(fused, arm, "over_bf16")
        for arm in ("mxfp8, rmsnorm", "mxfp8, mxnorm_p2", "mxfp4, rmsnorm")
    },
    "memory of fused MXFP8": partial(fused, "mxfp8, rmsnorm", "peak_over_bf16"),
    **{f"over MXFP8 of fused {arm}": partial(fused, arm, "over_mxfp8") for arm in STEPS if arm.startswith("nvfp4")},
    "MFU of fused bf16": partial(fused, "bf16, fused", "mfu"),
}


def ingredients() -> str:
    parts = benchmark("recipe_ingredients")["train_step"]
    when = {"before": "before, ms", "after": "after, ms", "before, again": "before, again, ms"}
    cells = []
    for arm in ("bf16", "mxfp8, rmsnorm", "mxfp8, mxnorm_p2", "sr_rht_2d, rmsnorm"):
        found = [next((one for one in parts[time]["rows"] if one["arm"] == arm), None) for time in when]
        cells.append((STEPS[arm], *(plus_minus(one["step_ms"], one["spread_ms"], 1) if one else "-" for one in found)))
    settings = parts["after"]["settings"]
    head = f"step of {settings['model']}, FFN {settings['ffn']}, vocabulary {settings['vocabulary']:,}"
    return markdown([head, *when.values()], cells, left=[head])


CASTS = {
    "copy x": "copy of x",
    "cast_one even -1": "E4M3, rows, by `cast_one`",
    "even row": "E4M3, rows, to nearest",
    "SR row": "E4M3, rows, stochastic",
    "cast_one even -2": "E4M3, columns, by `cast_one`",
    "even column": "E4M3, columns, to nearest",
    "SR column": "E4M3, columns, stochastic",
    "H16 even column": "Hadamard 16, columns, to nearest",
    "H16 SR column": "Hadamard 16, columns, stochastic",
    "H128 SR column": "Hadamard 128, columns, stochastic",
    "H128 SR row": "Hadamard 128, rows, stochastic",
    "copy w, fp32 to bf16": "copy of W to bf16",
    "W 16x16 row": "W, 16 x 16 blocks, rows",
    "W 16x16 column": "W, 16 x 16 blocks, columns",
    "cast_one even -1 of w": "W, rows, by `cast_one`",
}


def casts() -> str:
    of = {one["case"]: one for one in benchmark("recipe_ingredients")["casts"]}
    cells = []
    for case, said in CASTS.items():
        over = "1" if of[case]["over_copy"] == 1 else f"{of[case]['over_copy']:.2f}"
        cells.append((said, f"{of[case]['ms']:.3f}", f"{of[case]['tb_per_s']:.2f}", over))
    return markdown(["operand", "ms", "TB/s", "over the copy"], cells, left=["operand"])


def all_three() -> str:
    of = {one["arm"]: one["step_ms"] for one in benchmark("recipe_ingredients")["train_step"]["after"]["rows"]}
    return f"{of['sr_rht_2d, rmsnorm'] / of['mxfp8, rmsnorm']:.3f}"


def student_rate(when: str) -> str:
    (one,) = benchmark("recipe_ingredients")["student_teacher"][when]["rows"]
    return f"{one['study']:,.0f}"


def of_weight() -> str:
    (one,) = (one for one in benchmark("recipe_ingredients")["casts"] if one["case"] == "cast_one even -1 of w")
    return f"{one['over_copy']:.1f} times"


def of_all_steps(column: str, form: str) -> str:
    """Return the least and the most of a column over all steps with MXFP8."""
    parts = benchmark("recipe_ingredients")["train_step"].values()
    found = pd.Series([one[column] for part in parts for one in part["rows"] if one["arm"] != "bf16"])
    return " to ".join(dict.fromkeys(least_and_most(found, form).split(" to ")))


INGREDIENTS: Parts = {
    "a weight": of_weight,
    "memory": partial(of_all_steps, "peak_gib", ".1f"),
    "rounds": partial(of_all_steps, "rounds", "d"),
    "steps": ingredients,
    "casts": casts,
    "all three": all_three,
    "students before": lambda: student_rate("before"),
    "students after": lambda: student_rate("after"),
}


def scaling() -> str:
    said = {"bf16": "bf16", "mxfp8": "MXFP8, MXNorm p=2"}
    cells = []
    for one in sorted(rows("scaling"), key=lambda one: (one["model"], one["precision"], one["gpus"])):
        cells.append(
            (
                one["model"],
                said[one["precision"]],
                one["gpus"],
                plus_minus(one["step_ms"], one["spread_ms"], 1),
                f"{round(one['tokens_per_s_a_gpu'], -2):,.0f}",
                efficiency(one),
                f"{one['mfu']:.3f}",
                f"{one['peak_gib']:.1f}",
            )
        )
    columns = [
        *("model", "precision", "GPUs", "step, ms, +- half the quartiles' range", "tokens/s a GPU", "efficiency"),
        *("MFU", "peak a GPU, GiB"),
    ]
    order = sorted(cells, key=lambda cell: cell[0] != "llama_1b")
    return markdown(columns, order, left=["model", "precision"])


def efficiency(one: dict[str, Any]) -> str:
    found = one["efficiency"]
    if found is None or pd.isna(found):
        return "-"
    return "1" if found == 1 else f"{found:.3f}"


def lost(precision: str) -> str:
    return f"{100 * (1 - row('scaling', model='llama_1b', precision=precision, gpus=8)['efficiency']):.1f} %"


def from_two_to_eight() -> Iterator[float]:
    for precision in ("bf16", "mxfp8"):
        two, eight = (row("scaling", model="llama_1b", precision=precision, gpus=n)["step_ms"] for n in (2, 8))
        yield 100 * (eight / two - 1)


HERE, THERE = "scaling", "scaling_4_gpus"  # hosts


def case(host: str, precision: str, gpus: int, model: str = "llama_1b") -> dict[str, Any]:
    return row(host, model=model, precision=precision, gpus=gpus)


def milliseconds(host: str, precision: str, gpus: int) -> str:
    return f"{case(host, precision, gpus)['step_ms']:.1f}"


def of_four(host: str, precision: str) -> str:
    """Return the efficiency of four GPUs."""
    return f"{case(host, precision, 4)['efficiency']:.3f}"


def apart(precision: str, gpus: int) -> str:
    """Return by how much a step is shorter on the other host, in percent."""
    less = 1 - case(THERE, precision, gpus)["step_ms"] / case(HERE, precision, gpus)["step_ms"]
    return f"{100 * less:.1f} %"


def with_the_second(precision: str) -> float:
    """Return which share of eight GPUs' loss two GPUs lose already."""
    two, eight = (1 - case(HERE, precision, gpus)["efficiency"] for gpus in (2, 8))
    return float(two / eight)


def spreads() -> str:
    """Return the spread of a step of several GPUs in percent of the step: the least and the most."""
    found = [one["spread_ms"] / one["step_ms"] for one in rows(HERE) if one["model"] == "llama_1b" and one["gpus"] > 1]
    return least_and_most(100 * pd.Series(found), ".1f") + " %"


def of_8b(host: str, gpus: int) -> str:
    one = case(host, "mxfp8", gpus, "llama_8b")
    return (
        f"{plus_minus(one['step_ms'], one['spread_ms'], 1)} ms (MFU {one['mfu']:.3f}, {one['peak_gib']:.1f} GiB a GPU)"
    )


SCALING: Parts = {
    "cases": scaling,
    "bf16": lambda: lost("bf16"),
    "MXFP8": lambda: lost("mxfp8"),
    "two to eight": lambda: f"{max(from_two_to_eight()):.1f} %",
    "spreads": spreads,
    "with the second": lambda: (
        least_and_most(100 * pd.Series([*map(with_the_second, ("bf16", "mxfp8"))]), ".0f") + " %"
    ),
    "bf16, one GPU there": partial(milliseconds, THERE, "bf16", 1),
    "bf16, one GPU less": partial(apart, "bf16", 1),
    "bf16, four GPUs less": partial(apart, "bf16", 4),
    "bf16, four GPUs there": partial(of_four, THERE, "bf16"),
    "bf16, eight over one there": lambda: f"{case(THERE, 'bf16', 1)['step_ms'] / case(HERE, 'bf16', 8)['step_ms']:.3f}",
    **{
        f"MXFP8, {said}": partial(milliseconds, host, "mxfp8", gpus)
        for said, host, gpus in (
            ("one GPU there", THERE, 1),
            ("one GPU here", HERE, 1),
            ("four GPUs there", THERE, 4),
            ("four GPUs here", HERE, 4),
        )
    },
    **{
        f"MXFP8, efficiency {said}": partial(of_four, host, "mxfp8")
        for said, host in (("there", THERE), ("here", HERE))
    },
    "parameters": lambda: f"{case(HERE, 'mxfp8', 8, 'llama_8b')['parameters'] / 1e9:.2f} billion",
    "seconds to build": lambda: f"{case(HERE, 'mxfp8', 8, 'llama_8b')['build_s']:.0f} s",
    "llama_8b on four": partial(of_8b, THERE, 4),
}

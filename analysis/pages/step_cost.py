"""Make the parts of the page about the cost of a training step, from the JSON of benchmarks.train_step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from analysis.pages.marks import Parts, benchmark, row, rows
from analysis.pages.step_floor import FLOORS
from analysis.pages.step_memory import MEMORY, SOME
from analysis.pages.step_profile import (
    BF16,
    GPU,
    MODELS,
    MXFP8,
    MXNORM,
    NEWER_FILES,
    NO_RANDOM,
    NVFP4,
    PROFILE,
    before,
    by_kernels,
    kernels_ms,
    name_of,
    newest,
    newest_row,
)
from analysis.recipe.train_step_cost import STEPS
from mxstudy.results import markdown, plus_minus

READINGS = {"sm_mhz": "SM clock, MHz", "power_w": "power, W", "temperature_c": "temperature, C"}  # readings of the GPU
SMALL = {"llama_1b_small": "small llama_1b", "llama_125m_small": "small llama_125m"}
MORE_ARMS = "train_step_h200_llama_125m_more_arms"
FILES = {  # of the H200: {name on the page: model, file}
    **{model: (model, name_of(model, GPU)) for model in (*MODELS, *SMALL)},
    "llama_1b, again": ("llama_1b", NEWER_FILES["llama_1b", GPU]),
    "llama_125m, more arms": ("llama_125m", MORE_ARMS),
}
ALL_ARMS = {"llama_1b": name_of("llama_1b", GPU), "llama_125m": MORE_ARMS}
CASES = (*((model, GPU) for model in (*MODELS, *SMALL)), *((model, "H100") for model in MODELS))


class Limit(NamedTuple):
    """A limit of a column of an arm, which was set before it was measured: the most, or the least if `at_least`."""

    said: str
    limit: float
    model: str
    arm: str
    column: str
    at_least: bool = False

    def value(self, gpu: str) -> float:
        return float(newest_row(self.model, gpu, self.arm)[self.column])

    def measured(self, gpu: str) -> str:
        """Return the value, with its spread where it has one, or '-' if it was not measured on this GPU."""
        if (self.model, gpu) not in CASES or newest(self.model, gpu, self.arm) is None:
            return "-"
        return of_arm(self.model, gpu, self.arm, self.column)

    @property
    def limit_said(self) -> str:
        return f"at {'least' if self.at_least else 'most'} {self.limit:g}"

    def is_met(self, gpu: str = GPU) -> bool:
        value = self.value(gpu)
        return value >= self.limit if self.at_least else value <= self.limit

    def met(self, gpu: str) -> str:
        return "-" if self.measured(gpu) == "-" else "yes" if self.is_met(gpu) else "no"


BF16_SOME, MXFP8_SOME = SOME[BF16], SOME[MXFP8]
FULL = "bf16, fused, full checkpointing"
LIMITS = (
    Limit("MXFP8 with RMSNorm over bf16, llama_1b", 1.02, "llama_1b", MXFP8, "over_bf16"),
    Limit("MXFP8 with MXNorm over bf16, llama_1b", 1.02, "llama_1b", MXNORM, "over_bf16"),
    Limit("MXFP8 with RMSNorm over bf16, llama_125m", 1.03, "llama_125m", MXFP8, "over_bf16"),
    Limit("MXFP8 with MXNorm over bf16, llama_125m", 1.03, "llama_125m", MXNORM, "over_bf16"),
    Limit("MXFP8 with RMSNorm over bf16, llama_1b, small", 1.02, "llama_1b_small", MXFP8, "over_bf16"),
    Limit("MXFP8 with RMSNorm over bf16, llama_125m, small", 1.03, "llama_125m_small", MXFP8, "over_bf16"),
    Limit("MXFP8 with MXNorm over bf16, llama_1b, small", 1.02, "llama_1b_small", MXNORM, "over_bf16"),
    Limit("MXFP8 with MXNorm over bf16, llama_125m, small", 1.03, "llama_125m_small", MXNORM, "over_bf16"),
    Limit("NVFP4 over MXFP8, llama_125m", 1.35, "llama_125m", NVFP4, "over_mxfp8"),
    Limit("NVFP4 without random parts over MXFP8, llama_125m", 1.10, "llama_125m", NO_RANDOM, "over_mxfp8"),
    Limit("MFU of bf16, llama_1b", MODELS["llama_1b"].least_mfu, "llama_1b", BF16, "mfu", at_least=True),
    Limit("MFU of bf16, llama_125m", MODELS["llama_125m"].least_mfu, "llama_125m", BF16, "mfu", at_least=True),
    Limit("peak memory of bf16, llama_1b, GiB", 40, "llama_1b", BF16, "peak_gib"),
    Limit("peak memory of MXFP8, llama_1b, GiB", 40, "llama_1b", MXFP8, "peak_gib"),
)


def limits() -> str:
    """Return the table of limits. A median decides whether one is met."""
    gpus = ("H200", "H100")
    cells = [(one.said, one.limit_said, *map(one.measured, gpus), *map(one.met, gpus)) for one in LIMITS]
    columns = ["what", "limit", "on an H200", "on an H100", "met on the H200", "on the H100"]
    return markdown(columns, cells, left=columns[:2])


def steps_in(model: str, name: str) -> str:
    """Return the table of a file on an H200, with a column for each reading of the GPU."""
    base = benchmark(name)["settings"]["baseline"]
    head = f"step of {SMALL.get(model, model)} on an {GPU}"
    places = -3 if model.startswith("llama_125m") else -2
    cells = []
    for one in rows(name):
        is_base = one["arm"] == base
        cells.append(
            (
                STEPS[one["arm"]],
                plus_minus(one["step_ms"], one["spread_ms"], ".1f"),
                "1" if is_base else plus_minus(one["over_bf16"], one["over_bf16_spread"], ".3f"),
                f"{one['peak_gib']:.1f}",
                "1" if is_base else f"{one['peak_over_bf16']:.3f}",
                f"{round(one['tokens_per_s'], places):,.0f}",
                f"{one['mfu']:.3f}",
                *(reading(one, name) for name in READINGS),
            )
        )
    columns = [head, "ms, +- half the quartiles' range", "over bf16", "peak, GiB", "over bf16", "tokens/s", "MFU"]
    columns += [f"{said}, least / median / largest" for said in READINGS.values()]
    return markdown(columns, cells, left=[head])


def reading(one: Mapping[str, Any], name: str) -> str:
    """Return the least, the median and the largest reading of the GPU in a row."""
    return " / ".join(f"{one[f'{name}_{which}']:.0f}" for which in ("min", "median", "max"))


def of_arm(model: str, gpu: str, arm: str, column: str) -> str:
    """Return a value of an arm from the newest file that has the arm. One with a spread has it beside it."""
    one = newest_row(model, gpu, arm)
    form, spread = ".1f" if column == "peak_gib" else ".3f", one.get(f"{column}_spread")
    return f"{one[column]:{form}}" if spread is None else plus_minus(one[column], spread, form)


def together() -> str:
    """Return the table of the limits of llama_1b in one configuration: both arms recompute the same MLPs."""
    gpus = ("H200", "H100")
    arms = [[newest_row("llama_1b", gpu, arm) for arm in (BF16_SOME, MXFP8_SOME)] for gpu in gpus]
    ratios = [f"{mxfp8['step_ms'] / bf16['step_ms']:.3f}" for bf16, mxfp8 in arms]
    cells = [("MXFP8 with RMSNorm over bf16, of the medians", "at most 1.02", *ratios)]
    for place, said in enumerate(("bf16", "MXFP8")):
        limit = f"at least {MODELS['llama_1b'].least_mfu:g}" if said == "bf16" else "-"
        cells.append((f"MFU of {said}", limit, *(f"{one[place]['mfu']:.3f}" for one in arms)))
    for place, said in enumerate(("bf16", "MXFP8")):
        peaks = (f"{one[place]['peak_gib']:.1f}" for one in arms)
        cells.append((f"peak memory of {said}, GiB", "at most 40", *peaks))
    columns = ["llama_1b, some MLPs recomputed", "limit", *(f"on an {gpu}" for gpu in gpus)]
    return markdown(columns, cells, left=columns[:2])


def over_inductor(model: str) -> str:
    """Return torchao's step over that of bf16 as PyTorch compiles it."""
    torchao, bf16 = (row(ALL_ARMS[model], arm=arm)["step_ms"] for arm in ("torchao, rmsnorm", "bf16, inductor"))
    return f"{torchao / bf16:.2f}"


def slower(arm: str, column: str) -> str:
    """Return by how many percent recomputing lengthens a step of llama_1b."""
    return f"{100 * (newest_row('llama_1b', GPU, arm)[column] - 1):.1f} %"


def shorter(model: str, arm: str) -> str:
    """Return by how many percent of its time a step is shorter than it was before."""
    now, then = (row(name, arm=arm)["step_ms"] for name in (name_of(model, GPU), before(model)))
    return f"{100 * (1 - now / then):.1f} %"


def of_medians(model: str) -> str:
    """Return the quotient of the median steps in MXFP8 and in bf16, where a round's quotient has no say."""
    mxfp8, bf16 = (newest_row(model, GPU, arm)["step_ms"] for arm in (MXFP8, BF16))
    return f"{mxfp8 / bf16:.2f}"


def recomputed() -> str:
    """Return how many MLPs are recomputed."""
    return f"{row(name_of('llama_1b', GPU), arm=BF16_SOME)['recompute_mlp']}"


def rounds(name: str) -> str:
    (count,) = {one["rounds"] for one in rows(name)}
    return f"{count}"


SAID = {  # {name of a part: model, GPU, arm, column}
    **{
        f"{MXFP8} over bf16, {model}, H200": (model, "H200", MXFP8, "over_bf16")
        for model in (*MODELS, *SMALL, "llama_23m")
    },
    **{f"{MXNORM} over bf16, {model}, H200": (model, "H200", MXNORM, "over_bf16") for model in MODELS},
    **{f"{NVFP4} over MXFP8, {model}, H200": (model, "H200", NVFP4, "over_mxfp8") for model in MODELS},
    f"{NO_RANDOM} over MXFP8, llama_125m, H200": ("llama_125m", "H200", NO_RANDOM, "over_mxfp8"),
    "memory of MXFP8, llama_1b": ("llama_1b", GPU, MXFP8, "peak_over_bf16"),
    **{f"MFU of bf16, {model}": (model, GPU, BF16, "mfu") for model in MODELS},
    "peak of bf16, GiB": ("llama_1b", GPU, BF16, "peak_gib"),
    "peak of bf16, some MLPs, GiB": ("llama_1b", GPU, BF16_SOME, "peak_gib"),
    "MFU of bf16, some MLPs": ("llama_1b", GPU, BF16_SOME, "mfu"),
    "peak of full checkpointing, GiB": ("llama_1b", GPU, FULL, "peak_gib"),
    "MFU of full checkpointing": ("llama_1b", GPU, FULL, "mfu"),
}
TRAIN_STEP: Parts = {
    "limits": limits,
    **{f"{said} on an H200": partial(steps_in, *of) for said, of in FILES.items()},
    **{name: partial(of_arm, *where) for name, where in SAID.items()},
    **{f"torchao over bf16 as PyTorch compiles it, {model}": partial(over_inductor, model) for model in MODELS},
    "shorter, llama_125m_small, bf16": partial(shorter, "llama_125m_small", BF16),
    "shorter, llama_125m_small, MXFP8": partial(shorter, "llama_125m_small", MXFP8),
    "shorter, llama_125m, NVFP4": partial(shorter, "llama_125m", NVFP4),
    "of the medians, llama_23m": partial(of_medians, "llama_23m"),
    "of the kernels, llama_23m": lambda: f"{kernels_ms('llama_23m', MXFP8) / kernels_ms('llama_23m', BF16):.2f}",
    "MLPs recomputed": recomputed,
    "together": together,
    "full checkpointing": partial(slower, FULL, "over_bf16"),
    "recomputing, bf16": partial(slower, BF16_SOME, "over_bf16"),
    "recomputing, MXFP8": partial(slower, MXFP8_SOME, "over_mxfp8"),
    "by kernels": partial(by_kernels, {model: model for model in MODELS} | SMALL),
    **{f"rounds of {said}": partial(rounds, name) for said, (_, name) in FILES.items()},
    **{f"rounds of {model}, H100": partial(rounds, name_of(model, "H100")) for model in MODELS},
    "rounds of llama_1b, again, H100": partial(rounds, NEWER_FILES["llama_1b", "H100"]),
    **PROFILE,
    **FLOORS,
    **MEMORY,
}

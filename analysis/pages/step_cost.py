"""Make the parts of the page about the cost of a training step, from the JSON of benchmarks.train_step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from analysis.pages.marks import Parts, benchmark, commit_of, row, rows
from analysis.pages.step_memory import MEMORY, SOME
from analysis.pages.step_parts import NEWER_PARTS, left_over
from analysis.pages.step_profile import AGAIN, BF16, MODELS, MXFP8, PROFILE, name_of
from analysis.recipe.train_step_cost import STEPS
from mxstudy.results import markdown, plus_minus

READINGS = {"sm_mhz": "SM clock, MHz", "power_w": "power, W", "temperature_c": "temperature, C"}  # readings of the GPU
CASES = (("llama_1b", "H100"), ("llama_125m", "H100"), ("llama_1b", "H200"), ("llama_125m", "H200"))


class Limit(NamedTuple):
    """A limit of a column of an arm, which was set before it was measured: the most, or the least if `at_least`."""

    said: str
    limit: float
    model: str
    arm: str
    column: str
    at_least: bool = False

    def value(self, gpu: str) -> float:
        return float(row(name_of(self.model, gpu), arm=self.arm)[self.column])

    def measured(self, gpu: str) -> str:
        """Return the value, with its spread where it has one, or '-' if it was not measured on this GPU."""
        if (self.model, gpu) not in CASES or self.arm not in {one["arm"] for one in rows(name_of(self.model, gpu))}:
            return "-"
        return value_of(name_of(self.model, gpu), self.arm, self.column)

    @property
    def limit_said(self) -> str:
        return f"at {'least' if self.at_least else 'most'} {self.limit:g}"

    def is_met(self, gpu: str = "H100") -> bool:
        value = self.value(gpu)
        return value >= self.limit if self.at_least else value <= self.limit

    def met(self, gpu: str) -> str:
        return "-" if self.measured(gpu) == "-" else "yes" if self.is_met(gpu) else "no"


BF16_SOME, MXFP8_SOME = SOME[BF16], SOME[MXFP8]
NO_RANDOM = "nvfp4 without random parts, rmsnorm"
LIMITS = (
    Limit("MXFP8 with RMSNorm over bf16, llama_1b", 1.02, "llama_1b", MXFP8, "over_bf16"),
    Limit("MXFP8 with MXNorm over bf16, llama_1b", 1.02, "llama_1b", "mxfp8, mxnorm_p2", "over_bf16"),
    Limit("MXFP8 with RMSNorm over bf16, llama_125m", 1.03, "llama_125m", MXFP8, "over_bf16"),
    Limit("MXFP8 with MXNorm over bf16, llama_125m", 1.03, "llama_125m", "mxfp8, mxnorm_p2", "over_bf16"),
    Limit("NVFP4 over MXFP8, llama_125m", 1.35, "llama_125m", "nvfp4, rmsnorm", "over_mxfp8"),
    Limit("NVFP4 without random parts over MXFP8, llama_125m", 1.10, "llama_125m", NO_RANDOM, "over_mxfp8"),
    Limit("MFU of bf16, llama_1b", MODELS["llama_1b"].least_mfu, "llama_1b", BF16, "mfu", at_least=True),
    Limit("MFU of bf16, llama_125m", MODELS["llama_125m"].least_mfu, "llama_125m", BF16, "mfu", at_least=True),
    Limit("peak memory of bf16, llama_1b, GiB", 40, "llama_1b", BF16, "peak_gib"),
    Limit("peak memory of MXFP8, llama_1b, GiB", 40, "llama_1b", MXFP8, "peak_gib"),
)


def limits() -> str:
    """Return the table of limits. A median decides whether one is met."""
    cells = [
        (
            one.said,
            one.limit_said,
            one.measured("H100"),
            one.measured("H200"),
            one.met("H100"),
            one.met("H200"),
        )
        for one in LIMITS
    ]
    return markdown(
        ["what", "limit", "on an H100", "on an H200", "met on the H100", "on the H200"], cells, left=["what", "limit"]
    )


def step_of(model: str, gpu: str) -> str:
    """Return the table of a model on a GPU, with a column for each reading of the GPU."""
    name = name_of(model, gpu)
    base = benchmark(name)["settings"]["baseline"]
    head = f"step of {model} on an {gpu}"
    places = -3 if model == "llama_125m" else -2
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
    return value_of(name_of(model, gpu), arm, column)


def value_of(name: str, arm: str, column: str) -> str:
    """Return a value of an arm from a benchmark's JSON. One with a spread has it beside it."""
    one = row(name, arm=arm)
    form, spread = ".1f" if column == "peak_gib" else ".3f", one.get(f"{column}_spread")
    return f"{one[column]:{form}}" if spread is None else plus_minus(one[column], spread, form)


def measured_again() -> str:
    """Return the table of llama_1b's limits, and of NVFP4, as measured before and with a newer commit."""
    limited = [(one.said, one.limit_said, one.arm, one.column) for one in LIMITS if one.model == "llama_1b"]
    without = [(f"{STEPS[arm]}, over MXFP8", "-", arm, "over_mxfp8") for arm in ("nvfp4, rmsnorm", NO_RANDOM)]
    names = (name_of("llama_1b", "H100"), AGAIN)
    cells = [
        (said, limit, *(value_of(name, arm, column) for name in names))
        for said, limit, arm, column in limited + without
    ]
    columns = [
        "llama_1b on an H100",
        "limit",
        *(f"commit {commit_of(name)[1:-1]}" for name in names),
    ]
    return markdown(columns, cells, left=columns[:2])


def together() -> str:
    """Return the table of the limits of llama_1b in one configuration: both arms recompute the same MLPs."""
    names = (name_of("llama_1b", "H100"), AGAIN)
    arms = [[row(name, arm=arm) for arm in (BF16_SOME, MXFP8_SOME)] for name in names]
    ratios = [f"{mxfp8['step_ms'] / bf16['step_ms']:.3f}" for bf16, mxfp8 in arms]
    cells = [("MXFP8 with RMSNorm over bf16, of the medians", "at most 1.02", *ratios)]
    for place, said in enumerate(("bf16", "MXFP8")):
        limit = f"at least {MODELS['llama_1b'].least_mfu:g}" if said == "bf16" else "-"
        cells.append((f"MFU of {said}", limit, *(f"{one[place]['mfu']:.3f}" for one in arms)))
    for place, said in enumerate(("bf16", "MXFP8")):
        peaks = (f"{one[place]['peak_gib']:.1f}" for one in arms)
        cells.append((f"peak memory of {said}, GiB", "at most 40", *peaks))
    columns = [
        "llama_1b on an H100, some MLPs recomputed",
        "limit",
        *(f"commit {commit_of(name)[1:-1]}" for name in names),
    ]
    return markdown(columns, cells, left=columns[:2])


def not_measured() -> str:
    """Return the table of arms that have no row in some of the tables."""
    measured = {case: {one["arm"] for one in rows(name_of(*case))} for case in CASES}
    cells = []
    for arm, said in STEPS.items():
        lacking = [", ".join(case) for case in CASES if arm not in measured[case]]
        if lacking and arm != "bf16":
            cells.append((said, "; ".join(lacking) if len(lacking) < len(CASES) else "all four"))
    columns = ["arm", "not measured for"]
    return markdown(columns, cells, left=columns)


def shorter_again(arm: str) -> str:
    """Return by how much an arm's step is shorter with the newer commit, in percent."""
    before, after = (row(name, arm=arm)["step_ms"] for name in (name_of("llama_1b", "H100"), AGAIN))
    return f"{100 * (1 - after / before):.1f} %"


def over_inductor() -> str:
    """Return torchao's step over that of bf16 as PyTorch compiles it."""
    torchao, bf16 = (
        row(name_of("llama_125m", "H100"), arm=arm)["step_ms"] for arm in ("torchao, rmsnorm", "bf16, inductor")
    )
    return f"{torchao / bf16:.2f}"


def slower(arm: str, column: str) -> str:
    """Return by how many percent recomputing MLPs lengthens a step of llama_1b."""
    return f"{100 * (row(name_of('llama_1b', 'H100'), arm=arm)[column] - 1):.1f} %"


def recomputed() -> str:
    """Return how many MLPs are recomputed."""
    return f"{row(name_of('llama_1b', 'H100'), arm=BF16_SOME)['recompute_mlp']}"


SAID = {  # {name of a part: model, GPU, arm, column}
    **{
        f"{arm} over bf16, {model}, {gpu}": (model, gpu, arm, "over_bf16")
        for model, gpu, arm in (
            ("llama_1b", "H100", "mxfp8, rmsnorm"),
            ("llama_1b", "H100", "mxfp8, mxnorm_p2"),
            ("llama_1b", "H200", "mxfp8, rmsnorm"),
            ("llama_125m", "H100", "mxfp8, rmsnorm"),
            ("llama_125m", "H100", "mxfp8, mxnorm_p2"),
            ("llama_125m", "H200", "mxfp8, rmsnorm"),
            ("llama_125m", "H200", "mxfp8, mxnorm_p2"),
        )
    },
    **{
        f"{arm} over MXFP8, {model}, {gpu}": (model, gpu, arm, "over_mxfp8")
        for model, gpu, arm in (
            ("llama_125m", "H100", "nvfp4, rmsnorm"),
            ("llama_125m", "H100", NO_RANDOM),
            ("llama_125m", "H200", "nvfp4, rmsnorm"),
            ("llama_125m", "H200", NO_RANDOM),
            ("llama_1b", "H100", "nvfp4, rmsnorm"),
        )
    },
    "memory of MXFP8, llama_1b": ("llama_1b", "H100", "mxfp8, rmsnorm", "peak_over_bf16"),
}
SAID_AGAIN = {
    "MXFP8": (MXFP8, "over_bf16"),
    "MFU": (BF16, "mfu"),
    "NVFP4 without random parts": (NO_RANDOM, "over_mxfp8"),
}
TRAIN_STEP: Parts = {
    "limits": limits,
    **{f"{model} on an {gpu}": partial(step_of, model, gpu) for model, gpu in CASES},
    **{name: partial(of_arm, *where) for name, where in SAID.items()},
    "measured again": measured_again,
    **{f"again, {said}": partial(value_of, AGAIN, *where) for said, where in SAID_AGAIN.items()},
    "again, shorter": partial(shorter_again, BF16),
    "torchao over bf16 as PyTorch compiles it": over_inductor,
    "MLPs recomputed": recomputed,
    "together": together,
    "not measured": not_measured,
    "saved": left_over,
    "saved, H200": partial(left_over, NEWER_PARTS),
    "recomputing, bf16": partial(slower, BF16_SOME, "over_bf16"),
    "recomputing, MXFP8": partial(slower, MXFP8_SOME, "over_mxfp8"),
    **PROFILE,
    **MEMORY,
}

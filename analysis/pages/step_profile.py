"""Say where the time of a training step goes: kernels by what they do, and what that leaves to a higher MFU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pandas as pd

from analysis.ledger.costs import PEAK
from analysis.pages.marks import Parts, benchmark, least_and_most, row, rows
from mxstudy.results import markdown

# A kernel belongs to the first group that has a text contained in the kernel's name. Kernels of a step that are not
# among an arm's longest are in REST.
GROUPS = {
    "products times tensor scales": ("clamp_min_lt_mul",),
    "GEMMs": ("nvjet",),
    "attention": ("cudnn",),
    "SwiGLU, with casts": ("activation_",),
    "norms, with casts": ("norm_cast", "norm_backward"),
    "rotary embedding, with casts": ("heads_cast",),
    "casts alone": ("cast_one_kernel", "cast_both_kernel", "cast_any"),
    "largest values, for tensor scales": ("absmax_any",),
    "cross-entropy": ("cross_entropy",),
    "AdamW and clipping": ("multi_tensor_apply",),
}
REST = "all others"
ARMS = {
    "bf16, fused": "bf16",
    "mxfp8, rmsnorm": "MXFP8",
    "nvfp4 without random parts, rmsnorm": "NVFP4 without random parts",
    "nvfp4, rmsnorm": "NVFP4",
}
BF16, MXFP8, NO_RANDOM, NVFP4 = ARMS
MXNORM = "mxfp8, mxnorm_p2"
CASTING = ("casts alone", "SwiGLU, with casts", "rotary embedding, with casts", "norms, with casts")
BUSY = ("GEMMs", "attention")
WITHOUT_WAITING = "MFU if a step took as long as its kernels"
DATA_SHEET_MHZ = 1830  # 989e12 = 132 SMs * 4096 FLOPs a clock * 1830 MHz, the boost clock of NVIDIA's H100 white paper


class Model(NamedTuple):
    """A model's layers and hidden size, as in conf/model, and the MFU in bf16 that it was to reach."""

    layers: int
    hidden: int
    least_mfu: float


MODELS = {"llama_1b": Model(16, 2048, 0.57), "llama_125m": Model(8, 1024, 0.52)}
GPU = "H200"  # whose profiles are of whole rounds


def name_of(model: str, gpu: str) -> str:
    return f"train_step_{gpu.lower()}_{model}"


def before(model: str) -> str:
    """Return the name of the file of the code in which the host waited at the copies of a batch."""
    return f"{name_of(model, GPU)}_before"


BEFORE = before("llama_125m")  # alone has NVFP4 without random parts
NEWER_FILES = {("llama_1b", gpu): f"{name_of('llama_1b', gpu)}_again" for gpu in (GPU, "H100")}
OLDER_FILES = {("llama_125m", GPU): BEFORE}


def newest(model: str, gpu: str, arm: str) -> str | None:
    """Return the name of the newest file that has this arm of a model, None if no file has it."""
    files = (NEWER_FILES.get((model, gpu)), name_of(model, gpu), OLDER_FILES.get((model, gpu)))
    return next((name for name in files if name and arm in arms_of(name)), None)


def newest_row(model: str, gpu: str, arm: str) -> Mapping[str, Any]:
    """Return the arm's row in the newest file that has it."""
    name = newest(model, gpu, arm)
    assert name, f"no file of {model} on an {gpu} has {arm}"
    return row(name, arm=arm)


def arms_of(name: str) -> set[str]:
    return {one["arm"] for one in rows(name)}


def group_of(kernel: str) -> str:
    return next((group for group, texts in GROUPS.items() if any(text in kernel for text in texts)), REST)


def ms_of(model: str, arm: str, gpu: str = GPU) -> dict[str, float]:
    """Return the milliseconds of each group of kernels in a step."""
    return groups_ms(name_of(model, gpu), arm)


def groups_ms(name: str, arm: str) -> dict[str, float]:
    *longest, whole = benchmark(name)["settings"]["kernels"][arm]
    found = dict.fromkeys((*GROUPS, REST), 0.0)
    for one in longest:
        found[group_of(one["kernel"])] += one["ms"]
    found[REST] += whole["ms"] - sum(one["ms"] for one in longest)
    return found


def kernels_ms(model: str, arm: str, gpu: str = GPU) -> float:
    return sum(ms_of(model, arm, gpu).values())


def step_ms(model: str, arm: str, gpu: str = GPU) -> float:
    return float(row(name_of(model, gpu), arm=arm)["step_ms"])


def gap_ms(model: str, arm: str, gpu: str = GPU) -> float | None:
    """Return by how much a step, as timed, is longer than its kernels. None if a whole round was profiled."""
    return None if waits(model, arm, gpu) else step_ms(model, arm, gpu) - kernels_ms(model, arm, gpu)


def waits(model: str, arm: str, gpu: str = GPU) -> dict[str, float]:
    """Return the milliseconds of a step as profiled, with a kernel and without. Empty if one step was profiled."""
    found: dict[str, float] = benchmark(name_of(model, gpu))["settings"].get("waits", {}).get(arm, {})
    return found


def idle_ms(model: str, arm: str, gpu: str = GPU) -> float | None:
    return waits(model, arm, gpu).get("idle_ms")


def profiled_ms(model: str, arm: str, gpu: str = GPU) -> float | None:
    return waits(model, arm, gpu).get("step_ms")


TIMES = {
    "all kernels": kernels_ms,
    "no kernel runs": idle_ms,
    "the step, as profiled": profiled_ms,
    "the step, as timed": step_ms,
    "the gap: step less kernels": gap_ms,
}


def launches(model: str, arm: str, gpu: str) -> float:
    """Return the number of kernels that a step launches."""
    return float(benchmark(name_of(model, gpu))["settings"]["kernels"][arm][-1]["calls"])


def profile(model: str, gpu: str = GPU) -> str:
    """Return the table of a model: a row for each group that an arm has, a column for each arm of its file."""
    arms = [arm for arm in ARMS if arm in arms_of(name_of(model, gpu))]
    of = [ms_of(model, arm, gpu) for arm in arms]
    order = [*BUSY, *(group for group in GROUPS if group not in BUSY), REST]
    cells = [
        (group, *(f"{one[group]:.1f}" if one[group] else "-" for one in of))
        for group in order
        if any(one[group] for one in of)
    ]
    for said, value in TIMES.items():
        found = [value(model, arm, gpu) for arm in arms]
        if None not in found:
            cells.append((said, *(f"{one:.1f}" for one in found)))
    cells.append(("kernels launched, number", *(f"{launches(model, arm, gpu):.0f}" for arm in arms)))
    head = f"ms of a step of {model} on an {gpu}"
    return markdown([head, *(ARMS[arm] for arm in arms)], cells, left=[head])


class Budget(NamedTuple):
    """What a bf16 step of a model does, in TFLOP and ms, and what its least MFU leaves to each part of it."""

    model: str
    gpu: str = GPU

    @property
    def of_row(self) -> dict[str, float]:
        return row(name_of(self.model, self.gpu), arm=BF16)

    @property
    def tflop(self) -> float:
        """Return the FLOPs that count: 6 for each matmul parameter and token, and causal attention."""
        return self.of_row["mfu"] * PEAK / 1e12 * self.of_row["step_ms"] / 1e3

    @property
    def tflop_of_attention(self) -> float:
        settings, (layers, hidden, _) = benchmark(name_of(self.model, self.gpu))["settings"], MODELS[self.model]
        return float(6 * layers * hidden * settings["batch"] * settings["sequence"] ** 2 / 1e12)

    @property
    def busy_ms(self) -> float:
        return sum(ms_of(self.model, BF16, self.gpu)[group] for group in BUSY)

    @property
    def rest_ms(self) -> float:
        return kernels_ms(self.model, BF16, self.gpu) - self.busy_ms

    @property
    def least_mfu(self) -> float:
        return MODELS[self.model].least_mfu

    @property
    def allowed_ms(self) -> float:
        return self.of_row["step_ms"] * self.of_row["mfu"] / self.least_mfu

    @property
    def speedup(self) -> float:
        """Return how much faster GEMMs and attention must be if all other kernels stay as they are."""
        return self.busy_ms / (self.allowed_ms - self.rest_ms)

    def mfu_in(self, ms: float) -> float:
        return self.tflop / (ms / 1e3) / (PEAK / 1e12)

    def cells(self) -> dict[str, str]:
        gemms, attention = (ms_of(self.model, BF16, self.gpu)[group] for group in BUSY)
        rates = {
            "GEMMs": (self.tflop - self.tflop_of_attention) / gemms * 1e3,
            "attention": self.tflop_of_attention / attention * 1e3,
        }
        mhz = self.of_row["sm_mhz_median"]
        peak = PEAK / 1e12
        return {
            "FLOPs that count, 10^12: GEMMs, attention": (
                f"{self.tflop - self.tflop_of_attention:.1f}, {self.tflop_of_attention:.1f}"
            ),
            "rate of the GEMMs' kernels, TFLOP/s, and over 989": f"{rates['GEMMs']:.0f}, {rates['GEMMs'] / peak:.2f}",
            "rate of the attention's kernels, TFLOP/s, and over 989": (
                f"{rates['attention']:.0f}, {rates['attention'] / peak:.2f}"
            ),
            "MFU as measured": f"{self.of_row['mfu']:.3f}",
            WITHOUT_WAITING: f"{self.mfu_in(self.busy_ms + self.rest_ms):.3f}",
            "MFU if all but GEMMs and attention took no time": f"{self.mfu_in(self.busy_ms):.3f}",
            "MFU to be reached": f"{self.least_mfu:g}",
            "ms that this leaves to all but GEMMs and attention": f"{self.allowed_ms - self.busy_ms:.1f}",
            "ms that their kernels take": f"{self.rest_ms:.1f}",
            "GEMMs and attention would have to be faster": f"{self.speedup:.2f} times",
            "SM clock while the step was timed, MHz, median": f"{mhz:.0f}",
            "peak rate at this clock, TFLOP/s": f"{peak * mhz / DATA_SHEET_MHZ:.0f}",
            "MFU relative to this rate": f"{self.of_row['mfu'] * DATA_SHEET_MHZ / mhz:.3f}",
        }


def budgets() -> str:
    """Return the table of what a least MFU leaves to each part of a bf16 step."""
    of = [Budget(model).cells() for model in MODELS]
    columns = [f"bf16 on an {GPU}", *MODELS]
    return markdown(columns, [(said, *(one[said] for one in of)) for said in of[0]], left=columns[:1])


def by_kernels(cases: Mapping[str, str]) -> str:
    """Return the table of MXFP8 over bf16 in each case, as timed and by kernels alone, and by the bytes of its casts.

    `cases`: {name of a case: its name on the page}.
    """
    cells = []
    for model, said in cases.items():
        base, floor = kernels_ms(model, BF16), benchmark(name_of(model, GPU))["settings"]["floor_over_bf16"]
        for arm, norm in ((MXFP8, "RMSNorm"), (MXNORM, "MXNorm")):
            of, without = ms_of(model, arm), ms_of(model, BF16)
            cells.append(
                (
                    f"{said}, {norm}",
                    f"{row(name_of(model, GPU), arm=arm)['over_bf16']:.3f}",
                    f"{kernels_ms(model, arm) / base:.3f}",
                    f"{1 + sum(of[group] - without[group] for group in CASTING) / base:.3f}",
                    f"{floor:.3f}",
                    f"{sum(of[group] - without[group] for group in BUSY):+.1f}",
                    f"{idle_ms(model, arm):.1f}",
                    f"{idle_ms(model, BF16):.1f}",
                )
            )
    head = f"MXFP8 over bf16 on an {GPU}"
    columns = ["as timed", "by kernels", "if only casts were added", "if they ran as fast as a copy"]
    columns += ["GEMMs and attention, ms more", "no kernel runs, ms", "in bf16, ms"]
    return markdown([head, *columns], cells, left=[head])


def without_a_kernel(arms: Sequence[str]) -> str:
    """Return the share of a step in which no kernel runs, in percent: the least and the most of both models."""
    cases = [(model, arm) for model in MODELS for arm in arms]
    shares = [100 * waits(*case)["idle_ms"] / waits(*case)["step_ms"] for case in cases]
    return least_and_most(pd.Series(shares), ".1f") + " %"


def median_mhz(arm: str) -> str:
    return f"{row(name_of('llama_1b', GPU), arm=arm)['sm_mhz_median']:.0f}"


def gemms(model: str, arm: str) -> str:
    return f"{ms_of(model, arm)['GEMMs']:.0f}"


def scaling_passes() -> str:
    of = groups_ms(BEFORE, NO_RANDOM)
    return f"{of['products times tensor scales'] + of['largest values, for tensor scales']:.0f}"


def casts(arm: str) -> str:
    """Return the ms of all casts of a step of llama_125m: kernels that only cast, and what they add to the others.

    The kernels of SwiGLU and rotary embedding take as long in NVFP4 as in bf16, without casts.
    """
    of, without = (groups_ms(BEFORE, one) for one in (arm, BF16))
    within = ("SwiGLU, with casts", "rotary embedding, with casts")
    return f"{of['casts alone'] + sum(of[group] - without[group] for group in within):.0f}"


def more(arm: str) -> str:
    """Return how many ms the kernels of a step of llama_125m take beyond those of MXFP8."""
    took, least = (sum(groups_ms(BEFORE, one).values()) for one in (arm, MXFP8))
    return f"{took - least:.0f}"


def allowed() -> str:
    """Return by how many ms a step of NVFP4 without its random parts may be longer than one of MXFP8."""
    return f"{0.10 * row(BEFORE, arm=MXFP8)['step_ms']:.0f}"


def attention_over_ours(model: str) -> str:
    """Return the time of attention by PyTorch's other backends, over that of the one which the model gets."""
    ratios = {one["by"]: one["over_ours"] for one in rows(f"attention_backends_{model}")}
    return f"{ratios['flash']:.2f} and {ratios['flex']:.2f}"


def attention_alone() -> str:
    """Return the milliseconds of the attention of a step of llama_1b when nothing else runs."""
    return f"{row('attention_backends_llama_1b', by='as the model calls it')['ms_of_step']:.0f}"


def at_copies(name: str, arm: str) -> tuple[str, str]:
    """Return the ms of a profiled step that have no kernel, and those of them just before a copy to the GPU."""
    settings = benchmark(name)["settings"]
    before = sum(one["ms"] for one in settings["gaps"][arm] if one["before"].startswith("Memcpy HtoD"))
    return f"{settings['waits'][arm]['idle_ms']:.1f}", f"{before:.1f}"


def copies() -> str:
    """Return the table of the milliseconds without a kernel, before the copies of a batch were mended and after."""
    cells = [
        (f"{model}, {ARMS[arm]}", *at_copies(f"gaps_{GPU.lower()}_{model}", arm), *at_copies(name_of(model, GPU), arm))
        for model in ("llama_125m", "llama_23m")
        for arm in (BF16, MXFP8)
    ]
    columns = ["ms of a profiled step on an H200", "before: no kernel runs", "of these, before a copy"]
    columns += ["after: no kernel runs", "of these, before a copy"]
    return markdown(columns, cells, left=columns[:1])


PROFILE: Parts = {
    **{f"profile of {model}": partial(profile, model) for model in MODELS},
    "budgets": budgets,
    **{f"clock of {said}": partial(median_mhz, arm) for said, arm in (("bf16", BF16), ("MXFP8", MXFP8))},
    **{
        f"GEMMs of llama_1b in {said}": partial(gemms, "llama_1b", arm)
        for said, arm in (("bf16", BF16), ("MXFP8", MXFP8))
    },
    **{f"attention by other backends, {model}": partial(attention_over_ours, model) for model in MODELS},
    "attention alone, llama_1b": attention_alone,
    "attention in a step, llama_1b": lambda: f"{ms_of('llama_1b', BF16)['attention']:.0f}",
    "MFU without waiting, llama_125m": lambda: Budget("llama_125m").cells()[WITHOUT_WAITING],
    "no kernel runs, llama_125m": lambda: f"{idle_ms('llama_125m', BF16):.0f}",
    "copies": copies,
    "NVFP4's passes for scales": scaling_passes,
    "NVFP4's casts": partial(casts, NO_RANDOM),
    "MXFP8's casts": partial(casts, MXFP8),
    "NVFP4 without random parts takes more": partial(more, NO_RANDOM),
    "ms allowed to NVFP4": allowed,
    "without a kernel": partial(without_a_kernel, (BF16, MXFP8)),
    "without a kernel, NVFP4": partial(without_a_kernel, (NVFP4,)),
}

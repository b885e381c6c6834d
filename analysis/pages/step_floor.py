"""Bound the time of a bf16 step from below: the bytes that its kernels must move at the rate of the fastest copy.

GEMMs and attention are taken as they were measured. All bytes are arithmetic, from the model's config. An operation
between two GEMMs reads each of its operands once and writes each of its results once.
"""

from __future__ import annotations

from functools import partial

from analysis.pages.marks import Parts
from analysis.pages.step_memory import sizes
from analysis.pages.step_parts import fastest_copy
from analysis.pages.step_profile import BF16, BUSY, GPU, MODELS, REST, Budget, ms_of
from mxstudy.results import markdown

STATE = 3 * 2 * 4 + 4  # bytes a parameter: weight and two moments are read and written, the gradient is read
CLIPPED = 3 * 4  # its gradient is read for the norm, and read and written to be scaled
TO_BF16 = 4 + 2  # a weight in FP32 is read, and written in bf16


def least_bytes(model: str) -> dict[str, float]:
    """Return the bytes that each group of kernels must move in a step."""
    of = sizes(model)
    bf16 = 2 * of.tokens  # a number of each token
    turned = of.hidden * (of.heads + of.kv_heads) // of.heads
    norms = 2 * of.layers + 1
    return {
        # forward: both halves are read, their product is written; backward: with its gradient read, theirs written, and
        # the product once more, for wgrad
        "SwiGLU, with casts": bf16 * of.ffn * of.layers * (3 + 6),
        # forward: the residual stream and what is added to it are read, the sum and the output are written, but nothing
        # is added before the first norm; backward: the gradients of both and the sum are read, one gradient is written
        "norms, with casts": bf16 * of.hidden * (norms * (4 + 4) - 2),
        # forward: queries and keys in place; backward: all three gradients are read, and written as one
        "rotary embedding, with casts": bf16 * of.layers * 2 * (turned + of.qkv),
        "casts alone": TO_BF16 * (of.layers * of.block_weights + of.vocabulary * of.hidden),
        "cross-entropy": bf16 * of.vocabulary * 2,  # logits are read, and their gradient is written
        "AdamW and clipping": (STATE + CLIPPED) * of.parameters,
    }


def least_ms(model: str) -> dict[str, float]:
    """Return the time of each group at the rate of the fastest copy."""
    return {group: moved / fastest_copy() / 1e9 for group, moved in least_bytes(model).items()}


def largest_mfu(model: str) -> str:
    """Return the MFU of a step in which these kernels take the least time, and all other kernels none."""
    busy = sum(ms_of(model, BF16, GPU)[group] for group in BUSY)
    return f"{Budget(model).mfu_in(busy + sum(least_ms(model).values())):.3f}"


def table() -> str:
    least, kernels = {}, {}
    for model in MODELS:
        least[model], kernels[model] = least_ms(model), ms_of(model, BF16, GPU)
    groups = [*least[model], REST]
    cells = [
        (group, *(f"{found[model].get(group, 0.0):.1f}" for model in MODELS for found in (least, kernels)))
        for group in groups
    ]
    sums = [sum(found[model].get(group, 0.0) for group in groups) for model in MODELS for found in (least, kernels)]
    columns = [
        f"ms of a bf16 step on an {GPU}",
        *(f"{model}, {what}" for model in MODELS for what in ("least", "kernels")),
    ]
    return markdown(columns, [*cells, ("together", *(f"{ms:.1f}" for ms in sums))], left=columns[:1])


def left_ms(model: str) -> float:
    """Return the time that the MFU to be reached leaves to all but GEMMs and attention."""
    return Budget(model).allowed_ms - Budget(model).busy_ms


def needed_rate(model: str) -> str:
    """Return the TB/s at which these kernels would have to move their bytes, if all others took no time."""
    return f"{sum(least_bytes(model).values()) / left_ms(model) / 1e9:.1f}"


def left_to_others(model: str) -> str:
    return f"{left_ms(model) - sum(least_ms(model).values()):.1f}"


def of_others(model: str) -> str:
    return f"{ms_of(model, BF16, GPU)[REST]:.1f}"


FLOORS: Parts = {
    "least": table,
    **{f"MFU at most, {model}": partial(largest_mfu, model) for model in MODELS},
    "rate needed, llama_1b": partial(needed_rate, "llama_1b"),
    "left to all others, llama_125m": partial(left_to_others, "llama_125m"),
    "all others, llama_125m": partial(of_others, "llama_125m"),
}

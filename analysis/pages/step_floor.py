"""Compute what the kernels of a bf16 step beside GEMMs and attention would take at the rate of the fastest copy.

GEMMs and attention are taken as they were measured. Bytes are arithmetic, from the model's config, in the split into
kernels that was measured: each reads its operands at least once and writes its results once.
"""

from __future__ import annotations

from functools import partial

from analysis.pages.marks import Parts
from analysis.pages.step_memory import sizes
from analysis.pages.step_parts import fastest_copy
from analysis.pages.step_profile import BF16, GPU, MODELS, REST, Budget, ms_of
from mxstudy.results import markdown

DATA_SHEET = 4.8  # TB/s of an H200's memory
STATE = 3 * 2 * 4 + 4  # bytes a parameter: weight and two moments are read and written, the gradient is read
CLIPPED = 3 * 4  # its gradient is read for the norm, and read and written to be scaled
SWIGLU, CASTS, OPTIMIZER = "SwiGLU, with casts", "casts alone", "AdamW and clipping"
TO_BF16 = 4 + 2  # a weight in FP32 is read, and written in bf16


def moved_bytes(model: str) -> dict[str, float]:
    """Return the bytes that each group of kernels moves in a step."""
    of = sizes(model)
    bf16 = 2 * of.tokens  # a number of each token
    turned = of.hidden * (of.heads + of.kv_heads) // of.heads
    return {
        # forward: both halves are read, their product is written; backward: with its gradient read, theirs written, and
        # the product once more, for wgrad
        SWIGLU: bf16 * of.ffn * of.layers * (3 + 6),
        # a block's first norm: input and output; its second: the branch and the sum, too; backward: the gradients of
        # output and stream and the input are read, one gradient is written
        "norms, with casts": bf16 * of.hidden * of.layers * (2 + 4 + 2 * 4),
        # forward: queries and keys in place; backward: all three gradients are read, and written as one
        "rotary embedding, with casts": bf16 * of.layers * 2 * (turned + of.qkv),
        # a block's weights, for the forward and again for dgrad; the outputs of its two norms, made again for wgrad
        CASTS: of.layers * (2 * TO_BF16 * of.block_weights + 2 * 2 * bf16 * of.hidden),
        "cross-entropy": bf16 * of.vocabulary * 2,  # logits are read, and their gradient is written
        OPTIMIZER: (STATE + CLIPPED) * of.parameters,
        # a copy for the sum at the end of a block, and the final norm with its backward; the embedding's rows in FP32,
        # then in bf16, and back, to be summed; the gradient of the head's input. The gradients of a block's weights in
        # FP32. Zeros for the embedding's gradient; the head's weight in bf16; its gradient, over zeros, rounded to
        # bf16, then in FP32
        REST: bf16 * of.hidden * (of.layers * 2 + 2 + 3 + 4 + 3 + 3 + 2 + 2)
        + of.layers * of.block_weights * TO_BF16
        + of.vocabulary * of.hidden * (4 + TO_BF16 + 4 + 2 * TO_BF16),
    }


def fewer_bytes(model: str) -> dict[str, float]:
    """Return the bytes that are left if some kernels were merged.

    AdamW clips, and writes the weights in bf16; the backward reads the products of SwiGLU and the outputs of norms that
    the forward kept.
    """
    of, moved = sizes(model), moved_bytes(model)
    kept = 2 * of.tokens * of.ffn * of.layers
    written = 2 * (of.layers * of.block_weights + of.vocabulary * of.hidden)
    norm = 4 * of.parameters  # each gradient is read once, for the norm of all
    return moved | {
        SWIGLU: moved[SWIGLU] - kept,
        CASTS: written,
        OPTIMIZER: STATE * of.parameters + norm,
        REST: moved[REST] - TO_BF16 * of.vocabulary * of.hidden,
    }


def ms_at(moved: dict[str, float], tb_per_s: float) -> dict[str, float]:
    return {group: of / tb_per_s / 1e9 for group, of in moved.items()}


def least_ms(model: str, moved: dict[str, float], tb_per_s: float) -> float:
    """Return the ms of all groups if each took this time, or what it takes now if that is less."""
    kernels = ms_of(model, BF16, GPU)
    return sum(min(ms, kernels[group]) for group, ms in ms_at(moved, tb_per_s).items())


def mfu_at(model: str, moved: dict[str, float], tb_per_s: float) -> str:
    """Return the MFU if a step took this time and that of its GEMMs and attention, and there were no waiting."""
    of = Budget(model)
    return f"{of.mfu_in(of.busy_ms + least_ms(model, moved, tb_per_s)):.3f}"


def mfu_by_copies(model: str) -> str:
    return mfu_at(model, moved_bytes(model), fastest_copy())


def mfu_with_fewer_bytes(model: str) -> str:
    return mfu_at(model, fewer_bytes(model), fastest_copy())


def table() -> str:
    copied = {model: ms_at(moved_bytes(model), fastest_copy()) for model in MODELS}
    kernels = {model: ms_of(model, BF16, GPU) for model in MODELS}
    groups = [*copied[next(iter(MODELS))]]
    cells = [
        (group, *(f"{found[model][group]:.1f}" for model in MODELS for found in (copied, kernels))) for group in groups
    ]
    sums = [sum(found[model][group] for group in groups) for model in MODELS for found in (copied, kernels)]
    what = ("at a copy's rate", "as measured")
    columns = [f"ms of a bf16 step on an {GPU}", *(f"{model}, {one}" for model in MODELS for one in what)]
    return markdown(columns, [*cells, ("together", *(f"{ms:.1f}" for ms in sums))], left=columns[:1])


def allowed(model: str) -> str:
    """Return the ms that the MFU to be reached allows to all but GEMMs and attention."""
    of = Budget(model)
    return f"{of.allowed_ms - of.busy_ms:.1f}"


FLOORS: Parts = {
    "at a copy's rate": table,
    **{f"MFU at a copy's rate, {model}": partial(mfu_by_copies, model) for model in MODELS},
    **{f"MFU with fewer bytes, {model}": partial(mfu_with_fewer_bytes, model) for model in MODELS},
    "MFU at the data sheet's rate, llama_1b": lambda: mfu_at("llama_1b", fewer_bytes("llama_1b"), DATA_SHEET),
    "allowed, llama_125m": partial(allowed, "llama_125m"),
    "least, llama_125m": lambda: f"{least_ms('llama_125m', moved_bytes('llama_125m'), fastest_copy()):.1f}",
    "measured, llama_125m": lambda: (
        f"{sum(ms_of('llama_125m', BF16, GPU)[group] for group in moved_bytes('llama_125m')):.1f}"
    ),
}

"""Compute what the kernels of a bf16 step beside GEMMs and attention would take at the rate of the fastest copy.

GEMMs and attention are taken as they were measured. Bytes are arithmetic, from the model's config, in today's split
into kernels: each reads its operands once and writes its results once.
"""

from __future__ import annotations

from functools import partial

from analysis.pages.marks import Parts
from analysis.pages.step_memory import sizes
from analysis.pages.step_parts import fastest_copy
from analysis.pages.step_profile import BF16, BUSY, GPU, MODELS, REST, Budget, ms_of
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
        # output and stream and the input are read, one gradient is written; the final norm's stream has none
        "norms, with casts": bf16 * of.hidden * (of.layers * (2 + 4 + 2 * 4) + 2 + 3),
        # forward: queries and keys in place; backward: all three gradients are read, and written as one
        "rotary embedding, with casts": bf16 * of.layers * 2 * (turned + of.qkv),
        # a block's weights, for the forward and again for dgrad; the outputs of its two norms, made again for wgrad
        CASTS: of.layers * (2 * TO_BF16 * of.block_weights + 2 * 2 * bf16 * of.hidden),
        "cross-entropy": bf16 * of.vocabulary * 2,  # logits are read, and their gradient is written
        OPTIMIZER: (STATE + CLIPPED) * of.parameters,
        # the sum at the end of a block; the embedding's rows in FP32, then in bf16, and back; its gradient, over zeros;
        # the head's weight in bf16; its gradient, over zeros, rounded to bf16, then in FP32; that of the head's input
        REST: bf16 * of.hidden * (of.layers * 3 + 4 + 3 + 3 + 2 + 2)
        + of.vocabulary * of.hidden * (2 * 4 + TO_BF16 + 4 + 2 * TO_BF16),
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
    return moved | {SWIGLU: moved[SWIGLU] - kept, CASTS: written, OPTIMIZER: STATE * of.parameters + norm}


def ms_at(moved: dict[str, float], tb_per_s: float) -> dict[str, float]:
    return {group: of / tb_per_s / 1e9 for group, of in moved.items()}


def mfu_at(model: str, moved: dict[str, float], tb_per_s: float) -> str:
    """Return the MFU if each group took this time, or what it takes now if that is less, and all other kernels none."""
    kernels = ms_of(model, BF16, GPU)
    others = sum(min(ms, kernels[group]) for group, ms in ms_at(moved, tb_per_s).items())
    return f"{Budget(model).mfu_in(sum(kernels[group] for group in BUSY) + others):.3f}"


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


def left_to_waiting(model: str) -> str:
    """Return the ms that the MFU to be reached leaves if all kernels but GEMMs and attention ran at a copy's rate."""
    of = Budget(model)
    return f"{of.allowed_ms - of.busy_ms - sum(ms_at(moved_bytes(model), fastest_copy()).values()):.1f}"


def kernels_over_copies(model: str) -> str:
    """Return the time of all kernels but GEMMs and attention, over what they would take at a copy's rate."""
    kernels, copied = ms_of(model, BF16, GPU), ms_at(moved_bytes(model), fastest_copy())
    return f"{sum(kernels[group] for group in copied) / sum(copied.values()):.2f}"


FLOORS: Parts = {
    "at a copy's rate": table,
    **{f"MFU at a copy's rate, {model}": partial(mfu_by_copies, model) for model in MODELS},
    **{f"MFU with fewer bytes, {model}": partial(mfu_with_fewer_bytes, model) for model in MODELS},
    "MFU at the data sheet's rate, llama_1b": lambda: mfu_at("llama_1b", fewer_bytes("llama_1b"), DATA_SHEET),
    "left to waiting, llama_125m": partial(left_to_waiting, "llama_125m"),
    "kernels over copies, llama_125m": partial(kernels_over_copies, "llama_125m"),
    "all others, llama_125m, H100": lambda: f"{ms_of('llama_125m', BF16, 'H100')[REST]:.1f}",
}

"""Count the memory of a step of llama_1b and what its backward computes again, from the model's config.

All counts are arithmetic. The measured peaks and a copy's rate are those of the benchmark's JSON.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import yaml

from analysis.pages.marks import Parts, benchmark
from analysis.pages.step_profile import BF16, GPU, MXFP8, Budget, name_of, newest_row
from mxstudy.results import markdown

MODEL = "llama_1b"
SOME = {BF16: "bf16, fused, recomputing MLPs", MXFP8: "mxfp8, rmsnorm, recomputing MLPs"}
COLUMNS = {"bf16": BF16, "MXFP8": MXFP8, "bf16, some MLPs": SOME[BF16], "MXFP8, some MLPs": SOME[MXFP8]}
LIMIT_GIB = 40
GIB = 2**30


class Sizes(NamedTuple):
    """The sizes of a Llama whose gated MLP has an inner size of `ffn`, and the tokens of a step."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tokens: int

    @property
    def qkv(self) -> int:
        return self.hidden * (self.heads + 2 * self.kv_heads) // self.heads

    @property
    def block_weights(self) -> int:
        """Return the weights of a block's four linears."""
        return self.hidden * (self.qkv + self.hidden + 3 * self.ffn)

    @property
    def parameters(self) -> int:
        gains = (2 * self.layers + 1) * self.hidden
        return 2 * self.vocabulary * self.hidden + self.layers * self.block_weights + gains

    def first_products(self, blocks: int) -> int:
        """Return the bytes of the product of the MLP's first linear, bf16, of so many blocks."""
        return blocks * self.tokens * 2 * 2 * self.ffn

    @property
    def other_kept(self) -> int:
        """Return the bytes of all else that blocks keep.

        In bf16: input, queries, keys and values, the attention's output and the MLP's input. In FP32: a number a head,
        of the softmax, and one a norm.
        """
        return self.layers * self.tokens * (2 * (3 * self.hidden + self.qkv) + 4 * (self.heads + 2))


def sizes(model: str = MODEL) -> Sizes:
    """Return the sizes of a file of conf/model, and the tokens of its steps on a GPU."""
    has = yaml.safe_load((Path("conf/model") / f"{model}.yaml").read_text())
    settings = benchmark(name_of(model, GPU))["settings"]
    return Sizes(
        hidden=has["hidden_size"],
        ffn=has["ffn_size"],
        layers=has["num_layers"],
        heads=has["num_heads"],
        kv_heads=has["num_kv_heads"],
        vocabulary=has["vocab_size"],
        tokens=settings["batch"] * settings["sequence"],
    )


def of_arm(arm: str) -> dict[str, float]:
    """Return the bytes of an arm's step as its backward begins, by what they hold.

    The MLP's backward has the gradients of its inner output and of its first product, and its inner output again. With
    casts the gradient of the first product is there twice, once for each GEMM.
    """
    has = sizes()
    keeping = has.layers - newest_row(MODEL, GPU, arm)["recompute_mlp"]
    inner = has.tokens * 2 * has.ffn
    return {
        "weights, FP32": 4 * has.parameters,
        "AdamW's two moments, FP32": 8 * has.parameters,
        "kept: products of the MLPs' first linears, bf16": has.first_products(keeping),
        "kept: all else of the blocks, bf16 and FP32": has.other_kept,
        "gradient of the head's weight, FP32": 4 * has.vocabulary * has.hidden,
        "backward of the last block's MLP, bf16": inner * (6 if arm in (MXFP8, SOME[MXFP8]) else 4),
    }


def budget() -> str:
    """Return the table of a step's memory by arm, with the measured peak."""
    of = [of_arm(arm) for arm in COLUMNS.values()]
    sums = [sum(one.values()) / GIB for one in of]
    peaks = [newest_row(MODEL, GPU, arm)["peak_gib"] for arm in COLUMNS.values()]
    cells = [(what, *(f"{one[what] / GIB:.1f}" for one in of)) for what in of[0]]
    cells.append(("sum of these, by arithmetic", *(f"{one:.1f}" for one in sums)))
    cells.append(("peak, as measured", *(f"{one:.1f}" for one in peaks)))
    cells.append(("peak less the sum", *(f"{peak - one:.1f}" for peak, one in zip(peaks, sums, strict=True))))
    head = f"GiB of a step of {MODEL}"
    return markdown([head, *COLUMNS], cells, left=[head])


def without_gradients() -> float:
    """Return the GiB of weights, moments and all that blocks keep, with no MLP recomputed."""
    has = sizes()
    return (12 * has.parameters + has.first_products(has.layers) + has.other_kept) / GIB


def too_many_gib(arm: str) -> float:
    return float(newest_row(MODEL, GPU, arm)["peak_gib"]) - LIMIT_GIB


def least_mlps(arm: str) -> str:
    """Return how many MLPs must not keep their first product, so that the step stays within its limit."""
    return f"{math.ceil(too_many_gib(arm) * GIB / sizes().first_products(1))}"


def computed_again() -> str:
    """Return the table of what the backward of bf16 computes again, with its bytes at the rate of a copy."""
    has = sizes()
    copied_per_s = benchmark(name_of(MODEL, GPU))["settings"]["copied_bytes_per_s"]
    moved = {
        "outputs of the two norms of a block": has.layers * has.tokens * 2 * 4 * has.hidden,
        "inner outputs of the MLPs (SwiGLU)": has.layers * has.tokens * 2 * has.ffn,
        "operands of the weights, from FP32": has.layers * has.block_weights * (4 + 2),
    }
    how = ("read the input, write the output", "written by the kernel of SwiGLU's backward", "read FP32, write bf16")
    cells = [
        (what, by, f"{size / 1e9:.1f}", f"{1e3 * size / copied_per_s:.1f}")
        for (what, size), by in zip(moved.items(), how, strict=True)
    ]
    columns = ["computed again in a bf16 step of llama_1b", "how", "GB", "ms at the rate of a copy"]
    return markdown(columns, cells, left=columns[:2])


def scores_again() -> str:
    """Return the TFLOP of the attention's scores, one of six products that count."""
    return f"{Budget(MODEL).tflop_of_attention / 6:.1f}"


def flops_again() -> str:
    return f"{100 * newest_row(MODEL, GPU, SOME[BF16])['recomputed']:.1f} %"


MEMORY: Parts = {
    "memory": budget,
    "without gradients, GiB": lambda: f"{without_gradients():.1f}",
    "to be freed, GiB": lambda: f"{too_many_gib(BF16):.1f}",
    **{f"MLPs at least, {said}": partial(least_mlps, arm) for said, arm in (("bf16", BF16), ("MXFP8", MXFP8))},
    "first product of an MLP, GiB": lambda: f"{sizes().first_products(1) / GIB:.0f}",
    "bf16 moments would free, GiB": lambda: f"{4 * sizes().parameters / GIB:.1f}",
    "computed again": computed_again,
    "scores again": scores_again,
    "FLOPs of recomputed MLPs": flops_again,
}

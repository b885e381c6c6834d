"""Compute the head's GEMMs and the cross-entropy between them as one function, with one chunk of logits in memory.

The forward computes the gradients while a chunk's logits are in memory, so nothing is computed twice, and no logits are
kept for the backward. dX has the same bits as without chunks; dW is summed over chunks in FP32 and rounded once.

The functions of other libraries round differently. torch's F.linear_cross_entropy (2.13; 2.11 has none)
takes the loss from FP32 logits, which our linears never return, and sums loss and dW over chunks in bf16. Liger's
fused linear cross-entropy (0.8) rounds logits as we do, and can sum dW in FP32. But it divides the rounded gradients by
a step's tokens, runs on GPUs only, ignores targets of one value, and waits for the GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxstudy.config.casts import Gemms
from mxstudy.kernels import cross_entropy_
from mxstudy.numerics.gemms import Linear, add_wgrad, dgrad_gemm, forward_gemm, wgrad_gemm
from mxstudy.numerics.grid import to_dtype

LOGITS_AT_ONCE = 2**29  # 1 GiB in bf16: 4,096 tokens of a vocabulary of 128,256


def linear_cross_entropy(
    x_TI: Tensor, weight_VI: Tensor, targets_T: Tensor, linear: Linear, divisor: int, most: int | None = None
) -> Tensor:
    """Return the sum of the tokens' cross-entropies in nats, over `divisor`: float32 [].

    Logits are x times weight transposed, rounded to x's dtype. The gradients are those of the result itself: if the
    result is multiplied further, they are rounded once more. A backward that begins with `unit_gradient` returns them
    unchanged. Any other one reads and writes both once more, because only the GPU knows whether its factor is 1. A
    recipe that is not empty takes all tokens as one chunk, because a scale or a random number may depend on all of
    them. `most`: the elements of a chunk's logits, by default LOGITS_AT_ONCE.
    """
    size = tokens_at_once(linear, len(x_TI), len(weight_VI), most or LOGITS_AT_ONCE)
    return _LinearCrossEntropy.apply(x_TI, weight_VI, targets_T, linear, divisor, size, torch.is_grad_enabled())


def tokens_at_once(linear: Linear, tokens: int, vocabulary: int, most: int = LOGITS_AT_ONCE) -> int:
    """Return the number of tokens in a chunk of `most` logits: a power of two, which suits GEMMs, or all tokens."""
    rows = max(1, most // vocabulary)
    return min(tokens, 1 << (rows.bit_length() - 1)) if linear.gemms == Gemms() else tokens


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight_VI: Tensor,
        targets_T: Tensor,
        linear: Linear,
        divisor: int,
        size: int,
        with_gradients: bool,
    ) -> Tensor:
        nats: list[Tensor] = []
        dx: list[Tensor] = []
        dweight_VI = weight_VI.new_zeros(weight_VI.shape if size < len(x_TI) else (), dtype=torch.float32)
        for x, targets in zip(x_TI.split(size), targets_T.split(size), strict=True):
            logits = forward_gemm(x, weight_VI, linear, x.dtype)
            nats.append(cross_entropy_(logits, targets, 1 / divisor if with_gradients else None))
            if with_gradients:  # the logits now hold their gradient
                dx.append(dgrad_gemm(logits, weight_VI, linear, x, weight_VI))
                if size < len(x_TI):
                    add_wgrad(dweight_VI, logits, x, linear)
                else:
                    dweight_VI = wgrad_gemm(logits, x, linear, weight_VI)
            del logits  # before the next chunk's are allocated
        if with_gradients:
            ctx.save_for_backward(torch.cat(dx), to_dtype(dweight_VI, weight_VI.dtype))
        return total(torch.cat(nats)) / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dx_TI, dweight_VI = ctx.saved_tensors
        if dloss is not unit_gradient(dloss.device):
            dx_TI, dweight_VI = dx_TI * dloss, dweight_VI * dloss
        return dx_TI, dweight_VI, None, None, None, None, None


@functools.cache
def unit_gradient(device: torch.device) -> Tensor:
    """Return 1, float32 [], always the same tensor: the gradient of a loss by itself, with which a backward begins."""
    return torch.ones((), device=device)


def total(nats_T: Tensor) -> Tensor:
    """Return the sum. On CPU it has the bits of F.cross_entropy's own sum, which earlier runs have recorded."""
    if nats_T.device.type == "cpu":
        return F.nll_loss(-nats_T[:, None], torch.zeros_like(nats_T, dtype=torch.int64), reduction="sum")
    return nats_T.sum()

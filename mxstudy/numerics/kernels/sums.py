"""The mean of each replica's numbers, summed in the same order in every stack."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from mxstudy.numerics.kernels.operands import ceil_power_of_two, launch

CHUNK, MOST_CHUNKS = 4096, 1024


def mean_in_order(x: Tensor) -> Tensor:
    """x [S, ..., n] -> [S], in x's dtype and with a gradient: on a GPU torch's order may depend on S."""
    return _MeanInOrder.apply(x)


class _MeanInOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape, ctx.count = x.shape, x[0].numel()
        return sum_in_order(x) / ctx.count

    @staticmethod
    def backward(ctx: Any, dmean: Tensor) -> Tensor:
        return (dmean / ctx.count).view(-1, *[1] * (len(ctx.shape) - 1)).expand(ctx.shape)


@library.custom_op("mxstudy::sum_in_order", mutates_args=())
def sum_in_order(x: Tensor) -> Tensor:
    """x [S, ..., n] -> [S]; in two steps, for the order of one may depend on S."""
    return x.sum(-1).flatten(1).sum(-1)


@sum_in_order.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0])


@sum_in_order.register_kernel("cuda")
def run(x: Tensor) -> Tensor:
    from mxstudy.numerics.kernels.device.sums import chunk_sums_kernel, total_kernel

    size, total = x[0].numel(), x.new_empty(x.shape[0])
    chunk = max(CHUNK, ceil_power_of_two(-(-size // MOST_CHUNKS)))
    chunks = -(-size // chunk)
    sums = x.new_empty(x.shape[0], chunks)
    launch(chunk_sums_kernel, (chunks, x.shape[0]), (x.contiguous(), sums, size), 8, CHUNK=chunk)
    launch(total_kernel, (x.shape[0],), (sums, total, chunks), 4, CHUNKS=ceil_power_of_two(chunks))
    return total

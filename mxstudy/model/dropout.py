"""Dropout whose masks are functions of their position, and attention whose weights are dropped.

A mask follows from (seed, step, module, row of the global batch, column) by the counter generator that also draws
stochastic rounding (`mxstudy.numerics.random_bits`). So it does not depend on the world size, the micro-batch or a
resume, and a recomputed forward draws it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mxstudy.model.modules import modules_of
from mxstudy.numerics.random_bits import CALL, Draws, Random, random_words
from mxstudy.reader import require


class Dropout(nn.Module):
    """Set a share `rate` of the elements to zero and divide the others by 1 - rate; outside of training return x.

    `random`: the key, int64 [2], and the places that all streams of the model share.
    """

    random: Random | None = None

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.below = rate, round(rate * 2**32)  # an element is dropped if its random word is below

    def forward(self, x_BT: Tensor) -> Tensor:
        """Return x [B, T, ...] with elements dropped; token t of sequence b is row b * T + t of its mask."""
        if not self.training:
            return x_BT
        require(self.random is not None, "model.dropout: there is no seed; apply_precision gives the model one")
        assert self.random is not None
        draws, rows = Draws(self.random.keys, self.random.places[CALL]), x_BT.shape[0] * x_BT.shape[1]
        words = random_words(draws, rows, x_BT.shape[2:].numel())
        return torch.where(words.view_as(x_BT) < self.below, 0.0, x_BT / (1 - self.rate))


def dropout_of(rate: float) -> Dropout | None:
    """Return the module, or None if nothing is dropped, so that such a model has no extra module."""
    return Dropout(rate) if rate else None


def dropouts_of(model: nn.Module) -> dict[str, Dropout]:
    return modules_of(model, Dropout)


def dropped(x_BT: Tensor, dropout: Dropout | None) -> Tensor:
    return x_BT if dropout is None else dropout(x_BT)


def attend_dropped(q_BNTH: Tensor, k_BNTH: Tensor, v_BNTH: Tensor, mask_BTT: Tensor | None, dropout: Dropout) -> Tensor:
    """Return the heads' outputs [B, N, T, H] with dropout of the attention's weights; causal without a mask.

    It is computed in FP32, with all weights in memory: fused attention kernels draw masks of their own, which depend on
    how they divide their work.
    """
    q, k, v = (y.float() for y in (q_BNTH, k_BNTH, v_BNTH))
    length = q.shape[-2]
    if mask_BTT is None:
        allowed = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    else:
        allowed = mask_BTT[:, None]
    scores_BNTT = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
    weights_BTNT = dropout(scores_BNTT.softmax(-1).transpose(1, 2))  # a row of the mask has all heads of a token
    return (weights_BTNT.transpose(1, 2) @ v).to(q_BNTH.dtype)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Drop nothing inside the `with` block, and change no other module."""
    active = [dropout for dropout in dropouts_of(model).values() if dropout.training]
    for dropout in active:
        dropout.eval()
    try:
        yield
    finally:
        for dropout in active:
            dropout.train()

"""The decoder's dense MLP, a row of `MLPS` for each activation; and the stds of initial weights.

Shapes: B sequences, T tokens, D hidden size.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from mxstudy import config
from mxstudy.config.casts import BlockCast
from mxstudy.model.activation_functions import relu2, swiglu
from mxstudy.model.linear import MXLinear, NormLinear
from mxstudy.model.norm import build_norm


class Init(NamedTuple):
    """Standard deviations before truncation at 3 sigma. The head's is D^-0.5; depth shrinks the residual outputs'."""

    embedding: Callable[[config.Decoder], float]
    linear: Callable[[config.Decoder, int], float]  # by fan-in
    shrinks_up: bool  # whether depth also shrinks the ungated half of a gated MLP's first linear


INITS = {
    "llama": Init(lambda model: 1.0, lambda model, fan_in: model.init_std, True),  # TorchTitan, which truncates later
    "mitchell": Init(lambda model: model.hidden_size**-0.5, lambda model, fan_in: fan_in**-0.5, False),  # OLMo
}


class MLP(NamedTuple):
    """A function between two linears, and the first of them."""

    up: str  # the name of the first linear
    parts: int  # how many are fused in it
    activation: Callable[[Tensor], Tensor]  # [..., parts * ffn_size] -> [..., ffn_size]

    def init_stds(self, model: config.Decoder, output_std: float) -> tuple[float, ...]:
        """Return the initial stds of the first linear's weights, one for each equal part of its rows."""
        init = INITS[model.init]
        std = init.linear(model, model.hidden_size)
        return (std, output_std) if init.shrinks_up and self.parts == 2 else (std,)


MLPS = {
    "swiglu": MLP("w13", 2, swiglu),
    "gelu": MLP("w1", 1, F.gelu),
    "relu2": MLP("w1", 1, relu2),  # Nemotron-4
}


class FeedForward(nn.Module):
    """Compute w2(activation(up(x))); in a gated MLP, `up` holds the gate's linear and the other one, fused."""

    def __init__(self, model: config.Decoder, norm: config.Norm, cast: BlockCast, output_std: float) -> None:
        super().__init__()
        self.kind, row = model.mlp, MLPS[model.mlp]
        self.up_name, self.activation = row.up, row.activation
        stds = row.init_stds(model, output_std)
        up = NormLinear(build_norm(norm, model.hidden_size, cast), row.parts * model.ffn_size, stds)
        self.add_module(self.up_name, up)
        self.w2 = MXLinear(model.ffn_size, model.hidden_size, output_std)

    @property
    def up(self) -> NormLinear:
        return typing.cast(NormLinear, getattr(self, self.up_name))

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, None]:
        """Return the output [B, T, D], and None for the routing."""
        return self.w2(self.activation(self.up(x_BTD))), None

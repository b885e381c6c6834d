"""Linear layers that know in which formats their three GEMMs run."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from mxstudy.model.norm import Norm
from mxstudy.numerics.cast import BlockCast
from mxstudy.numerics.matmul import Gemms, forward_operand, mx_linear
from mxstudy.numerics.norm import norm_linear


class MXLinear(nn.Module):
    """x [..., in] -> [..., out] without bias, in x's dtype; `gemms` may be set anew between steps.

    The parameter is kept in FP32 and cast to x's dtype first.
    """

    def __init__(self, in_features: int, out_features: int, init_std: float) -> None:
        super().__init__()
        self.in_features, self.out_features, self.init_std = in_features, out_features, init_std
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.gemms, self.cast = Gemms(), BlockCast()

    def forward(self, x: Tensor) -> Tensor:
        return mx_linear(x, self.weight.to(x.dtype), self.gemms, self.cast)


class NormLinear(MXLinear):
    """A norm, its gain and bias, and one (fused) linear layer: the norm's output feeds one cast and one GEMM."""

    def __init__(self, norm: Norm, out_features: int, init_std: float) -> None:
        super().__init__(norm.size, out_features, init_std)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        gain, bias = self.norm.parameters_as(x)
        return norm_linear(
            x,
            gain,
            self.weight.to(x.dtype),
            bias,
            rms=self.norm.rms,
            bound=self.norm.bound,
            fold_gain=self.norm.fold_gain,
            gemms=self.gemms,
            cast=self.cast,
            centers=self.norm.centers,
        )

    def read(self, xbar: Tensor) -> Tensor:
        """x / rms as the forward GEMM reads it where the gain is folded, float32: what observers see."""
        if self.gemms.forward_x is None:
            return xbar
        emulated, bound = replace(self.gemms, native=False), xbar.new_full((), self.norm.bound)
        operand = forward_operand(xbar.flatten(0, -2), emulated, self.cast, torch.float32, bound)
        return operand.dequantize().view_as(xbar)

"""Linear layers that know in which formats their three GEMMs run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mxstudy.config.casts import BlockCast, Cast, Gemms
from mxstudy.kernels import linear_fp32
from mxstudy.kernels.native import mx_tensor
from mxstudy.model.norm import Norm
from mxstudy.numerics.gemms import Linear, Random, mx_linear
from mxstudy.numerics.norm_linear import norm_linear
from mxstudy.numerics.vector_ops import Gain, round_gain


class MXLinear(nn.Module):
    """x [..., in] -> [..., out] without bias; `gemms` may be set anew between steps.

    The parameter is kept in FP32 and cast to x's dtype first, which is that of the result. Where `compute` is set, that
    is the dtype of unquantised operands and results, and what is quantised is so from FP32. `random`: where stochastic
    rounding and random signs come from. `native`: the GEMM is the hardware's own. `on_tensor_cores`: FP32 as
    `linear_fp32` has it.
    """

    compute: torch.dtype | None = None
    on_tensor_cores = False
    native = False
    random: Random | None = None

    def __init__(self, in_features: int, out_features: int, init_std: float) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.init_stds: tuple[float, ...] = (init_std,)  # of as many equal parts of its rows
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.gemms, self.cast = Gemms(), BlockCast()

    def forward(self, x: Tensor) -> Tensor:
        if self.on_tensor_cores:
            return linear_fp32(x, self.weight)
        return mx_linear(x, self.weight_as(x), self.arithmetic, self.compute)

    @property
    def arithmetic(self) -> Linear:
        return Linear(self.gemms, self.random, mx_tensor if self.native else None)

    def weight_as(self, x: Tensor) -> Tensor:
        return self.weight.to(x.dtype) if self.compute is None else self.weight


class NormLinear(MXLinear):
    """A norm, its gain and bias, and one (fused) linear layer: the norm's output feeds one cast and one GEMM.

    `gain`: what the gain is rounded to, x's dtype where it is None; mx is the format of the forward's W, or of its X
    where W is not quantised. It may be set anew between steps.
    """

    gain: Gain | None = None

    def __init__(self, norm: Norm, out_features: int, init_std: float) -> None:
        super().__init__(norm.size, out_features, init_std)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        gain, bias = self.gain_and_bias(x)
        apart = self.on_tensor_cores or self.norm.is_op_by_op
        if apart and not self.norm.fold_gain:
            return super().forward(self.norm.apply_affine(x, gain, bias))
        return norm_linear(
            x,
            gain,
            self.weight_as(x),
            bias,
            rms=self.norm.rms,
            bound=self.norm.bound,
            fold_gain=self.norm.fold_gain,
            linear=self.arithmetic,
            centers=self.norm.centers,
            rounded=self.norm.output == "rounded",
            dtype=self.compute,
        )

    def gain_and_bias(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """As the norm multiplies and adds them."""
        gain, bias = self.norm.parameters_as(x)
        if self.gain is not None and self.norm.weight is not None:
            away = self.cast.operand_pre_round
            gain = round_gain(self.norm.weight, self.gain, self.gain_cast, away)
        return gain, bias

    @property
    def gain_cast(self) -> Cast | None:
        """The cast that a gain in mx takes: that of the forward's W, or of its X where W is not quantised."""
        return self.gemms.forward_w or self.gemms.forward_x

    def read(self, xbar: Tensor) -> Tensor:
        """x / rms as the forward GEMM reads it where the gain is folded, float32: what observers see."""
        if self.gemms.forward_x is None:
            return xbar
        linear, bound = Linear(self.gemms, self.random), xbar.new_full((), self.norm.bound)
        read = linear.operand(xbar.flatten(0, -2), "forward_x", -1, torch.float32, bound).dequantize()
        return linear.rotated(read, "forward", -1, inverse=True).view_as(xbar)

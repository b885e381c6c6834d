"""Linear layers whose three GEMMs (forward, dgrad, wgrad) run in configurable formats."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mxstudy.blocks.operands import plain_operand
from mxstudy.config.casts import BlockCast, Cast, Gemms
from mxstudy.kernels import linear_fp32
from mxstudy.kernels.native import mx_tensor
from mxstudy.model.norm import Norm
from mxstudy.model.seeds import normal_weight
from mxstudy.numerics.gemms import Bounds, Linear, mx_linear
from mxstudy.numerics.norm_linear import NormBounds, as_read, norm_linear, weight_and_bounds
from mxstudy.numerics.random_bits import Random
from mxstudy.numerics.vector_ops import Gain, round_gain

Stds = float | tuple[float, ...]


class Sources(NamedTuple):
    """The tensors that a linear's operands are quantised from, except the output's gradient.

    `weight`: dgrad's weight. `bounds`: upper bounds of |x|, or None. After a norm, x is the norm's output, float32, and
    `forward_weight` has the gain in it if the norm folds it. Experts' x is dispatched, and their weights are a stack.
    """

    x_TI: Tensor
    forward_weight: Tensor
    weight: Tensor
    bounds: Bounds | None
    linear: Linear


def bounds_for(norm: Norm, gemms: Gemms) -> NormBounds:
    """Return upper bounds of the norm's output, before the gain, for a linear with that recipe."""
    transform = gemms.forward_transform
    return norm.bounds(1 if transform is None else transform.size)


class MXLinear(nn.Module):
    """A linear layer without bias: x [..., in] -> [..., out]. `gemms` may be set anew between steps.

    The weight is kept in FP32 and first cast to x's dtype, which is also the result's. If `compute` is set, unquantised
    operands and results have that dtype instead, and operands are quantised from FP32. `random`: the random streams of
    stochastic rounding and random signs. `native`: use the hardware's MX GEMM. `casts_by_kernel`: make operands by
    kernels, which all casts of the recipe must have. `on_tensor_cores`: compute in FP32 by `linear_fp32`.
    `is_of_experts`: the weight has one matrix for each expert, which share their random streams. `init_std`: that of
    the initial weight, drawn by torch's generator; or one for each equal part of its rows. `experts`: (their number,),
    or () for one matrix.
    """

    compute: torch.dtype | None = None
    is_of_experts = False
    on_tensor_cores = False
    native = False
    random: Random | None = None

    def __init__(
        self, in_features: int, out_features: int, init_std: Stds = 0.02, experts: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.init_stds = init_std if isinstance(init_std, tuple) else (init_std,)
        self.weight = nn.Parameter(normal_weight((*experts, out_features, in_features), self.init_stds))
        self.gemms, self.cast = Gemms(), BlockCast()
        self.casts_by_kernel = False  # in the instance from the start: compiled code checks where it finds it

    def forward(self, x: Tensor) -> Tensor:
        if self.on_tensor_cores:
            return linear_fp32(x, self.weight)
        return mx_linear(x, self.weight_as(x), self.arithmetic, self.compute)

    def sources(self, x: Tensor, *more: Any) -> Sources:
        """Return what the operands are quantised from when the linear is called with these inputs."""
        weight = self.weight_as(x)
        return Sources(x.flatten(0, -2), weight, weight, None, self.arithmetic)

    @property
    def arithmetic(self) -> Linear:
        kernel = plain_operand if self.casts_by_kernel else None
        return Linear(self.gemms, self.random, mx_tensor if self.native else None, kernel)

    def weight_as(self, x: Tensor) -> Tensor:
        return self.weight.to(x.dtype) if self.compute is None else self.weight


class NormLinear(MXLinear):
    """A norm with its gain and bias, fused with one linear layer: the norm's output feeds one cast and one GEMM.

    `gain`: the format to which the gain is rounded; None is x's dtype, mx the format of the forward's W, or of its X if
    W is not quantised. It may be set anew between steps.
    """

    gain: Gain | None = None

    def __init__(self, norm: Norm, out_features: int, init_std: Stds = 0.02, experts: tuple[int, ...] = ()) -> None:
        super().__init__(norm.size, out_features, init_std, experts)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        gain, bias = self.gain_and_bias(x)
        if self.is_apart:
            return super().forward(self.norm.apply_affine(x, gain, bias))
        return norm_linear(
            x,
            gain,
            self.weight_as(x),
            bias,
            rms=self.rms,
            bounds=self.bounds,
            fold_gain=self.norm.fold_gain,
            fold_gain_in_dgrad=self.norm.fold_gain_in_dgrad,
            linear=self.arithmetic,
            centers=self.norm.centers,
            rounded=self.norm.output == "rounded",
            dtype=self.compute,
        )

    @property
    def is_apart(self) -> bool:
        """Return whether the norm's output is stored as a tensor before the linear reads it."""
        return (self.on_tensor_cores or self.norm.is_op_by_op) and not self.norm.fold_gain

    def sources(self, x: Tensor, *more: Any) -> Sources:
        weight, norm, x_TI = self.weight_as(x), self.norm, x.flatten(0, -2)
        gain_and_bias = self.gain_and_bias(x_TI)
        if self.is_apart:
            return Sources(norm.apply_affine(x_TI, *gain_and_bias), weight, weight, None, self.arithmetic)
        y_TI = as_read(self.normalize(x_TI), *gain_and_bias, norm.fold_gain)
        forward_weight, bounds = weight_and_bounds(weight, *gain_and_bias, self.bounds, norm.fold_gain)
        weight = forward_weight if norm.fold_gain_in_dgrad else weight
        return Sources(y_TI, forward_weight, weight, bounds, self.arithmetic)

    @property
    def bounds(self) -> NormBounds:
        """Return upper bounds of the norm's output before the gain, under the forward's transform and without it."""
        return bounds_for(self.norm, self.gemms)

    def rms(self, x: Tensor) -> Tensor:
        """Return the norm's RMS of x; an estimate is taken from the input of the forward's cast, under its transform.

        The transform keeps the RMS of a row, so this is the RMS of x (exactly, for the exact RMS). A pass without casts
        takes the norm's own transform, so that it estimates from the same blocks as the run.
        """
        if not self.norm.estimates:
            return self.norm.rms(x)
        transform = self.gemms.forward_transform or self.norm.transform
        return self.norm.rms(self.arithmetic.rotated(x, "forward", -1, rounds=False, transform=transform))

    def normalize(self, x: Tensor) -> Tensor:
        """Return x as the norm normalises it for this linear, before gain and bias: float32."""
        return self.norm.normalize(x, self.rms)

    def gain_and_bias(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the gain, rounded as `gain` says, and the bias or None: the values that the norm computes with."""
        gain, bias = self.norm.parameters_as(x)
        if self.gain is not None and self.norm.weight is not None:
            away = self.cast.operand_pre_round
            gain = round_gain(self.norm.weight, self.gain, self.gain_cast, away)
        return gain, bias

    @property
    def gain_cast(self) -> Cast | None:
        """Return the cast of a gain in mx: that of the forward's W, or of its X if W is not quantised."""
        return self.gemms.forward_w or self.gemms.forward_x

    def read(self, xbar: Tensor) -> Tensor:
        """Return what GEMMs read of `xbar` = x / rms if the gain is folded: cast, decoded, rotated back, float32."""
        if self.gemms.forward_x is None:
            return xbar
        linear = Linear(self.gemms, self.random)
        bounds = Bounds(xbar.new_full((), self.bounds.forward), xbar.new_full((), self.bounds.plain))
        read = linear.operand(xbar.flatten(0, -2), "forward_x", -1, torch.float32, bounds).dequantize()
        return linear.rotated(read, "forward", -1, inverse=True).view_as(xbar)

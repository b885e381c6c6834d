"""Compute the three GEMMs of a linear through torchao's MXTensor, as a user would: torchao has no MX linear any more.

E4M3, blocks of 32, RCEIL. MXTensor quantises only along the last axis, so the other axis is cast from a transposed
copy. Its GEMM is emulated: both operands are decoded to bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxstudy.model.decoder import Decoder
from mxstudy.model.linear import MXLinear, NormLinear


class TorchaoLinear(MXLinear):
    def forward(self, x: Tensor) -> Tensor:
        h_TO = _TorchaoLinear.apply(x.flatten(0, -2), self.weight.to(x.dtype))
        return h_TO.unflatten(0, x.shape[:-1])


class TorchaoNormLinear(NormLinear):
    """Runs the norm as a separate module before the linear."""

    def forward(self, x: Tensor) -> Tensor:
        return TorchaoLinear.forward(self, self.norm(x))  # type: ignore[arg-type]


CLASSES = {MXLinear: TorchaoLinear, NormLinear: TorchaoNormLinear}


def use_torchao(model: Decoder) -> None:
    """Replace the blocks' linears by changing their classes, so that the compiler shares code between blocks."""
    for module in model.layers.modules():
        if type(module) in CLASSES:
            module.__class__ = CLASSES[type(module)]


class _TorchaoLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        return torch.mm(quantized(x_TI), quantized(weight_OI).t())

    @staticmethod
    def backward(ctx: Any, dh_TO: Tensor) -> tuple[Tensor, Tensor]:
        x_TI, weight_OI = ctx.saved_tensors
        dx_TI = torch.mm(quantized(dh_TO), quantized(weight_OI.t().contiguous()).t())
        dweight_OI = torch.mm(quantized(dh_TO.t().contiguous()), quantized(x_TI.t().contiguous()).t())
        return dx_TI, dweight_OI


def quantized(x: Tensor) -> Any:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    return MXTensor.to_mx(x.contiguous(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)

"""Make small students with gains and biases of their own, and return what their forward and backward give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mxstudy import config
from mxstudy.model import MXLinear
from mxstudy.numerics import BlockCast
from mxstudy.students.model import ResidualMLP
from mxstudy.students.replicas import stack

SIZE, TOKENS, LAYERS, EPS = 64, 96, 2, 1e-5
LAYER_NORM = config.LayerNorm(bias=True)
NORMS = {
    "none": None,
    "layernorm": LAYER_NORM,
    "rmsnorm": config.RMSNorm(),
    "mxnorm_p1": config.MXNorm(p=1.0),
    "mxnorm_p2": config.MXNorm(p=2.0),
}
CAST = BlockCast(scale_rule="floor", rounding="away", operand_pre_round=True)
WITHOUT_RULE = {
    "fp8_tensor": 32,
    "nvfp4_forward_only": 16,
}  # rows without E8M0 scales, and their blocks
BF16, FP32 = torch.bfloat16, torch.float32
ATTENTION = {"attention_heads": 4, "sequence_length": 32}  # 3 sequences of TOKENS


def small(**options: Any) -> config.ResidualMLP:
    return config.ResidualMLP(**({"hidden_size": SIZE, "num_layers": LAYERS} | options))


def student(
    model: config.ResidualMLP,
    norm: config.Norm | None,
    seeds: list[int],
    row: str = "fp32",
    compute: torch.dtype = FP32,
    stacked: bool = True,
    **options: Any,
) -> ResidualMLP:
    mlp = ResidualMLP(model, norm, cast_of(row), compute, **options)
    if stacked:
        stack(mlp, len(seeds))
    mlp.init_weights(seeds)
    set_casts(mlp, row, cast_of(row))
    with torch.no_grad():  # moves gains and biases away from 1 and 0
        for name, parameter in mlp.named_parameters():
            if "norm" in name:
                wave = torch.sin(torch.arange(model.hidden_size) * (1 + torch.tensor(seeds).view(-1, 1, 1)))
                parameter += 0.2 * (wave if stacked else wave[0, 0])
    return mlp


def cast_of(row: str) -> BlockCast:
    """Return CAST with the fields that this row uses."""
    return replace(CAST, scale_rule="rceil", block_size=WITHOUT_RULE[row]) if row in WITHOUT_RULE else CAST


def set_casts(model: nn.Module, row: str, cast: BlockCast) -> None:
    """Set that row, under these settings, in every linear."""
    for module in model.modules():
        if isinstance(module, MXLinear):
            module.gemms, module.cast = config.PRECISIONS[row].filled(cast), cast


def samples(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def run(mlp: ResidualMLP, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Return the output, and every parameter's gradient."""
    y = mlp(x)
    y.backward(dy)
    found = {"y": y.detach()} | {name: p.grad for name, p in mlp.named_parameters() if p.grad is not None}
    mlp.zero_grad()
    return found

"""The bounds of norms' outputs against what FP4 casts get, and an outer scale from the bound against the tensor's own.

Inputs go through a norm and the cast of the linear that reads it, as in training: X alone, in MXFP4 and in NVFP4, with
and without a Hadamard transform before the cast (MXNorm paper, Lemmas 1 and 2).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mxstudy import config
from mxstudy.config import Approximation
from mxstudy.config.casts import BlockCast, Cast, Gemms, Hadamard
from mxstudy.data.distributions import gaussian, laplace, with_outliers
from mxstudy.model.linear import NormLinear
from mxstudy.model.norm import build_norm
from mxstudy.model.norm_casts import take_cast
from mxstudy.model.seeds import generator_of
from mxstudy.numerics.formats import FORMATS
from mxstudy.numerics.quality import sqnr_db, underflow_fraction
from mxstudy.numerics.quantized import Quantized
from mxstudy.numerics.tiles import split_blocks
from mxstudy.numerics.transforms import hadamard

TRANSFORM = Hadamard(size=16)
FACTORS = (30, 1000, 30_000, 1_000_000)  # the last ones leave the other blocks so small that their scales vanish
SPIKE = 1e15  # its square is still in range of FP32
NORMS: dict[str, config.Norm] = {
    "RMSNorm": config.RMSNorm(),
    "MXNorm p=1": config.MXNorm(p=1.0),
    "MXNorm p=2": config.MXNorm(p=2.0),
}
NVFP4 = Cast(format="NVFP4", block_size=16, scale="E4M3", chain="training")
CASTS = {
    ("MXFP4", "none"): Cast(format="E2M1", block_size=32, scale_rule="floor"),
    ("NVFP4", "tensor"): replace(NVFP4, outer_scale="tensor"),
    ("NVFP4", "bound"): replace(NVFP4, outer_scale="bound"),
}


def norm_bounds(study: Approximation) -> Iterator[dict[str, Any]]:
    """Yield for each input, norm, cast, outer scale and size of the transform (or 0) what `of_output` returns."""
    for name, x in inputs(study).items():
        for norm, ((fmt, outer), cast), transform in itertools.product(NORMS, CASTS.items(), (None, TRANSFORM)):
            layer = layer_of(NORMS[norm], study.hidden_size, Gemms(forward_x=cast, forward_transform=transform))
            cell = {"input": name, "norm": norm, "cast": fmt, "outer_scale": outer}
            yield cell | {"hadamard": transform.size if transform else 0} | of_output(layer, x)


def inputs(study: Approximation) -> dict[str, Tensor]:
    """Return {name: x}: random rows, some with 4 features `factor` times as large, and the worst cases of the lemmas.

    These are a lone spike before the transform, and a lone spike after it.
    """
    shape = (study.rows, study.hidden_size)
    normal = gaussian(shape, generator_of(repr((study.seed, "norm_bounds", "gaussian"))))
    other = laplace(shape, generator_of(repr((study.seed, "norm_bounds", "laplace"))))
    spike = torch.zeros(3, study.hidden_size)
    spike[0, 0], spike[1, study.hidden_size // 2 + 5], spike[2, -1] = SPIKE, -SPIKE, SPIKE
    large = {f"4 features x {factor}": with_outliers(normal, factor, features=4) for factor in FACTORS}
    turned = hadamard(spike, TRANSFORM.size, None, axis=-1, rounds=False)
    return {"gaussian": normal, "laplace": other, **large, "spike": spike, "spike, transformed": turned}


def layer_of(norm: config.Norm, size: int, gemms: Gemms) -> NormLinear:
    """Return a linear with the norm before it, which has taken its blocks from the cast of X; gains are 1."""
    layer = NormLinear(build_norm(norm, size, BlockCast()), 16)
    layer.gemms = gemms.filled(BlockCast())
    take_cast("the measured linear", layer, BlockCast())
    return layer


@torch.no_grad()
def of_output(layer: NormLinear, x: Tensor) -> dict[str, float]:
    """Return the bounds of the norm's output, what it reaches, the noise of its cast, and the state of block scales.

    `bound`, `largest`: of what the cast gets, which is under the transform. `plain_bound`, `plain_largest`: before it.
    `cast_sqnr_db`: the cast against what it gets, and `block_sqnr_db`: the median block's, to which a few large blocks
    do not matter. `output_sqnr_db`: the decoded output, rotated back, against x divided by its exact RMS.
    `subnormal_scales`, `zero_scales`: the fractions of blocks whose E4M3 scale is below 2^-6, or 0. Blocks of zeros are
    not counted. `underflow`: the fraction of elements that became 0. `non_finite`: the fraction decoded to NaN or an
    infinity. `row_sum`: the largest sum over a row of |element times block scale|. A GEMM's accumulator is at most that
    times W's largest such product.
    """
    sources = layer.sources(x)
    assert sources.bounds is not None
    xbar, linear = sources.x_TI, sources.linear
    read = linear.rotated(xbar, "forward", -1)
    quantized = linear.forward_cast(xbar, "forward_x", sources.bounds)
    decoded = quantized.dequantize()
    exact = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    back = linear.rotated(decoded, "forward", -1, inverse=True, rounds=False)
    operand = quantized.without_tensor_scale()
    measured = {
        "bound": sources.bounds.forward,
        "largest": read.abs().max(),
        "plain_bound": sources.bounds.plain,
        "plain_largest": xbar.abs().max(),
        "cast_sqnr_db": sqnr_db(decoded, read),
        "block_sqnr_db": median_sqnr_db(decoded, read, quantized.block_size),
        "output_sqnr_db": sqnr_db(back, exact),
        **of_scales(operand, read),
        "underflow": underflow_fraction(quantized, read),
        "non_finite": (~decoded.isfinite()).double().mean(),
        "row_sum": operand.dequantize().abs().double().sum(-1).max(),
    }
    return {name: value.item() for name, value in measured.items()}


def median_sqnr_db(decoded: Tensor, x: Tensor, block_size: int) -> Tensor:
    """Return the median of the blocks' SQNRs, of blocks that are not all 0; a block that vanished has 0 dB."""
    signal, noise = (split_blocks(part.double().square(), block_size, 1).sum(-1) for part in (x, decoded - x))
    return 10 * torch.log10((signal / noise)[signal > 0].median())


def of_scales(quantized: Quantized, x: Tensor) -> dict[str, Tensor]:
    """Return the largest block scale, and the fractions of E4M3 scales that are subnormal or 0, of blocks not all 0."""
    scales = quantized.scale_values[(split_blocks(x, quantized.block_size, 1) != 0).any(-1)]
    least = 2.0 ** FORMATS["E4M3"].emin if quantized.scales.dtype == torch.float8_e4m3fn else 0.0
    return {
        "largest_scale": scales.max(),
        "subnormal_scales": (scales < least).double().mean(),
        "zero_scales": (scales == 0).double().mean(),
    }

"""A weight that was gathered as codes and scales is one GEMM's operand, to the bit, and nothing else."""

from __future__ import annotations

import pytest
import torch
from each import each

from mxstudy import kernels
from mxstudy.config.casts import BlockCast, Cast, Gemms
from mxstudy.kernels.native import mx_tensor
from mxstudy.numerics.cast import quantize_as
from mxstudy.numerics.gathered_weight import Coding, GatheredWeight
from mxstudy.numerics.gemms import Linear, mx_linear
from mxstudy.numerics.quantized import Quantized
from mxstudy.reader import ConfigError

RANKS = 2
BF16, FP32 = torch.bfloat16, torch.float32
CASTS = [
    *(Cast(format=name) for name in ("E4M3", "E5M2", "E3M2", "E2M3", "E2M1")),
    Cast(format="E5M2", block_size=16, scale_rule="floor", rounding="away"),
    Cast(format="E2M1", block_size=16, scale_rule="even", pre_round=True),
]


def weight(rows: int = 64, columns: int = 96) -> torch.Tensor:
    """Return weights over many binades, with a NaN, an infinity, a zero block and a -0."""
    generator = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(rows, columns, generator=generator)
    x *= 2.0 ** torch.randint(-20, 20, x.shape, generator=generator)
    x[1, 2], x[-1, -1], x[2, 0] = torch.nan, -torch.inf, -0.0
    x[32:, 32:64] = 0
    return x


def gathered(x: torch.Tensor, cast: Cast, axis: int, dtype: torch.dtype = FP32) -> GatheredWeight:
    """Return what ranks gather when each has cast its own rows."""
    coding = Coding(x.shape, cast.filled(BlockCast()), axis)
    codes, scales = (torch.cat(parts) for parts in zip(*map(coding.encode, x.chunk(RANKS)), strict=True))
    return GatheredWeight.of(coding, codes, scales, dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare the bits, with all NaNs equal."""
    word = {FP32: torch.int32, BF16: torch.int16}[a.dtype]
    bits = [x.masked_fill(x.isnan(), 0).contiguous().view(word) for x in (a, b)]
    return a.dtype == b.dtype and torch.equal(*bits) and torch.equal(a.isnan(), b.isnan())


@each("axis", (-1, -2))
@each("dtype", (FP32, BF16))
@each("cast", CASTS)
def test_equals_gathering_first_and_casting_after(cast: Cast, dtype: torch.dtype, axis: int) -> None:
    x = weight()
    want = quantize_as(x, cast.filled(BlockCast()), axis)
    of_ranks = gathered(x, cast, axis)
    assert same_bits(of_ranks.decoded(axis, dtype), want.dequantize(dtype))
    assert torch.equal(of_ranks.scales, want.scales)
    assert torch.equal(of_ranks.codes, want.codes)


@each("fmt", ("E4M3", "E5M2"))
@each("dtype", (FP32, BF16))
def test_every_code_with_every_scale(fmt: str, dtype: torch.dtype) -> None:
    """The product of two bf16 numbers is the FP32 product, rounded once."""
    codes = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous()
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8).contiguous()
    coding = Coding(codes.shape, Cast(format=fmt).filled(BlockCast()), -1)
    want = Quantized.from_codes(codes, scales, fmt, -1, 32).dequantize(dtype)
    assert same_bits(GatheredWeight.of(coding, codes, scales, dtype).decoded(-1, dtype), want)


@each(("cast", "bits"), [(Cast(format="E4M3"), 8), (Cast(format="E2M1"), 4)])
def test_both_directions_send_as_many_bytes(cast: Cast, bits: int) -> None:
    x = weight()
    for axis in (-1, -2):
        coding = Coding(x.shape, cast.filled(BlockCast()), axis)
        sent = [part.numel() for part in coding.encode(x)]
        assert sent == [x.numel() * bits // 8, x.numel() // 32]


@pytest.mark.parametrize("native", [False, True])
def test_gradients_are_those_of_the_weight(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forward the weight is the operand gathered for it, and in the backward another one."""
    monkeypatch.setattr(kernels.native, "KERNELS", "EMULATED")
    e4m3, e5m2 = Cast(format="E4M3"), Cast(format="E4M3" if native else "E5M2")
    gemms = Gemms(forward_w=e4m3, forward_x=e4m3, dgrad_w=e5m2, dgrad_dh=e5m2, wgrad_x=e4m3, wgrad_dh=e4m3)
    linear = Linear(gemms.filled(BlockCast()), None, mx_tensor if native else None)
    generator = torch.Generator().manual_seed(0)
    x, w, dh = (torch.randn(64, size, generator=generator) for size in (96, 96, 64))
    plain, backward = torch.nn.Parameter(w), gathered(w, e5m2, -2)
    whole = torch.nn.Parameter(gathered(w, e4m3, -1))
    found = []
    for parameter in (plain, whole):
        inputs = x.clone().requires_grad_()
        h = mx_linear(inputs, parameter, linear)
        if parameter is whole:
            parameter.filled(*vars(backward).values())
        h.backward(dh)
        found.append((h.detach(), inputs.grad, parameter.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert type(whole.grad) is torch.Tensor


def test_it_is_not_read_as_anything_else() -> None:
    of_ranks = gathered(weight(), CASTS[0], -1)
    with pytest.raises(ConfigError, match="contracts axis -2, and axis -1 was gathered"):
        of_ranks.decoded(-2, BF16)
    with pytest.raises(NotImplementedError, match="nothing but an operand"):
        of_ranks + 1
    assert "GatheredWeight([64, 96], axis -1, E4M3)" in repr(of_ranks)

"""NVFP4 has E2M1 elements in blocks of 16, E4M3 scales, and a float32 scale for the tensor or for each row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from bits import assert_same_bits, every_rounding, read_codes
from blocks import any_exponent, from_bits, gaussian, huge, one_binade_per_block, subnormal, ties
from each import each
from reference import ELEMENTS, to_dtype
from reference_float_scales import nvfp4_array, nvfp4_dequantize_array

from mxstudy.numerics import fake_quantize, quantize
from mxstudy.numerics.cast import BlockCast, block_cast
from mxstudy.numerics.quantized import Quantized
from mxstudy.reader import ConfigError

Scales = float | np.ndarray | None


def assert_nvfp4(
    x: np.ndarray | torch.Tensor, tensor_scale: Scales = None, axis: int = -1, rounding: str = "even"
) -> Quantized:
    """Check values, scales, tensor scale, codes and decoding, also to x's dtype, against the reference.

    Return the quantised x.
    """
    x = torch.as_tensor(x)
    given = None if tensor_scale is None else torch.as_tensor(tensor_scale, dtype=torch.float32)
    values, scales, scale = nvfp4_array(x.float().numpy(), tensor_scale, axis, rounding)
    got = quantize(x, "NVFP4", axis=axis, rounding=rounding, tensor_scale=given)
    assert (got.values.dtype, got.scales.dtype, got.codes.dtype) == (torch.float32, torch.float8_e4m3fn, torch.uint8)
    assert (got.block_size, got.axis, got.format.name) == (16, axis % x.ndim, "NVFP4")
    assert got.tensor_scale.dtype == torch.float32
    assert_same_bits(got.tensor_scale, scale)
    assert_same_bits(got.scales.float(), scales)
    assert_same_bits(got.values, values)
    finite = ~np.isnan(values)
    assert_same_bits(torch.tensor(read_codes(got)[finite], dtype=torch.float32), values[finite])
    assert_same_bits(got.dequantize(), nvfp4_dequantize_array(values, scales, scale, axis))
    decoded = fake_quantize(x, "NVFP4", axis=axis, rounding=rounding, tensor_scale=given)
    assert decoded.dtype == x.dtype
    name = str(x.dtype).removeprefix("torch.")
    assert_same_bits(decoded, nvfp4_dequantize_array(values, scales, scale, axis, name))
    return got


KINDS: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "any_exponent": any_exponent,
    "one_binade_per_block": one_binade_per_block,
    "gaussian": gaussian,
    "subnormal": subnormal,
    "huge": huge,
    "ties": lambda rng, shape: ties(rng, shape, ELEMENTS["E2M1"]),
    "spread": lambda rng, shape: (rng.standard_normal(shape) * 2.0 ** rng.uniform(-9, 9, (shape[0], 1))).astype("f4"),
}
every_kind = each("kind", KINDS)


def draw(kind: str, shape: tuple[int, int] = (320, 64), seed: int = 40) -> np.ndarray:
    return KINDS[kind](np.random.default_rng(seed), shape)


# ----------------------------------------------------------------------------------------------- against the reference


@every_kind
@every_rounding
def test_against_the_reference(kind: str, rounding: str) -> None:
    for axis in (0, -1):
        assert_nvfp4(draw(kind), axis=axis, rounding=rounding)


@each("dtype", [torch.bfloat16, torch.float16])
@every_kind
def test_half_precision_input(kind: str, dtype: torch.dtype) -> None:
    assert_nvfp4(torch.tensor(draw(kind)).to(dtype))


@each(("shape", "axis"), [((16,), 0), ((48, 5), 0), ((3, 32, 5), 1), ((3, 32, 5), -2), ((2, 3, 64), 2)])
def test_axes(shape: tuple[int, ...], axis: int) -> None:
    x = gaussian(np.random.default_rng(41), (int(np.prod(shape)), 1)).reshape(shape)
    got = assert_nvfp4(x, axis=axis)
    want = list(shape)
    want[axis] //= 16
    assert got.scales.shape == tuple(want)


@pytest.mark.slow
@every_rounding
def test_every_pair_of_bf16_mantissas(rounding: str) -> None:
    """128 mantissas of a block's maximum meet 128 of its values.

    Blocks lie 0, 8 and 20 binades below one of 32 tensor maxima.
    """
    mantissas = 1 + np.arange(128) / 128
    gaps = 2.0 ** -(np.arange(15) % 7) * (-1.0) ** np.arange(15)
    blocks = np.empty((128, 128, 16), np.float32)
    blocks[..., 0] = mantissas[:, None]
    blocks[..., 1:] = mantissas[:, None] * gaps
    for binade in (-20, -8, 0):
        for maximum in mantissas[::4]:
            x = np.concatenate([blocks.reshape(128, -1) * 2.0**binade, np.full((128, 16), maximum)], 1, dtype="f4")
            want = nvfp4_dequantize_array(*nvfp4_array(x, rounding=rounding))
            assert_same_bits(fake_quantize(torch.tensor(x), "NVFP4", rounding=rounding), want)


def test_every_scale_is_reached() -> None:
    """Each E4M3 number from 2^-6 up is some block's scale, and each midpoint goes to the even one."""
    top = 6.0 * 448
    grid = np.array([2.0**e * (1 + m / 8) for e in range(-6, 9) for m in range(8)])[:-1]
    points = from_bits(
        np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]).astype(np.float32).view(np.int32)[:, None] + np.arange(-1, 2)
    )
    maxima = np.concatenate([[448.0], points[points <= 448]]).astype(np.float32) * np.float32(6)
    x = np.zeros((len(maxima), 16), np.float32)
    x[:, 3] = -maxima
    assert x.min() == -top
    got = assert_nvfp4(x)
    assert got.tensor_scale == 1
    assert {*got.scales.float().flatten().tolist()} == {*grid}


# --------------------------------------------------------------------------------------------------------------- bounds


@every_kind
def test_bounds(kind: str) -> None:
    """Block scales are 2^-6 to 448. The largest block has 448, unless the tensor's scale is its least."""
    x = torch.tensor(draw(kind))
    got = quantize(x, "NVFP4")
    scales = got.scales.float()
    assert got.values.abs().max() <= 6
    assert scales.min() >= 2.0**-6
    assert got.tensor_scale >= 2.0**-120
    if got.tensor_scale > 2.0**-120:
        assert scales.max() == 448
        assert (got.dequantize() - x).abs().max() <= x.abs().max() * (1 / 6 + 2.0**-20)
    assert got.dequantize().isfinite().all()


def test_the_error_is_half_a_step() -> None:
    """An element's step is 1/2, 1 or 2 block scales.

    The scale of elements that are clamped to 6 is up to 1/16 too small.
    """
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(42))
    got = quantize(x, "NVFP4")
    scale = got.scale_values.repeat_interleave(16, -1)
    error = (got.dequantize() - x).abs() / scale
    magnitude = got.values.abs()
    half_step = torch.where(magnitude < 2, 0.25, torch.where(magnitude < 4, 0.5, 1.0))
    inside = (magnitude != 6) & (magnitude != 2) & (magnitude != 4)  # at those the step below is half the one above
    assert (error[inside] <= half_step[inside] * (1 + 1e-5)).all()
    assert error[magnitude == 6].max() <= 1
    assert error[magnitude == 6].max() > 6 / 16 * 0.9


# ------------------------------------------------------------------------------------------------- given tensor scales


@every_kind
@every_rounding
def test_a_given_tensor_scale(kind: str, rounding: str) -> None:
    """A given scale that is too large wastes block scales, and one that is too small saturates them."""
    x = draw(kind)
    fitting = float(np.abs(x).max()) / 2688
    for factor in (0.37, 1.0, 21.0):
        scale = max(fitting * factor, 2.0**-120)
        for axis in (0, 1):
            assert_nvfp4(x, np.float32(scale), axis, rounding)


@every_kind
@every_rounding
def test_a_tensor_scale_a_row(kind: str, rounding: str) -> None:
    """Each row is cast as if it were alone."""
    x = draw(kind)
    rows = np.maximum(np.abs(x).max(1, keepdims=True) / np.float32(2688), np.float32(2.0**-120))
    together = assert_nvfp4(x, rows, 1, rounding)
    for i in range(0, len(x), 16):
        alone = quantize(torch.tensor(x[i]), "NVFP4", rounding=rounding)
        assert alone.tensor_scale == rows[i, 0]
        assert_same_bits(together.values[i], alone.values)
        assert_same_bits(together.scales[i].float(), alone.scales.float())
        assert_same_bits(together.dequantize()[i], alone.dequantize())
    assert_nvfp4(x.T.copy(), rows.T, 0, rounding)
    assert_nvfp4(x.T.copy(), rows[:, 0], 0, rounding)


def test_a_number_is_a_tensor_scale() -> None:
    x = torch.tensor(draw("gaussian"))
    got, want = (quantize(x, "NVFP4", tensor_scale=scale) for scale in (0.25, torch.tensor(0.25)))
    assert_same_bits(got.tensor_scale, want.tensor_scale)
    assert_same_bits(got.dequantize(), want.dequantize())


def test_without_tensor_scale_is_what_a_gemm_multiplies() -> None:
    got = quantize(torch.tensor(draw("spread")), "NVFP4")
    inner = got.without_tensor_scale()
    assert inner.tensor_scale == 1
    scales = got.scales.float().repeat_interleave(16, -1)
    assert_same_bits(inner.dequantize(), got.values * scales)
    assert_same_bits(inner.dequantize(torch.bfloat16).float(), got.values * scales)  # 2 and 4 bits: exact in bf16


@pytest.mark.parametrize("axis", [0, 1])
def test_from_codes(axis: int) -> None:
    got = quantize(torch.tensor(draw("spread")), "NVFP4", axis=axis)
    for codes in (got.codes, got.codes.view(torch.float4_e2m1fn_x2)):
        for scales in (got.scales, got.scales.view(torch.uint8)):
            again = Quantized.from_codes(codes, scales, "NVFP4", axis, 16, got.tensor_scale)
            assert again.scales.dtype == torch.float8_e4m3fn
            assert_same_bits(again.values, got.values)
            assert_same_bits(again.dequantize(), got.dequantize())
    with pytest.raises(ConfigError, match="tensor_scale: NVFP4 has one beside its block scales"):
        Quantized.from_codes(got.codes, got.scales, "NVFP4", axis, 16)


def test_no_numbers() -> None:
    assert quantize(torch.empty(0, 32), "NVFP4").dequantize().shape == (0, 32)
    assert quantize(torch.empty(4, 0), "NVFP4").dequantize().shape == (4, 0)


# ------------------------------------------------------------------------------------------------------------- the ends


@pytest.mark.parametrize("shape", [(16,), (4, 32)])
def test_zeros(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape).index_fill(-1, torch.arange(0, 16, 2), -0.0)
    got = assert_nvfp4(x)
    assert_same_bits(got.values, x)
    assert_same_bits(got.dequantize(), x)
    assert got.tensor_scale == 2.0**-120
    assert (got.scales.float() == 2.0**-6).all()
    rows = quantize(x, "NVFP4", tensor_scale=torch.full((*shape[:-1], 1), 2.0**-120))
    assert_same_bits(rows.dequantize(), x)


def test_zero_blocks_beside_tiny_ones() -> None:
    """Below a tensor scale of 2^-121 one over both scales would overflow, and zero times infinity is NaN."""
    for binade in range(-149, -90):
        x = torch.zeros(2, 32)
        x[0, :16] = torch.linspace(-1, 1, 16) * 2.0**binade
        got = assert_nvfp4(x)
        assert (got.dequantize()[1] == 0).all()
        assert got.dequantize().isfinite().all()


@each("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite(bad: float) -> None:
    """What is not finite is in the tensor's scale, so in every block. Under a given scale it stays in its own."""
    x = torch.tensor(draw("gaussian"))
    x[3, 20] = bad
    with np.errstate(invalid="ignore"):
        spoilt = assert_nvfp4(x)
        kept = assert_nvfp4(x, np.float32(0.5))
    assert spoilt.tensor_scale.isnan()
    assert spoilt.scales.float().isnan().all()
    assert spoilt.dequantize().isnan().all()
    assert kept.dequantize()[3, 16:32].isnan().all()
    assert kept.dequantize().isnan().sum() == 16


def test_operand_pre_round() -> None:
    x = draw("gaussian") * (1 + 2.0**-9)
    cast = BlockCast(16, operand_pre_round=True)
    got = block_cast(torch.tensor(x), "NVFP4", 1, cast)
    want = nvfp4_array(to_dtype(x.astype(np.float64), "bfloat16", "away"))
    assert_same_bits(got.values, want[0])
    assert_same_bits(got.tensor_scale, want[2])
    assert got.tensor_scale != quantize(torch.tensor(x), "NVFP4").tensor_scale


# ------------------------------------------------------------------------------------------------------------- refusals


@each("call", [quantize, fake_quantize])
@each(
    ("arguments", "message"),
    [
        ({"block_size": 32}, "block_size: NVFP4 has blocks of 16, not 32"),
        ({"scale_rule": "floor"}, "scale_rule: floor is for E8M0 scales"),
        ({"rounding": "nearest"}, "rounding: 'nearest' is not a choice"),
        ({"fmt": "E2M1", "tensor_scale": 1.0}, "tensor_scale: E2M1 has none, only NVFP4"),
        *(({"tensor_scale": scale}, f"tensor_scale: {scale}; give a number") for scale in (0.0, -1.0, np.nan, 1e-60)),
        ({"x": torch.ones(4, 32, dtype=torch.float64)}, "dtype: torch.float64 cannot be quantised"),
        ({"x": torch.ones(4, 24)}, r"block_size: 16 does not divide axis 1 of shape \[4, 24\]"),
        ({"axis": 0}, r"block_size: 16 does not divide axis 0 of shape \[4, 32\]"),
    ],
)
def test_bad_input(call: Callable[..., object], arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(**({"x": torch.ones(4, 32), "fmt": "NVFP4"} | arguments))


# ------------------------------------------------------------------------------------------------------------- compiled


@pytest.mark.slow
def test_compiled_equals_eager() -> None:
    x = torch.tensor(np.concatenate([draw(kind, (64, 64)) for kind in KINDS]))
    rows = (x.abs().amax(1, keepdim=True) / 2688).clamp_min(2.0**-120)

    def casts(x: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
        found = [
            quantize(x, "NVFP4", axis=axis, rounding=rounding, tensor_scale=scale)
            for axis, rounding, scale in ((0, "even", None), (1, "away", None), (1, "even", rows))
        ]
        return [
            t for q in found for t in (q.values, q.scales.view(torch.uint8), q.codes, q.tensor_scale, q.dequantize())
        ]

    compiled = torch.compile(casts, fullgraph=True)
    spoilt = torch.where(torch.arange(len(x))[:, None] == 5, torch.nan, x)
    for sample in (x, x * 0, torch.tensor(draw("gaussian", x.shape)) * 2.0**-115, spoilt):
        for got, want in zip(compiled(sample, rows), casts(sample, rows), strict=True):
            assert_same_bits(got, want)

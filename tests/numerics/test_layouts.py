"""Casts along rows and columns, scales by Transformer Engine's steps, and the 128x4-tile layout are right."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from each import each

from mxstudy.numerics import FORMATS, quantize
from mxstudy.numerics.layouts import columnwise, rowwise, swizzle_scales, unswizzle_scales
from mxstudy.numerics.quantized import Quantized
from mxstudy.numerics.scales import scale_codes
from mxstudy.reader import ConfigError

ONE_BYTE = (torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn)
SHAPES = [(128, 4), (256, 4), (128, 8), (384, 12), (1, 1), (127, 3), (129, 5), (32, 1), (130, 4), (128, 7), (300, 33)]
layouts = each("layout", [rowwise, columnwise])
shapes = each("shape", SHAPES, ids=str)
Layout = Callable[..., Quantized]


def some_scales(rows: int, blocks: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Return scales that are not zero, so that padding differs from them."""
    generator = torch.Generator().manual_seed(rows * 1000 + blocks)
    return torch.randint(1, 256, (rows, blocks), generator=generator, dtype=torch.uint8).view(dtype)


# ------------------------------------------------------------------------------------------ row-wise and column-wise


@layouts
@each("shape", [(64, 96), (2, 32, 64), (4, 2, 8, 32)])
@each("fmt", ["E4M3", "E5M2", "E2M1"])
def test_the_matrix_is_cut_along_one_axis(layout: Layout, shape: tuple[int, ...], fmt: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = layout(x, fmt)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    along_rows = layout is rowwise
    want = quantize(x.reshape(rows, columns), fmt, axis=1 if along_rows else 0)
    assert got.scales.shape == ((rows, columns // 32) if along_rows else (rows // 32, columns))
    assert (got.axis, got.block_size, got.format.name) == (1 if along_rows else 0, 32, fmt)
    assert torch.equal(got.codes, want.codes)
    assert torch.equal(got.scales, want.scales)


def test_one_is_that_of_the_transpose() -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 97)
    by_columns, of_transpose = columnwise(x), rowwise(x.T)
    assert torch.equal(by_columns.scales, of_transpose.scales.T)
    assert torch.equal(by_columns.codes, of_transpose.codes.T)


def test_neither_follows_from_the_other() -> None:
    """Beside a million in its row, a 1 becomes 0. In its column it has neighbours of its own size."""
    x = torch.ones(32, 32)
    x[0, 0] = 1e6
    assert rowwise(x).dequantize()[0, 1] == 0
    assert columnwise(x).dequantize()[0, 1] == 1
    assert columnwise(rowwise(x).dequantize()).dequantize()[0, 1] == 0


@layouts
def test_the_options_are_those_of_the_cast(layout: Layout) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    got = layout(x, "E5M2", block_size=16, scale_rule="floor", rounding="away")
    want = quantize(x, "E5M2", 16, 1 if layout is rowwise else 0, "floor", "away")
    assert torch.equal(got.codes, want.codes)
    assert torch.equal(got.scales, want.scales)
    assert layout(x, "NVFP4").block_size == 16


@layouts
@each(
    ("shape", "message"),
    [
        ((64,), r"shape \[64\] has 1 dimension"),
        ((32, 48), r"the last dimension of shape \[32, 48\] is not divisible by 32"),
        ((3, 16, 32), r"all dimensions but the last of shape \[3, 16, 32\], 48, is not divisible by 32"),
    ],
)
def test_shapes_that_are_refused(layout: Layout, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout(torch.zeros(shape))


@layouts
def test_only_high_precision_is_quantised(layout: Layout) -> None:
    x = torch.zeros(32, 32)
    with pytest.raises(ConfigError, match="quantised already"):
        layout(rowwise(x))
    with pytest.raises(ConfigError, match="float8_e4m3fn cannot be quantised"):
        layout(x.to(torch.float8_e4m3fn))
    with pytest.raises(ConfigError, match="did you mean 'E4M3'"):
        layout(x, "E4M4")


# ------------------------------------------------------- e = float_to_e8m0(amax / max): the exponent, rounded up if ...


def exact_code(absmax: float, maximum: float) -> int:
    """Return the exponent of absmax / max, plus one if its mantissa is not zero, plus 127, clamped to E8M0's range."""
    quotient = Fraction(absmax) / Fraction(maximum)
    if quotient == 0:
        return 0
    exponent = quotient.numerator.bit_length() - quotient.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > quotient
    return min(max(exponent + (quotient != Fraction(2) ** exponent) + 127, 0), 254)


def code_by_division(absmax: torch.Tensor, maximum: float) -> torch.Tensor:
    """Return the same with an FP32 quotient: its exponent field, plus one if the mantissa field is not zero."""
    bits = (absmax / maximum).view(torch.int32)
    return (bits >> 23) + (bits & 0x7FFFFF > 0)


def e8m0_codes(absmax: torch.Tensor, fmt: str) -> torch.Tensor:
    return scale_codes(absmax.view(torch.int32), FORMATS[fmt], "rceil")


@pytest.mark.integration
@pytest.mark.parametrize("fmt", ["E4M3", "E5M2"])
def test_the_exponent_of_every_bf16_amax(fmt: str) -> None:
    """`quantize` gets all 128 mantissas of all 255 finite exponents, subnormals and zero among them."""
    absmax = (torch.arange(255 * 128, dtype=torch.int32) << 16).view(torch.float32)
    got = quantize(absmax[:, None], fmt, block_size=1).scales.flatten().tolist()
    assert got == [exact_code(a, FORMATS[fmt].max) for a in absmax.tolist()]


@pytest.mark.parametrize("fmt", ["E4M3", "E5M2"])
def test_the_exponent_one_unit_in_the_last_place_around_every_threshold(fmt: str) -> None:
    """The numbers are FP32 mantissas of max * 2^k and their neighbours, at every exponent."""
    threshold = int(math.frexp(FORMATS[fmt].max)[0] * 2**24) - 2**23
    mantissa = torch.tensor([threshold - 1, threshold, threshold + 1, 1, 2**23 - 1], dtype=torch.int32)
    absmax = (torch.arange(255, dtype=torch.int32)[:, None] << 23 | mantissa).view(torch.float32).flatten()
    assert e8m0_codes(absmax, fmt).tolist() == [exact_code(a, FORMATS[fmt].max) for a in absmax.tolist()]


@pytest.mark.integration
@each("exponent", [24, 127, 254])
def test_a_division_in_fp32_gives_the_same_for_every_mantissa(exponent: int) -> None:
    absmax = torch.arange(exponent << 23, exponent + 1 << 23, dtype=torch.int32).view(torch.float32)
    assert torch.equal(code_by_division(absmax, 448.0), e8m0_codes(absmax, "E4M3"))


@pytest.mark.integration
def test_a_division_in_fp32_differs_only_where_its_quotient_is_subnormal() -> None:
    """The biased exponent is 8, around 448 * 2^-127, as the docstring of `layouts` says."""
    absmax, limit = torch.arange(8 << 23, 9 << 23, dtype=torch.int32).view(torch.float32), 448 * 2.0**-127
    below, above = absmax[absmax <= limit], absmax[absmax > limit]
    assert e8m0_codes(below, "E4M3").unique().tolist() == [0]
    assert code_by_division(below, 448.0).unique().tolist() == [1]
    assert e8m0_codes(above, "E4M3").unique().tolist() == code_by_division(above, 448.0).unique().tolist() == [1]
    assert above[above / 448 <= 2.0**-127].tolist() == [limit + 2.0**-142]  # its code is 0 where `below` has 0


# ------------------------------------------------------------------------------------------------- 128x4-tile layout


def naive_swizzle(scales: torch.Tensor) -> list[int]:
    """Return the scales tile after tile of 128x4, the 128 four-byte rows of a tile in the documented order.

    Missing scales are 0.
    """
    order = [row for k in range(32) for row in (k, 32 + k, 64 + k, 96 + k)]
    rows, blocks = scales.shape
    listed = scales.tolist()
    return [
        listed[top + row][left + byte] if top + row < rows and left + byte < blocks else 0
        for top in range(0, rows, 128)
        for left in range(0, blocks, 4)
        for row in order
        for byte in range(4)
    ]


@shapes
def test_swizzled_as_documented(shape: tuple[int, int]) -> None:
    scales = some_scales(*shape)
    swizzled = swizzle_scales(scales)
    assert swizzled.tolist() == naive_swizzle(scales)
    assert (swizzled != 0).sum() == scales.numel()


def test_the_first_rows_of_a_tile() -> None:
    """Every scale is its row's number."""
    swizzled = swizzle_scales(torch.arange(128, dtype=torch.uint8)[:, None].expand(128, 4))
    assert swizzled.view(128, 4)[:8, 0].tolist() == [0, 32, 64, 96, 1, 33, 65, 97]
    assert swizzled.view(128, 4)[-4:, 0].tolist() == [31, 63, 95, 127]


@shapes
@each("dtype", ONE_BYTE)
def test_swizzled_as_by_torchao(shape: tuple[int, int], dtype: torch.dtype) -> None:
    to_blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    scales = some_scales(*shape, dtype)
    got, want = swizzle_scales(scales), to_blocked(scales)
    assert got.dtype == dtype
    assert got.shape == want.shape
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@shapes
@each("dtype", ONE_BYTE)
def test_swizzled_and_back(shape: tuple[int, int], dtype: torch.dtype) -> None:
    scales = some_scales(*shape, dtype)
    back = unswizzle_scales(swizzle_scales(scales), *shape)
    assert back.dtype == dtype
    assert back.is_contiguous()
    assert torch.equal(back.view(torch.uint8), scales.view(torch.uint8))


def test_column_wise_scales_are_swizzled_in_tiles_of_4x128() -> None:
    """Tiles of 4x128 go down a column of tiles, then the next. In a tile the 128 columns have the documented order."""
    x = torch.randn(32 * 6, 32 * 9, generator=torch.Generator().manual_seed(0)).cumsum(0).cumsum(1)
    scales = columnwise(x).scales
    rows, columns = scales.shape
    swizzled = swizzle_scales(scales.T).view(3, 2, 32, 4, 4)  # [tiles of columns, of rows, k, stripe, row in the tile]
    for row, column in [(0, 0), (3, 1), (1, 32), (4, 127), (5, 128), (2, 287)]:
        place = (column // 128, row // 4, column % 32, column % 128 // 32, row % 4)
        assert swizzled[place] == scales[row, column]
    assert swizzled.flatten().tolist() == naive_swizzle(scales.T)
    assert torch.equal(unswizzle_scales(swizzled.flatten(), columns, rows).T, scales)


def test_scales_that_are_refused() -> None:
    with pytest.raises(ConfigError, match="float32 is not one of uint8, float8_e8m0fnu, float8_e4m3fn"):
        swizzle_scales(torch.zeros(128, 4))
    with pytest.raises(ConfigError, match=r"shape \[512\] needs 2 dimension"):
        swizzle_scales(torch.zeros(512, dtype=torch.uint8))
    with pytest.raises(ConfigError, match=r"shape \[32, 16\] needs 1 dimension"):
        unswizzle_scales(torch.zeros(32, 16, dtype=torch.uint8), 128, 4)
    with pytest.raises(ConfigError, match=r"512 given; the tiles of \[129, 4\] have 1024"):
        unswizzle_scales(torch.zeros(512, dtype=torch.uint8), 129, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ONE_BYTE)
@layouts
def test_the_same_bits_on_the_gpu(layout: Layout, dtype: torch.dtype) -> None:
    x = torch.randn(5, 64, 160, generator=torch.Generator().manual_seed(0))
    here, there = layout(x), layout(x.cuda())
    assert torch.equal(there.codes.cpu(), here.codes)
    scales = there.scales.view(dtype)
    swizzled = swizzle_scales(scales)
    assert torch.equal(swizzled.view(torch.uint8).cpu(), swizzle_scales(here.scales))
    back = unswizzle_scales(swizzled, *scales.shape)
    assert torch.equal(back.view(torch.uint8).cpu(), here.scales)

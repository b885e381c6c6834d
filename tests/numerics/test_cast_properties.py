"""Block casts have the right axes, layouts, algebra and refusals, and compile."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from bits import assert_cast, assert_same_bits, every_format, every_rounding, every_rule
from blocks import every_kind, gaussian, one_binade_per_block
from each import each
from reference import ELEMENTS, ROUNDINGS, SCALE_RULES

from mxstudy.numerics import FORMATS, fake_quantize, quantize
from mxstudy.numerics.layouts import columnwise, rowwise
from mxstudy.reader import ConfigError

# ------------------------------------------------------------------------------------------------------ axes, layouts


AXES = [
    ((64, 96), (0, 1, -1, -2)),
    ((32,), (0,)),
    ((32, 3, 5), (0, -3)),
    ((3, 64, 5), (1, -2)),
    ((3, 5, 96), (2, -1)),
    ((2, 3, 5, 32), (3,)),
]


@every_format
@each(("shape", "axis"), [(shape, axis) for shape, axes in AXES for axis in axes])
def test_axis(fmt: str, shape: tuple[int, ...], axis: int) -> None:
    x = torch.tensor(gaussian(np.random.default_rng(5), (math.prod(shape), 1)).reshape(shape))
    assert_cast(x, fmt, axis=axis)
    scales = list(shape)
    scales[axis] //= 32
    assert quantize(x, fmt, axis=axis).scales.shape == tuple(scales)


@pytest.mark.integration
@every_format
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_non_contiguous(fmt: str, axis: int) -> None:
    base = torch.tensor(one_binade_per_block(np.random.default_rng(6), (64 * 64, 64)).reshape(64, 64, 64))
    views = [
        base.permute(2, 0, 1)[::2],
        base.transpose(0, 2),
        base[:, ::2, ::2],
        base[:32, :32, :1].expand(32, 32, 64),
    ]
    for view in [*views, base[0, 0, 0].expand(32, 32, 32), base[:1].expand(32, 64, 64)]:
        before = view.clone()
        assert_cast(view, fmt, axis=axis)
        assert_same_bits(fake_quantize(view, fmt, axis=axis), fake_quantize(view.contiguous(), fmt, axis=axis))
        assert_same_bits(view, before)


# ---------------------------------------------------------------------------------------------------------- algebra


@every_format
@every_rule
@every_rounding
@each("shift", [-40, -1, 1, 7, 60])
def test_a_power_of_two_moves_only_the_scale(fmt: str, rule: str, rounding: str, shift: int) -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(7))
    one, other = (quantize(t, fmt, scale_rule=rule, rounding=rounding) for t in (x, x * 2.0**shift))
    assert_same_bits(other.values, one.values)
    assert_same_bits(other.codes, one.codes)
    assert torch.equal(other.scales.int(), one.scales.int() + shift)


@every_format
@every_rule
@every_rounding
def test_odd_and_monotone_within_a_block(fmt: str, rule: str, rounding: str) -> None:
    x = torch.tensor(one_binade_per_block(np.random.default_rng(8), (512, 32))).sort(-1).values
    got = quantize(x, fmt, scale_rule=rule, rounding=rounding)
    assert (got.values.diff(dim=-1) >= 0).all()
    assert_same_bits(quantize(-x, fmt, scale_rule=rule, rounding=rounding).values, -got.values)


@every_format
@every_rule
@every_rounding
def test_a_second_cast_changes_nothing(fmt: str, rule: str, rounding: str) -> None:
    x = torch.tensor(gaussian(np.random.default_rng(9), (512, 32)))
    once = fake_quantize(x, fmt, scale_rule=rule, rounding=rounding)
    assert not torch.equal(once, x)
    assert_same_bits(fake_quantize(once, fmt, scale_rule=rule, rounding=rounding), once)


@every_format
@every_rule
def test_error_is_within_half_a_step(fmt: str, rule: str) -> None:
    """Normal elements that do not saturate are off by at most half a step.

    The relative error is largest half a step above a power of two.
    """
    x = torch.tensor(gaussian(np.random.default_rng(10), (512, 32)))
    got = quantize(x, fmt, scale_rule=rule)
    normal = (got.values.abs() > 2.0 ** ELEMENTS[fmt].emin) & (got.values.abs() < FORMATS[fmt].max)
    if (fmt, rule) == ("E1M2", "ceil"):  # it does not reach its one binade of normal numbers
        return
    error = ((got.dequantize() - x).abs() / x.abs())[normal]
    half_step = 2.0 ** -(FORMATS[fmt].mantissa_bits + 1)
    assert 0.99 < error.max() / (half_step / (1 + half_step)) < 1 + 1e-6


# ---------------------------------------------------------------------------------------------------------- refusals


@each("call", [quantize, fake_quantize])
@each("dtype", [torch.float64, torch.int32, torch.int8, torch.uint8, torch.bool])
def test_other_dtypes_are_refused(call: object, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=str(dtype).removeprefix("torch.")):
        call(torch.ones(32, dtype=dtype), "E4M3")


@each("call", [quantize, fake_quantize])
@each(
    ("arguments", "nearest"),
    [
        ({"fmt": "E4M4"}, "E4M3"),
        ({"fmt": "e5m2"}, "E5M2"),
        ({"fmt": "NVFP8"}, "NVFP4"),
        ({"scale_rule": "rceiling"}, "rceil"),
        ({"scale_rule": "flor"}, "floor"),
        ({"rounding": "evn"}, "even"),
        ({"rounding": "awya"}, "away"),
        ({"rounding": "stocastic"}, "stochastic"),
    ],
)
def test_unknown_names_are_refused(call: object, arguments: dict[str, str], nearest: str) -> None:
    with pytest.raises(ConfigError, match=nearest):
        call(torch.ones(32), **({"fmt": "E4M3"} | arguments))


@pytest.mark.parametrize("call", [quantize, fake_quantize])
def test_a_rounding_that_draws_is_refused_without_random_numbers(call: object) -> None:
    with pytest.raises(ConfigError, match="rounding: stochastic is for linears, which have a seed; take even or away"):
        call(torch.ones(32), "E4M3", rounding="stochastic")


@each("call", [quantize, fake_quantize])
@each(("shape", "axis", "block_size"), [((48,), 0, 32), ((32, 48), 1, 32), ((48, 64), 0, 32), ((32,), 0, 64)])
def test_a_size_that_does_not_divide_is_refused(
    call: object, shape: tuple[int, ...], axis: int, block_size: int
) -> None:
    with pytest.raises(ConfigError, match=str(shape[axis])):
        call(torch.ones(shape), "E4M3", axis=axis, block_size=block_size)


@each("axis", [2, -3, 5])
def test_an_axis_that_is_not_there_is_refused(axis: int) -> None:
    with pytest.raises(ConfigError, match=rf"axis: {axis} is not an axis of shape \[32, 32\]"):
        quantize(torch.ones(32, 32), "E4M3", axis=axis)


@each("call", [quantize, fake_quantize, rowwise, columnwise])
@each("block_size", [0, -32])
def test_blocks_without_numbers_are_refused(call: object, block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"block_size: {block_size} is not a block size"):
        call(torch.ones(32, 32), "E4M3", block_size=block_size)


# ---------------------------------------------------------------------------------------------------------- compiled


@pytest.mark.slow
def test_compiled_nan_blocks() -> None:
    """x86 makes NaNs whose sign bit is set, so a test on the bits of an absmax must not read the sign."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(12))
    for i, bad in enumerate((torch.nan, -torch.nan, torch.inf, -torch.inf)):
        x[16 * i, 16 * i] = bad

    def casts(x: torch.Tensor) -> list[torch.Tensor]:
        return [fake_quantize(x, "E4M3", axis=axis) for axis in (0, 1)]

    for got, want in zip(torch.compile(casts, fullgraph=True)(x), casts(x), strict=True):
        assert got.isnan().sum() == 4 * 32
        assert_same_bits(got, want)


@pytest.mark.slow
def test_compiled_equals_eager() -> None:
    """One graph has each format, scale rule, rounding and axis, several times in different company."""
    rules, roundings = list(SCALE_RULES), list(ROUNDINGS)
    arms = [
        (fmt, rules[(2 * i + j) % len(rules)], roundings[(i + j) % len(roundings)], j)
        for i, fmt in enumerate(ELEMENTS)
        for j in (0, 1)
    ]
    assert {rule for _, rule, _, _ in arms} == {*rules}
    assert {rounding for _, _, rounding, _ in arms} == {*roundings}
    blocks = {fmt: torch.tensor(every_kind(fmt, 32, per_kind=32, seed=11)) for fmt in ELEMENTS}

    def casts(blocks: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        found = [quantize(blocks[fmt], fmt, axis=axis, scale_rule=s, rounding=r) for fmt, s, r, axis in arms]
        return [(q.values, q.scales, q.codes, q.dequantize()) for q in found]

    for arm, got, want in zip(arms, torch.compile(casts, fullgraph=True)(blocks), casts(blocks), strict=True):
        for one, other in zip(got, want, strict=True):
            assert one.dtype == other.dtype, arm
            assert_same_bits(one, other)


@pytest.mark.slow
def test_compiled_equals_eager_of_half_precision() -> None:
    x = torch.tensor(every_kind("E4M3", 32, per_kind=32, seed=11))
    for half in (x.bfloat16(), x.half()):
        assert_same_bits(torch.compile(fake_quantize, fullgraph=True)(half, "E4M3"), fake_quantize(half, "E4M3"))


def test_fake_quantize_has_the_straight_through_gradient() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    dy = torch.randn(4, 64)
    y = fake_quantize(x, "E4M3")
    y.backward(dy)
    assert_same_bits(y.detach(), fake_quantize(x.detach(), "E4M3"))
    assert x.grad is not None
    assert_same_bits(x.grad, dy)

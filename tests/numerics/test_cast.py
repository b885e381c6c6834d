"""The block casts, bit by bit, against the references in reference.py."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from blocks import KINDS, every_kind, from_bits, gaussian, one_binade_per_block, with_nan_or_inf
from reference import (
    ELEMENTS,
    NAN_SCALE,
    ROUNDINGS,
    SCALE_RULES,
    decode_element,
    decode_scale,
    dequantize_array,
    quantize_array,
    quantize_block,
    to_dtype,
)

from mxstudy.numerics import FORMATS, fake_quantize, quantize
from mxstudy.reader import ConfigError

FLOAT8 = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
every_format = pytest.mark.parametrize("fmt", list(FLOAT8))
every_rule = pytest.mark.parametrize("rule", SCALE_RULES)
every_rounding = pytest.mark.parametrize("rounding", ROUNDINGS)


def assert_same_bits(got: torch.Tensor, want: np.ndarray | torch.Tensor) -> None:
    """Equal, the sign of zero included; any NaN equals any other."""
    want = torch.as_tensor(np.array(want)) if isinstance(want, np.ndarray) else want
    want = want.to(got.dtype)
    assert got.shape == want.shape
    if got.is_floating_point():
        assert torch.equal(got.isnan(), want.isnan())
        got, want = (t.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf).contiguous() for t in (got, want))
        got, want = got.view(BITS[got.dtype]), want.view(BITS[want.dtype])
    differing = (got != want).nonzero()
    assert not len(differing), f"{len(differing)} of {got.numel()} differ, first at {differing[:5].tolist()}"


def assert_cast(x: torch.Tensor, fmt: str, **arguments: object) -> None:
    """`quantize` and its decoding equal the array reference; blocks with NaN or Inf in scale and decoding."""
    got = quantize(x, fmt, **arguments)
    values, scales = quantize_array(x.double().numpy(), fmt, **arguments)
    axis = arguments.get("axis", -1)
    assert got.values.dtype == torch.float32
    assert got.values.shape == x.shape
    assert got.scales.dtype == torch.uint8
    assert got.codes.dtype == torch.uint8
    assert_same_bits(got.scales, scales)
    finite = torch.as_tensor(~np.isnan(values))
    assert_same_bits(got.values[finite], values[finite.numpy()])
    assert_same_bits(got.codes.view(FLOAT8[fmt]).float()[finite], got.values[finite])
    assert_same_bits(got.dequantize(), dequantize_array(values, scales, axis))
    decoded = fake_quantize(x, fmt, **arguments)
    assert decoded.dtype == x.dtype
    assert_same_bits(decoded, dequantize_array(values, scales, axis, str(x.dtype).removeprefix("torch.")))


# --------------------------------------------------------------------------------------------- formats and encodings


@every_format
def test_format_constants(fmt: str) -> None:
    got, want = FORMATS[fmt], ELEMENTS[fmt]
    assert (got.max, got.emax, got.mantissa_bits) == (want.max, want.emax, want.mantissa_bits)


@every_format
def test_every_code_decodes_as_torch_decodes_it(fmt: str) -> None:
    want = np.array([decode_element(code, fmt) for code in range(256)])
    assert_same_bits(torch.arange(256, dtype=torch.uint8).view(FLOAT8[fmt]).float(), want)


@every_format
@every_rounding
@pytest.mark.parametrize("rule", ["floor", "rceil", "even"])  # ceil halves a block whose maximum is no power of two
def test_every_finite_code_survives_the_round_trip(fmt: str, rule: str, rounding: str) -> None:
    codes = [code for code in range(256) if math.isfinite(decode_element(code, fmt))]
    top = next(code for code in codes if decode_element(code, fmt) == FORMATS[fmt].max)
    codes += [top] * (-len(codes) % 15)
    blocks = [[top, *codes[i : i + 15]] for i in range(0, len(codes), 15)]
    want = torch.tensor(blocks, dtype=torch.uint8)
    x = torch.tensor([[decode_element(code, fmt) for code in block] for block in blocks])
    for shift in (-110, 0, 100):
        got = quantize(x * 2.0**shift, fmt, block_size=16, scale_rule=rule, rounding=rounding)
        assert_same_bits(got.codes, want)
        assert_same_bits(got.values, x)
        assert (got.scales == 127 + shift).all()
        assert_same_bits(got.dequantize(), x * 2.0**shift)


@every_format
def test_every_scale_code_decodes(fmt: str) -> None:
    quantized = quantize(torch.ones(256, 32), fmt)
    every = dataclasses.replace(
        quantized,
        values=torch.tensor([1.0, -1.75, 0.5, 0.0]).repeat(256, 8),
        scales=torch.arange(256, dtype=torch.uint8)[:, None],
    )
    exact = np.array([[decode_scale(code) * v for v in (1.0, -1.75, 0.5, 0.0)] * 8 for code in range(256)])
    assert_same_bits(every.dequantize(), to_dtype(exact, "float32"))
    assert_same_bits(every.dequantize(torch.bfloat16), to_dtype(exact, "bfloat16"))
    assert_same_bits(every.dequantize(torch.float16), to_dtype(exact, "float16"))


# ------------------------------------------------------------------------------------------- values, scales, decoding


@pytest.mark.parametrize("name", list(ELEMENTS))
@every_rule
@every_rounding
def test_the_array_reference_equals_the_scalar_one(name: str, rule: str, rounding: str) -> None:
    x = every_kind(name, 16, per_kind=7)
    values, scales = quantize_array(x.astype(np.float64), name, 16, scale_rule=rule, rounding=rounding)
    want = [quantize_block(block, ELEMENTS[name], rule, rounding) for block in x.tolist()]
    assert_same_bits(torch.tensor(values, dtype=torch.float32), np.array([v for v, _ in want]))
    assert scales[:, 0].tolist() == [code for _, code in want]


@every_format
@every_rule
@every_rounding
def test_scalar_reference(fmt: str, rule: str, rounding: str) -> None:
    x = every_kind(fmt, 32, per_kind=7, seed=1)
    got = quantize(torch.tensor(x), fmt, scale_rule=rule, rounding=rounding)
    for i, block in enumerate(x.tolist()):
        values, code = quantize_block(block, ELEMENTS[fmt], rule, rounding)
        assert got.scales[i].item() == code, f"block {i} of {list(KINDS)} and ties, {7} each: {block}"
        if code == NAN_SCALE:
            assert got.dequantize()[i].isnan().all()
        else:
            assert list(map(float.hex, got.values[i].tolist())) == list(map(float.hex, values)), (i, block)


@every_format
@every_rule
@every_rounding
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_array_reference(fmt: str, rule: str, rounding: str, block_size: int) -> None:
    x = torch.tensor(every_kind(fmt, block_size, per_kind=70, seed=2))
    assert_cast(x, fmt, block_size=block_size, scale_rule=rule, rounding=rounding)
    assert_cast(x.T.contiguous(), fmt, block_size=block_size, axis=0, scale_rule=rule, rounding=rounding)


@every_format
def test_scale_code_at_each_end(fmt: str) -> None:
    """2^k by hand: the largest float32 has k = 128 - emax where the rule rounds up, 127 - emax where it does not."""
    largest = torch.full((1, 32), torch.finfo(torch.float32).max)
    tiniest = torch.full((1, 32), 2.0**-149)
    up = {"floor": 0, "ceil": 1, "rceil": 1, "even": 1}
    for rule, one in up.items():
        assert quantize(largest, fmt, scale_rule=rule).scales.item() == 127 + 127 - FORMATS[fmt].emax + one
        assert quantize(tiniest, fmt, scale_rule=rule).scales.item() == 0
    assert quantize(largest, fmt, scale_rule="floor").dequantize()[0, 0] == 1.75 * 2.0**127
    assert quantize(largest, fmt, scale_rule="rceil").dequantize()[0, 0] == math.inf


@every_format
def test_non_finite_blocks_keep_to_themselves(fmt: str) -> None:
    rng = np.random.default_rng(3)
    x = torch.tensor(with_nan_or_inf(rng, (16, 32)))
    bad = ~x.isfinite().all(-1)
    assert bad.sum() == 5
    whole, rest = quantize(x.reshape(4, 128), fmt), quantize(x[~bad], fmt)
    decoded = whole.dequantize().reshape(16, 32)
    assert (whole.scales.reshape(16)[bad] == NAN_SCALE).all()
    assert decoded[bad].isnan().all()
    assert_same_bits(decoded[~bad], rest.dequantize())


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_rounding
def test_half_precision_input(fmt: str, dtype: torch.dtype, rounding: str) -> None:
    """Every finite bit pattern of the dtype, and blocks with the others; decoding rounds once to the dtype."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    by_size = patterns[patterns.isfinite()].sort().values
    shuffled = patterns[torch.randperm(len(patterns), generator=torch.Generator().manual_seed(0))]
    for x in (by_size[: len(by_size) // 32 * 32].reshape(-1, 32), shuffled.reshape(-1, 32)):
        for rule in SCALE_RULES:
            assert_cast(x, fmt, scale_rule=rule, rounding=rounding)


@every_format
def test_bf16_decoding_rounds_once(fmt: str) -> None:
    """The smallest scales, where a product is below bf16's grid and must be rounded half to even from the exact one."""
    rng = np.random.default_rng(4)
    exponent = rng.integers(0, 8, (512, 32))
    x = torch.tensor(from_bits(exponent << 23 | rng.integers(0, 2**23, (512, 32))))
    values, scales = quantize_array(x.double().numpy(), fmt)
    want = dequantize_array(values, scales, dtype="bfloat16")
    assert (want != dequantize_array(values, scales)).any()
    assert_same_bits(quantize(x, fmt).dequantize(torch.bfloat16), want)


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
@pytest.mark.parametrize(("shape", "axis"), [(shape, axis) for shape, axes in AXES for axis in axes])
def test_axis(fmt: str, shape: tuple[int, ...], axis: int) -> None:
    x = torch.tensor(gaussian(np.random.default_rng(5), (math.prod(shape), 1)).reshape(shape))
    assert_cast(x, fmt, axis=axis)
    scales = list(shape)
    scales[axis] //= 32
    assert quantize(x, fmt, axis=axis).scales.shape == tuple(scales)


@every_format
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_non_contiguous(fmt: str, axis: int) -> None:
    base = torch.tensor(one_binade_per_block(np.random.default_rng(6), (64 * 64, 128)).reshape(64, 64, 128))
    views = [
        base.permute(2, 0, 1)[::2],
        base.transpose(0, 2),
        base[:, ::2, ::4][:, :, :32],
        base[:32, :32].expand(32, 32, 128),
    ]
    for view in [*views, base[0, 0, 0].expand(32, 32, 32), base[:1].expand(32, 64, 128)]:
        before = view.clone()
        assert_cast(view, fmt, axis=axis)
        assert_same_bits(fake_quantize(view, fmt, axis=axis), fake_quantize(view.contiguous(), fmt, axis=axis))
        assert_same_bits(view, before)


# ---------------------------------------------------------------------------------------------------------- algebra


@every_format
@every_rule
@every_rounding
@pytest.mark.parametrize("shift", [-40, -1, 1, 7, 60])
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
    """Of normal elements that do not saturate; it is largest, relative, half a step above a power of two."""
    x = torch.tensor(gaussian(np.random.default_rng(10), (512, 32)))
    got = quantize(x, fmt, scale_rule=rule)
    normal = (got.values.abs() > 2.0 ** ELEMENTS[fmt].emin) & (got.values.abs() < FORMATS[fmt].max)
    error = ((got.dequantize() - x).abs() / x.abs())[normal]
    half_step = 2.0 ** -(FORMATS[fmt].mantissa_bits + 1)
    assert 0.99 < error.max() / (half_step / (1 + half_step)) < 1 + 1e-6


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("call", [quantize, fake_quantize])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.int8, torch.uint8, torch.bool])
def test_other_dtypes_are_refused(call: object, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=str(dtype).removeprefix("torch.")):
        call(torch.ones(32, dtype=dtype), "E4M3")


@pytest.mark.parametrize("call", [quantize, fake_quantize])
@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        ({"fmt": "E4M4"}, "E4M3"),
        ({"fmt": "e5m2"}, "E5M2"),
        ({"scale_rule": "rceiling"}, "rceil"),
        ({"scale_rule": "flor"}, "floor"),
        ({"rounding": "evn"}, "even"),
        ({"rounding": "stochastic"}, "away"),
    ],
)
def test_unknown_names_are_refused(call: object, arguments: dict[str, str], nearest: str) -> None:
    with pytest.raises(ConfigError, match=nearest):
        call(torch.ones(32), **({"fmt": "E4M3"} | arguments))


@pytest.mark.parametrize("call", [quantize, fake_quantize])
@pytest.mark.parametrize(
    ("shape", "axis", "block_size"), [((48,), 0, 32), ((32, 48), 1, 32), ((48, 64), 0, 32), ((32,), 0, 64)]
)
def test_a_size_that_does_not_divide_is_refused(
    call: object, shape: tuple[int, ...], axis: int, block_size: int
) -> None:
    with pytest.raises(ConfigError, match=str(shape[axis])):
        call(torch.ones(shape), "E4M3", axis=axis, block_size=block_size)


@pytest.mark.parametrize("axis", [2, -3, 5])
def test_an_axis_that_is_not_there_is_refused(axis: int) -> None:
    with pytest.raises((ConfigError, IndexError)):
        quantize(torch.ones(32, 32), "E4M3", axis=axis)


# ---------------------------------------------------------------------------------------------------------- compiled


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
@every_format
def test_compiled_equals_eager(fmt: str) -> None:
    """All rules and roundings in one graph, on blocks of every kind, each rule along both axes."""
    arms = [(rule, rounding, i % 2) for rule in SCALE_RULES for i, rounding in enumerate(ROUNDINGS)]

    def casts(x: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        found = [quantize(x, fmt, axis=axis, scale_rule=rule, rounding=rounding) for rule, rounding, axis in arms]
        return [(q.values, q.scales, q.codes, q.dequantize()) for q in found]

    x = torch.tensor(every_kind(fmt, 32, per_kind=32, seed=11))
    for arm, got, want in zip(arms, torch.compile(casts, fullgraph=True)(x), casts(x), strict=True):
        for one, other in zip(got, want, strict=True):
            assert one.dtype == other.dtype, arm
            assert_same_bits(one, other)
    for half in (x.bfloat16(), x.half()):
        assert_same_bits(torch.compile(fake_quantize, fullgraph=True)(half, fmt), fake_quantize(half, fmt))

"""Check a cast of the numerics against reference_casts.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import reference_casts
import torch
from bits import assert_same_bits, read_codes
from blocks import KINDS
from each import each
from reference_casts import Outcome, cast_array, outer_scale

from mxstudy.config.casts import BlockCast, Cast
from mxstudy.numerics.cast import quantize_as
from mxstudy.numerics.formats import is_random
from mxstudy.numerics.gemms import quantized_operand
from mxstudy.numerics.quantized import Quantized
from mxstudy.numerics.random_bits import Draws, stream_key

every_axis = each("axis", [-1, -2])
SETTINGS = BlockCast()
PLACE = reference_casts.Draws(3, "layers.1.mlp.up.dgrad_dh", 7, 2**32 - 5)
TENSORS = ["gaussian", "one_binade_per_block", "subnormal", "barely_normal", "zero", "near_1.5"]  # that share a scale


def cast(fmt: str = "E2M1", settings: BlockCast = SETTINGS, **values: Any) -> Cast:
    return Cast(format=fmt, **values).filled(settings)


def drawn(place: reference_casts.Draws) -> Draws:
    return Draws(torch.tensor(stream_key(place.seed, place.name)), torch.tensor([place.step, place.first_row]))


def numbers(size: int, kinds: Iterable[str] = KINDS, rows: int = 2, blocks: int = 1) -> np.ndarray:
    """Return so many rows of each kind, with blocks of `size` side by side."""
    rng = np.random.default_rng(size)
    return np.concatenate([np.concatenate([KINDS[k](rng, (rows, size)) for _ in range(blocks)], 1) for k in kinds])


def assert_outcome(got: Quantized, want: Outcome) -> None:
    scales = got.scales if got.scales.dtype == torch.uint8 else got.scales.float()
    assert_same_bits(scales, want.scales)
    assert_same_bits(got.values, want.values)
    assert_same_bits(got.dequantize(), want.decoded)
    assert (got.tensor_scale is None) == (want.outer is None)
    if want.outer is not None:
        assert_same_bits(got.tensor_scale, want.outer)
    finite = np.isfinite(want.values)
    if finite.all() and not any(n % 2 for n in want.values.shape):
        assert_same_bits(torch.tensor(read_codes(got)[finite], dtype=torch.float32), want.values[finite])


def assert_cast(x: np.ndarray, cast: Cast, axis: int = -1, outer: np.ndarray | None = None) -> Quantized:
    """Check codes, scales, mask and decoding of x against the reference, and return the quantised x.

    `outer` is the scale above, if it is not that of all of x.
    """
    x = np.ascontiguousarray(x if axis == -1 else x.T, np.float32)
    given = None if outer is None else torch.tensor(outer, dtype=torch.float32)
    draws = PLACE if is_random(cast) else None
    got = quantize_as(torch.tensor(x), replace(cast, mask_clipped=True), axis, given, draws and drawn(draws))
    want = cast_array(x, cast, axis, outer, draws)
    assert_outcome(got, want)
    assert got.inside is not None
    assert torch.equal(got.inside, torch.tensor(want.inside))
    return got


def assert_operand(x: np.ndarray, cast: Cast, axis: int = -1, bound: float | None = None) -> Quantized:
    """Check the same with the scale above that the cast's scope asks for, and return the quantised x."""
    x = np.ascontiguousarray(x if axis == -1 else x.T, np.float32)
    given = None if bound is None else torch.tensor(bound)
    draws = PLACE if is_random(cast) else None
    got = quantized_operand(torch.tensor(x), cast, axis, draws and drawn(draws), given)
    assert_outcome(got, cast_array(x, cast, axis, outer_scale(x, cast, axis, bound), draws))
    return got

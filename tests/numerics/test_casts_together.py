"""Casts with several unusual fields, and replicas of a stack, have the bits of reference_casts.py."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import reference_casts
import torch
from bits import assert_same_bits
from blocks import gaussian, with_nan_or_inf
from cast_checks import assert_operand, cast, drawn, every_axis
from each import each
from reference import ELEMENTS, SCALE_RULES
from reference_casts import cast_array, outer_scale

from mxstudy.config.casts import Cast
from mxstudy.numerics.formats import is_random
from mxstudy.numerics.gemms import quantized_operand
from mxstudy.numerics.random_bits import Draws
from mxstudy.reader import ConfigError

CHOICES: dict[str, list[Any]] = {
    "format": [*ELEMENTS],
    "block_size": [16, 32, 64],
    "two_dimensional": [False, True],
    "scale": ["E8M0", "E4M3", "FP32", "none"],
    "scale_rule": [*SCALE_RULES],
    "outer_scale": ["none", "tensor", "row", "bound"],
    "chain": ["inference", "training"],
    "largest_scale": [448.0, 256.0],
    "statistic": ["absmax", "std"],
    "headroom": [1.0, 0.75, 16 / 17, 0.3],
    "candidates": [(1.0,), (1.0, 1.5), (1.25, 1.0, 0.5)],
    "candidate_error": ["mse", "mae"],
    "rounding": ["even", "away", "stochastic"],
    "random_bits": [24, 8],
    "pre_round": [False, True],
    "pad": [False, True],
}


def random_casts(count: int) -> list[Cast]:
    """Return valid casts with every field drawn by itself."""
    rng, found = np.random.default_rng(23), []
    while len(found) < count:
        drawn = {name: row[rng.integers(len(row))] for name, row in CHOICES.items()}
        idle = {
            "scale_rule": drawn["scale"] != "E8M0",
            "candidate_error": len(drawn["candidates"]) == 1,
            "random_bits": drawn["rounding"] != "stochastic",
            "outer_scale": drawn["scale"] in ("E8M0", "FP32"),
            "chain": drawn["scale"] != "E4M3",
            "largest_scale": drawn["scale"] != "E4M3" or drawn["outer_scale"] == "none",
            **dict.fromkeys(
                ("block_size", "two_dimensional", "statistic", "candidates", "candidate_error", "pad"),
                drawn["scale"] == "none",
            ),
        }
        try:
            found.append(cast(drawn.pop("format"), **{name: drawn[name] for name in drawn if not idle.get(name)}))
        except ConfigError:
            continue
    return found


CASTS = random_casts(120)


@pytest.mark.integration
@pytest.mark.parametrize("part", range(8))
def test_fields_together(part: int) -> None:
    rng = np.random.default_rng(part)
    for one in CASTS[part::8]:
        shape = (17, 70) if one.pad else (16, 64) if not one.two_dimensional else (64, 64)
        x = gaussian(rng, shape)
        x = x if one.outer_scale == "tensor" else np.concatenate([x[:-3], with_nan_or_inf(rng, (3, shape[1]))])
        assert_operand(x, one, -1 if not one.pad else -1 - int(rng.integers(2)), 100.0 if part % 2 else None)


def test_the_casts_have_every_field_at_every_value() -> None:
    hints = get_type_hints(Cast)
    for field in fields(Cast):
        if field.name in ("source", "mask_clipped"):
            continue  # a field of a GEMM's operands, which assert_cast checks for every cast
        assert {*CHOICES[field.name]} <= {getattr(one, field.name) for one in CASTS}, field.name
        if get_origin(hints[field.name]) is Literal:
            assert {*get_args(hints[field.name])} == {*CHOICES[field.name]}, field.name


# --------------------------------------------------------------------------------------------------------------- stacks

STACKED = [
    cast(rounding="stochastic", scale_rule="floor"),
    cast("E4M3", two_dimensional=True, block_size=16),
    cast(scale="E4M3", block_size=16, outer_scale="tensor", candidates=(1.0, 1.5), rounding="stochastic"),
    cast(scale="E4M3", block_size=16, outer_scale="row"),
    cast(scale="E4M3", block_size=16, outer_scale="tensor", chain="training"),
    cast("E5M2", scale="none", outer_scale="tensor", rounding="stochastic", random_bits=8),
    cast(scale="FP32", two_dimensional=True, headroom=0.75),
    cast(statistic="std", scale_rule="floor"),
]


@pytest.mark.integration
@every_axis
@each("one", STACKED, ids=range(len(STACKED)))
def test_a_replica_is_cast_as_if_it_were_alone(one: Cast, axis: int) -> None:
    """The stack also has a replica with a NaN, one at another step, and one with another seed."""
    rng = np.random.default_rng(5)
    x = np.stack([gaussian(rng, (32, 64)), with_nan_or_inf(rng, (32, 64)), gaussian(rng, (32, 64)) * 1e-6])
    places = [reference_casts.Draws(seed, "layer.dgrad_dh", 3 + seed, 64) for seed in range(3)]
    alone = [drawn(place) for place in places]
    draws = Draws(torch.stack([each.key for each in alone]), torch.stack([each.place for each in alone]))
    got = quantized_operand(torch.tensor(x), one, axis, draws if is_random(one) else None)
    for i, place in enumerate(places):
        with np.errstate(invalid="ignore"):
            want = cast_array(x[i], one, axis, outer_scale(x[i], one, axis), place if is_random(one) else None)
        assert_same_bits(got.values[i], want.values)
        assert_same_bits(got.scales.float()[i], want.scales)
        assert_same_bits(got.dequantize()[i], want.decoded)

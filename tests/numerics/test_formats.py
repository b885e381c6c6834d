"""The table of formats has the numbers that papers print, and the scale rules give what follows from them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from bits import CODES, DECODED, every_format, every_rule
from reference import ELEMENTS, ROUNDINGS, SCALE_RULES

from mxstudy.numerics import FORMATS, quantize
from mxstudy.numerics import formats as tables
from mxstudy.numerics.formats import look_up
from mxstudy.reader import ConfigError

# MXFP8 recipe, table 1: largest number, smallest subnormal, binades. It prints 2^-3 as E3M2's smallest, which is
# E2M3's: 28 over 2^-3 would be 7.8 binades, and its 8.8 are those of 2^-4, the definition's 2^(1 - bias - 2).
PRINTED = {
    "E4M3": (1.75 * 2**8, 2**-9, 17.8),
    "E5M2": (1.75 * 2**15, 2**-16, 31.8),
    "E2M3": (1.875 * 2**2, 2**-3, 5.9),
    "E3M2": (1.75 * 2**4, 2**-4, 8.8),
    "E2M1": (1.5 * 2**2, 2**-1, 3.6),
    "E1M2": (1.75 * 2**1, 2**-1, 2.8),  # not in that table: 0 to 7 halves, the uniform grid of arXiv 2606.20381
}

# microxcaling's formats: largest exponent, smallest normal number, and the largest mantissa, above which a block's
# maximum overflows under floor. E5M2's band is E4M3's.
MICROXCALING = {
    "E4M3": (8, 2**-6, 1.75),
    "E5M2": (15, 2**-14, 1.75),
    "E2M3": (2, 1, 1.875),
    "E3M2": (4, 2**-2, 1.75),
    "E2M1": (2, 1, 1.5),
    "E1M2": (1, 2, 1.75),  # not in microxcaling
}


def test_the_tables_have_these_rows() -> None:
    assert set(FORMATS) == {*PRINTED, "NVFP4"} == {*ELEMENTS, "NVFP4"}
    assert set(tables.SCALE_RULES) == set(SCALE_RULES)
    assert set(tables.ROUNDINGS) == {*ROUNDINGS, "stochastic"}
    assert {name for name, rounding in tables.ROUNDINGS.items() if rounding.draws} == {"stochastic"}
    assert all(name == fmt.name for name, fmt in FORMATS.items())


@every_format
def test_table_1_of_the_mxfp8_recipe(fmt: str) -> None:
    row = FORMATS[fmt]
    assert (row.max, row.min_subnormal, round(row.binades, 1)) == PRINTED[fmt]


def test_the_misprint_of_table_1() -> None:
    e3m2 = FORMATS["E3M2"]
    assert round(math.log2(e3m2.max / 2**-4), 1) == 8.8
    assert round(math.log2(e3m2.max / 2**-3), 1) == 7.8


@every_format
def test_the_constants_of_microxcaling(fmt: str) -> None:
    row = FORMATS[fmt]
    emax, min_normal, threshold = MICROXCALING[fmt]
    assert (row.emax, 2.0**row.emin, row.max / 2**row.emax) == (emax, min_normal, threshold)
    assert 1 + row.max_mantissa / 2**23 == threshold


@every_format
def test_the_constants_are_those_of_the_codes(fmt: str) -> None:
    """The names say the bits, and decoding all codes by the definition gives the values."""
    row, finite = FORMATS[fmt], DECODED[fmt][abs(DECODED[fmt]) < math.inf]
    assert row.name == f"E{row.exponent_bits}M{row.mantissa_bits}"
    assert 2**row.bits == len(CODES[fmt])
    assert row.max == finite.max()
    assert row.min_subnormal == finite[finite > 0].min()
    assert row.has_infinity == (abs(DECODED[fmt]) == math.inf).any() == (fmt == "E5M2")
    assert (row.scale, row.block_size) == ("E8M0", 32)


def test_nvfp4_is_e2m1_under_other_scales() -> None:
    differing = {"name": "NVFP4", "scale": "E4M3", "block_size": 16}
    assert FORMATS["NVFP4"] == dataclasses.replace(FORMATS["E2M1"], **differing)
    assert FORMATS["NVFP4"].binades == FORMATS["E2M1"].binades


@every_format
@every_rule
def test_overflow_bands(fmt: str, rule: str) -> None:
    """Floor clamps all mantissas above the largest one, and `even` those that it does not round up to 2."""
    mantissas = 1 + torch.arange(2**12) / 2**12
    largest, half_a_step = MICROXCALING[fmt][2], 2.0 ** -(FORMATS[fmt].mantissa_bits + 1)
    end = {"floor": 2.0, "even": 2 - half_a_step, "ceil": 0.0, "rceil": 0.0}[rule]
    got = quantize(mantissas[:, None].expand(-1, 32), fmt, scale_rule=rule)
    scaled = mantissas / 2.0 ** (got.scales[:, 0].int() - 127)
    clamped = scaled > FORMATS[fmt].max
    assert torch.equal(clamped, (mantissas > largest) & (mantissas < end))
    assert (got.values[clamped] == FORMATS[fmt].max).all()
    assert (scaled >= 2 ** (FORMATS[fmt].emax - 1)).all()


def test_look_up_names_what_is_near() -> None:
    assert look_up(FORMATS, "E4M3", "format") is FORMATS["E4M3"]
    with pytest.raises(ConfigError, match=r"format: 'E4M3FN' is not a choice.*E4M3"):
        look_up(FORMATS, "E4M3FN", "format")


def test_the_page_on_numerics_has_every_format() -> None:
    page = (Path(__file__).parents[2] / "docs/numerics.md").read_text().partition("## Element formats")[2]
    rows = [line.strip("| ").split(" | ") for line in page.partition("\n## ")[0].splitlines() if line.startswith("|")]
    assert [row[:4] for row in rows[2:]] == [
        [name, f"{fmt.max:g}", f"2^{math.log2(fmt.min_subnormal):g}", f"{fmt.binades:.1f}"]
        for name, fmt in FORMATS.items()
    ]

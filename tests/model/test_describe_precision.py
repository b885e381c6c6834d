"""The plan as applied says which outer scale each linear takes."""

from __future__ import annotations

import pytest
import torch

from mxstudy import config
from mxstudy.config import BlockCast, Cast, Gemms
from mxstudy.model import Decoder
from mxstudy.model.describe_precision import describe, describe_cast
from mxstudy.model.precision import apply_precision
from mxstudy.reader import ConfigError

MODEL = config.Decoder(hidden_size=64, ffn_size=96, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=50)
NVFP4 = {"format": "NVFP4", "scale": "E4M3"}
FORWARD_ONLY = "{count} linears in nvfp4_forward_only: forward NVFP4 ({x}) x NVFP4 (one scale a tensor), "
UNQUANTISED = "dgrad unquantised, wgrad unquantised"


def described(plan: str, **settings: object) -> list[str]:
    """Return the lines of the plan that say how many linears have that recipe."""
    decoder = Decoder(MODEL, config.RMSNorm(), BlockCast(16), torch.bfloat16)
    precision = config.Precision(schedule=(config.PrecisionRow(plan={"layers.*": plan}),), block_size=16, **settings)
    rows = apply_precision(decoder, precision, 0, "bf16", torch.device("cpu"))
    return [line for line in describe(decoder, rows).splitlines() if f"linears in {plan}" in line]


def test_linears_without_a_norm_before_them_have_one_scale_a_row_in_place_of_the_norms_bound() -> None:
    assert described("nvfp4_forward_only") == [
        FORWARD_ONLY.format(count=4, x="one scale by the norm's bound") + UNQUANTISED,
        FORWARD_ONLY.format(count=4, x="one scale a row") + UNQUANTISED,
    ]


def test_a_norm_that_is_rounded_operation_by_operation_gives_no_bound() -> None:
    assert described("nvfp4_forward_only", vector_ops="bf16") == [
        FORWARD_ONLY.format(count=8, x="one scale a row") + UNQUANTISED
    ]


def test_wgrads_scales_are_of_columns() -> None:
    own = Gemms(wgrad_x=Cast(**NVFP4, outer_scale="bound"), dgrad_w=Cast(**NVFP4, outer_scale="row"))
    left, column = "forward unquantised, dgrad unquantised x NVFP4 (one scale a column), wgrad unquantised", "a column"
    assert described("own", recipes={"own": own}) == [
        f"4 linears in own: {left} x NVFP4 (one scale {scale})" for scale in ("by the norm's bound", column)
    ]


@pytest.mark.parametrize("operand", ["forward_w", "dgrad_dh", "dgrad_w", "wgrad_dh"])
def test_an_operand_that_no_norm_makes_has_no_norms_bound(operand: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{operand}\.outer_scale: bound is that of a norm's output, which only X"):
        Gemms(**{operand: Cast(**NVFP4, outer_scale="bound")})


def test_a_range_by_the_standard_deviation_is_said_and_needs_the_rule_floor():
    cast = Cast(format="E2M1", statistic="std")
    said = describe_cast(cast.filled(BlockCast(scale_rule="floor")))
    assert said == "E2M1 (scale_rule floor, range by std)"
    with pytest.raises(ConfigError, match=r"^scale_rule: with statistic=std .* not of rceil; take floor$"):
        cast.filled(BlockCast())

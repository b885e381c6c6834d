"""Settings of the precision fill what recipes leave open; what has no effect is refused, or said."""

from __future__ import annotations

import pytest
from precision_applied import applied

from mxstudy import config
from mxstudy.config import Cast, Gemms
from mxstudy.model.describe_precision import describe
from mxstudy.reader import ConfigError
from mxstudy.studies.protocol import unused_messages

DH_FIXED = Gemms(forward_x=Cast(format="E4M3"), dgrad_dh=Cast(format="E4M3", rounding="stochastic"))
ALL_FIXED = Gemms(
    forward_x=Cast(format="E4M3", rounding="even"),
    forward_w=Cast(format="E4M3", rounding="even"),
    dgrad_dh=Cast(format="E4M3", rounding="stochastic"),
)


def test_a_setting_fills_what_a_recipe_leaves_open_and_the_plan_says_what_keeps_its_own():
    decoder, rows = applied({"layers.*": "own"}, recipes={"own": DH_FIXED}, rounding="away")
    assert {name: cast.rounding for name, cast in decoder.layers[0].attention.wo.gemms.casts()} == {
        "forward_x": "away",
        "dgrad_dh": "stochastic",
    }
    line = "own: precision.rounding=away fills what is left open; dgrad_dh keeps stochastic"
    assert line in describe(decoder, rows).splitlines()
    decoder, rows = applied({"layers.*": "own"}, recipes={"own": DH_FIXED})
    assert "fills" not in describe(decoder, rows)


def test_a_setting_that_every_operand_fixes_is_refused_with_their_names():
    own = {"own": ALL_FIXED}
    says = (
        r"precision\.rounding: away is set, and every operand fixes its own \(own: even in forward_x, forward_w, stoch"
    )
    with pytest.raises(ConfigError, match=rf"^{says}astic in dgrad_dh\); write precision\.rounding=even, or take a v"):
        applied({"layers.*": "own"}, recipes=own, rounding="away")
    applied({"layers.*": "own", "*.wo": "mxfp8"}, recipes=own, rounding="away")  # other rows of the plan use it
    one = {"own": Gemms(forward_x=Cast(format="E4M3", rounding="away"))}
    applied({"layers.*": "own"}, recipes=one, rounding="away")  # the row fixes it


def test_an_operand_that_the_settings_make_impossible_is_named_with_its_recipe():
    own = Gemms(forward_x=Cast(format="E4M3"), dgrad_dh=Cast(format="E4M3", random_bits=8))
    says = r"plan for layers\.0\.attention\.wqkv: recipe own, dgrad_dh\.random_bits: even rounding uses no random bits"
    with pytest.raises(ConfigError, match=rf"^precision\.schedule: {says}; leave it out$"):
        applied({"layers.*": "own"}, recipes={"own": own})
    applied({"layers.*": "own"}, recipes={"own": own}, rounding="stochastic")


def test_gains_in_bf16_take_the_rounding_of_operands_before_the_cast():
    own = {"own": Gemms(forward_x=Cast(format="E4M3", pre_round=False))}
    with pytest.raises(
        ConfigError, match=r"^precision\.operand_pre_round: true is set, and every operand fixes its own"
    ):
        applied({"layers.*": "own"}, recipes=own, operand_pre_round=True, gain="fp32")
    applied({"layers.*": "own"}, recipes=own, operand_pre_round=True, gain="bf16")
    described = describe(*applied({"layers.*": "bf16"}, operand_pre_round=True, gain="bf16"))
    assert "gains and biases: 5 norms in bf16 (ties away from zero)" in described.splitlines()
    assert "no operand here" not in described
    precision = config.Precision(schedule=(config.PrecisionRow(plan={"layers.*": "bf16"}),), operand_pre_round=True)
    assert "precision.operand_pre_round" in unused_messages(precision, config.RMSNorm(), "fp32")
    assert "precision.operand_pre_round" not in unused_messages(precision, config.RMSNorm(), "bf16")


def test_a_baseline_says_which_settings_of_other_arms_it_does_not_take():
    described = describe(*applied({"layers.*": "bf16"}, scale_rule="floor", rounding="away", block_size=16))
    settings = "precision.block_size=16, precision.scale_rule=floor, precision.rounding=away"
    assert f"{settings}: no operand here takes them" in described.splitlines()
    described = describe(*applied({"layers.*": "bf16"}, norm=config.MXNorm(p=2.0), block_size=16))
    assert "no operand here" not in described  # the norm takes its maxima of such blocks

"""Operands whose blocks are complete anyway are not padded, so that kernels can make them."""

from dataclasses import replace

import pytest
import torch

from mxstudy import config
from mxstudy.config import PRECISIONS, BlockCast, Cast
from mxstudy.model import Decoder
from mxstudy.model.describe_precision import describe
from mxstudy.model.fusable import linears_in
from mxstudy.model.precision import apply_precision, evaluated

MODEL = config.Decoder(hidden_size=64, ffn_size=96, num_layers=1, num_heads=4, num_kv_heads=2, vocab_size=50)


def applied(block_size, sequence_length, **recipe):
    """Return a decoder in MXFP8 with padding. `recipe`: casts in place of MXFP8's."""
    decoder = Decoder(MODEL, config.RMSNorm(), BlockCast(), torch.bfloat16)
    decoder.init_weights(0)
    rows = (config.PrecisionRow(plan={"layers.*": "own"}),)
    own = {"own": replace(PRECISIONS["mxfp8"], **recipe)}
    precision = config.Precision(schedule=rows, block_size=block_size, pad_blocks=True, recipes=own)
    apply_precision(decoder, precision, 0, "bf16", torch.device("cpu"), sequence_length=sequence_length)
    return decoder


def padded(block_size, sequence_length):
    """Return the padded operands of a linear of 64 inputs and 64 outputs, and those of one of 96 inputs."""
    decoder = applied(block_size, sequence_length)
    linears = decoder.layers[0].attention.wo, decoder.layers[0].feed_forward.w2
    return [{name for name, cast in linear.gemms.casts() if cast.pad} for linear in linears]


GEMMS = ("forward {} x {}", "dgrad {} x {}", "wgrad {} x {}")


def said(decoder):
    """Return the lines of the plan on the linears of the decoder's blocks."""
    own = linears_in(decoder.layers[0])
    rows = {name: "own" for name, module in decoder.named_modules() if module in own}
    return describe(decoder, rows).splitlines()[:-1]


def test_operands_whose_blocks_are_complete_anyway_are_not_padded():
    assert padded(32, 64) == [set(), set()]
    assert padded(64, 64) == [set(), {"forward_x", "forward_w"}]  # 64 does not divide 96
    assert padded(64, 32) == [{"wgrad_dh", "wgrad_x"}, {"forward_x", "forward_w", "wgrad_dh", "wgrad_x"}]


@pytest.mark.parametrize("recipe", [{}, {"forward_x": Cast(format="E4M3", pad=False)}], ids=["open", "fixed"])
def test_the_plan_says_which_operands_are_padded_and_that_the_blocks_of_others_are_complete(recipe):
    """Pad w2 alone: of the four linears of a block only it has 96 inputs, which 64 does not divide."""
    padded, plain = "E4M3 (blocks of 64, padded)", "E4M3 (blocks of 64)"
    note = "precision.pad_blocks=true: the blocks of casts that are not called padded are complete"
    if recipe:
        assert said(applied(32, 64, **recipe)) == [f"4 linears in own: {', '.join(GEMMS).format(*['E4M3'] * 6)}", note]
    else:
        three, one = (GEMMS[0].format(x, x) for x in (plain, padded))
        rest = ", ".join(GEMMS[1:]).format(*[plain] * 4)
        lines = [f"3 linears in own: {three}, {rest}", f"1 linear in own: {one}, {rest}", note]
        assert said(applied(64, 64)) == lines


def test_padding_stays_where_the_length_of_a_sequence_is_not_known():
    every = {name for name, _ in PRECISIONS["mxfp8"].casts()}
    assert padded(32, None) == [every, every]


@torch.no_grad()
def test_a_forward_with_blocks_along_the_tokens_takes_any_number_of_tokens_in_an_evaluation():
    square = Cast(format="E4M3", two_dimensional=True)
    for recipe in ({}, {"forward_x": square}, {"wgrad_x": square}):
        decoder = applied(32, 64, **recipe)
        with evaluated(decoder):
            assert decoder(torch.arange(5)[None]).isfinite().all()

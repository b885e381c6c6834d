"""Operands whose blocks are complete anyway are not padded, so that kernels can make them."""

import torch

from mxstudy import config
from mxstudy.config import PRECISIONS, BlockCast
from mxstudy.model import Decoder
from mxstudy.model.precision import apply_precision

MODEL = config.Decoder(hidden_size=64, ffn_size=96, num_layers=1, num_heads=4, num_kv_heads=2, vocab_size=50)


def padded(block_size, sequence_length):
    """Return the padded operands of a linear of 64 inputs and 64 outputs, and those of one of 96 inputs."""
    decoder = Decoder(MODEL, config.RMSNorm(), BlockCast(), torch.bfloat16)
    rows = (config.PrecisionRow(plan={"layers.*": "mxfp8"}),)
    precision = config.Precision(schedule=rows, block_size=block_size, pad_blocks=True)
    apply_precision(decoder, precision, 0, "bf16", torch.device("cpu"), sequence_length=sequence_length)
    linears = decoder.layers[0].attention.wo, decoder.layers[0].feed_forward.w2
    return [{name for name, cast in linear.gemms.casts() if cast.pad} for linear in linears]


def test_operands_whose_blocks_are_complete_anyway_are_not_padded():
    assert padded(32, 64) == [set(), set()]
    assert padded(64, 64) == [set(), {"forward_x", "forward_w"}]  # 64 does not divide 96
    assert padded(64, 32) == [{"wgrad_dh", "wgrad_x"}, {"forward_x", "forward_w", "wgrad_dh", "wgrad_x"}]


def test_padding_stays_where_the_length_of_a_sequence_is_not_known():
    every = {name for name, _ in PRECISIONS["mxfp8"].casts()}
    assert padded(32, None) == [every, every]

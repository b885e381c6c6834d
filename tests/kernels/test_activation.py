"""Activation kernels agree with autograd through torch's activations, and given the same values, with the cast's bits.

exp and erf differ in their last bits between torch and what a kernel calls (on CPU numpy). So do results before they
are rounded, by far less than a bf16 step: once rounded, a few are neighbours. Where 1 + erf or 1 + tanh cancel, in the
tail below -3, torch has an absolute error near |h| 2^-24 that is many steps. relu and relu2 are exact.
"""

from __future__ import annotations

import pytest
import torch
from bits import assert_same_bits
from fused import BF16, COMPOSED, FP32, activation_inputs, assert_beside, every_activation, every_rounding_of_values
from interpreter import DEVICE

from mxstudy.kernels.activation import ACTIVATIONS, checked, launch_cuda, launch_cuda_backward
from mxstudy.kernels.operators import UNREAD, Tile, checked_casts
from mxstudy.numerics import quantize
from mxstudy.numerics.cast import BlockCast
from mxstudy.reader import ConfigError

pytestmark = pytest.mark.integration
TILE = Tile(64, 64, 4)


def forward(h, name, row, column, cast, gate, dtype, tile=TILE):
    packed, shape = checked(h, name, gate, dtype)
    return [x.cpu() for x in launch_cuda(h.to(DEVICE), packed, checked_casts(shape, row, column, cast), tile)]


def backward(dz, h, name, row, column, cast, gate, dtype, tile=TILE, again=UNREAD):
    packed, _ = checked(h, name, gate, dtype)
    casts, of_z = checked_casts(dz.shape, row, column, cast), checked_casts(dz.shape, UNREAD, again, cast)
    *operands, z = (x.cpu() for x in launch_cuda_backward(dz.to(DEVICE), h.to(DEVICE), packed, casts, of_z, tile))
    return operands if again == UNREAD else [*operands, z]


@every_activation
@every_rounding_of_values
def test_the_activation(name, gate, dtype):
    h, _ = activation_inputs(name)
    row, column = forward(h, name, None, None, BlockCast(), gate, dtype)
    assert_same_bits(row, column)
    assert_beside(row, COMPOSED[name](h, gate, dtype).to(BF16), name, ACTIVATIONS[name].gated)


@every_activation
@every_rounding_of_values
def test_its_gradient(name, gate, dtype):
    h, dz = activation_inputs(name)
    leaf = h.clone().requires_grad_()
    z = COMPOSED[name](leaf, gate, dtype)
    (expected,) = torch.autograd.grad(z, leaf, dz.to(z.dtype))
    row, column = backward(dz, h, name, None, None, BlockCast(), gate, dtype)
    assert_same_bits(row, column)
    assert_beside(row, expected, name, 1)


@every_activation
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_the_cast_of_what_the_activation_gives(name, block_size):
    """Rounded to bf16 it is what the kernel writes without a format, so the bits of its casts are known."""
    h, dz = activation_inputs(name)
    cast = BlockCast(block_size, "floor", "away", operand_pre_round=True)
    z, _ = forward(h, name, None, None, cast, BF16, BF16)
    dh, _ = backward(dz, h, name, None, None, cast, BF16, BF16)
    casts = [("E4M3", -1), ("E3M2", -2)]
    for values, got in (
        (z, forward(h, name, "E4M3", "E3M2", cast, BF16, BF16)),
        (dh, backward(dz, h, name, "E4M3", "E3M2", cast, BF16, BF16)),
    ):
        for (fmt, axis), one in zip(casts, got, strict=True):
            expected = quantize(values, fmt, block_size, axis, cast.scale_rule, cast.rounding)
            assert_same_bits(one, expected.dequantize(BF16))


@every_activation
@every_rounding_of_values
@pytest.mark.parametrize("fmt", ["E4M3", None])
def test_the_backward_gives_the_forwards_column_operand_again(name, gate, dtype, fmt):
    h, dz = activation_inputs(name)
    _, column = forward(h, name, UNREAD, fmt, BlockCast(), gate, dtype)
    *operands, again = backward(dz, h, name, "E5M2", "E4M3", BlockCast(), gate, dtype, again=fmt)
    assert_same_bits(again, column)
    for one, other in zip(operands, backward(dz, h, name, "E5M2", "E4M3", BlockCast(), gate, dtype), strict=True):
        assert_same_bits(one, other)


def test_an_operand_that_nobody_reads_is_not_made():
    h, dz = activation_inputs("swiglu")
    whole = forward(h, "swiglu", "E4M3", "E4M3", BlockCast(), BF16, BF16)
    row, column = forward(h, "swiglu", "E4M3", UNREAD, BlockCast(), BF16, BF16)
    assert column.numel() == 0
    assert_same_bits(row, whole[0])
    gradients = backward(dz, h, "swiglu", "E4M3", "E4M3", BlockCast(), BF16, BF16)
    row, column = backward(dz, h, "swiglu", UNREAD, "E4M3", BlockCast(), BF16, BF16)
    assert row.numel() == 0
    assert_same_bits(column, gradients[1])


def test_what_is_not_rounded_goes_unrounded_into_the_cast():
    """The test uses relu2 in FP32, which both sides compute exactly."""
    h, _ = activation_inputs("relu2")
    row, column = forward(h, "relu2", "E4M3", "E2M1", BlockCast(), FP32, FP32)
    z = h.float().relu().square()
    assert_same_bits(row, quantize(z, "E4M3").dequantize(BF16))
    assert_same_bits(column, quantize(z, "E2M1", axis=0).dequantize(BF16))


@every_activation
def test_nan_stays_in_its_blocks(name):
    h, dz = activation_inputs(name)
    h[5, 7], dz[40, 70] = torch.nan, torch.inf
    z, _ = forward(h, name, "E4M3", None, BlockCast(), BF16, BF16)
    dh, _ = backward(dz, h, name, "E4M3", None, BlockCast(), BF16, BF16)
    assert z.isnan().nonzero().tolist() == [[5, column] for column in range(32)]
    assert dh.isnan()[:, :128].nonzero().tolist() != []
    assert not dh.isnan()[torch.arange(64) % 64 != 40][6:].any()


@every_activation
def test_stacks_and_usual_tiles(name):
    h, dz = activation_inputs(name, rows=32, columns=96, lead=(3,))
    for run_it, at in ((forward, (h,)), (backward, (dz, h))):
        together = run_it(*at, name, "E4M3", "E4M3", BlockCast(), BF16, BF16, None)
        for replica in range(3):
            alone = run_it(*(x[replica] for x in at), name, "E4M3", "E4M3", BlockCast(), BF16, BF16, Tile(32, 32, 4))
            for one, other in zip(together, alone, strict=True):
                assert_same_bits(one[replica], other)


def test_rows_and_columns_of_any_number():
    """Nothing is cast, so results are exact but for the last bits of exp, which are the same in every tile."""
    h, dz = activation_inputs("swiglu", rows=6, columns=24)
    given = (dz, h, "swiglu", None, UNREAD, BlockCast(), BF16, BF16)
    for one, other in zip(backward(*given, None, None), backward(*given, Tile(2, 8, 4), None), strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize(("tile", "what"), [(Tile(4, 8, 4), "4 rows"), (Tile(2, 16, 4), "16 columns")])
@pytest.mark.parametrize("run_it", [forward, backward])
def test_a_tile_that_would_leave_a_rest_is_refused(run_it, tile, what):
    h, dz = activation_inputs("swiglu", rows=6, columns=24)
    given = (h,) if run_it is forward else (dz, h)
    with pytest.raises(ConfigError, match=f"tile: {what} do not divide"):
        run_it(*given, "swiglu", None, None, BlockCast(), BF16, BF16, tile)

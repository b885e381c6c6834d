"""Rotated and cast heads have the reference's bits, and gradients of queries, keys and values also match autograd."""

from __future__ import annotations

import pytest
import torch
from bits import assert_same_bits
from fused import BF16, FP32
from interpreter import DEVICE

from mxstudy.kernels.heads import flat_shape, heads_cast_both, launch_cuda, launch_cuda_rotate, rotate_heads_
from mxstudy.kernels.operators import UNREAD, Tile, checked_casts
from mxstudy.numerics.cast import BlockCast, block_cast
from mxstudy.numerics.rotary import rotate, rotate_back
from mxstudy.reader import ConfigError

pytestmark = pytest.mark.integration
B, T, N, K, H = 2, 32, 4, 2, 16


def inputs(sequences_differ=False, head_size=H):
    """Return q, k, v, the gradients of the rotated heads, and the angles."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dq, dk, dv = (torch.randn(B, T, heads, head_size, generator=generator).to(BF16) for heads in (N, K, K) * 2)
    positions = torch.arange(T, dtype=FP32)
    positions = torch.stack([positions, positions + 5]) if sequences_differ else positions
    return (q, k, v), (dq, dk, dv), positions[..., None] * 10.0 ** -torch.linspace(0, 3, head_size // 2)


def rotated(x, rope):
    """Return x rotated as complex numbers, where features i and i + H / 2 make one."""
    turns = torch.polar(torch.ones_like(rope), rope)[..., None, :]
    z = torch.complex(*x.float().chunk(2, dim=-1)) * turns
    return torch.cat((z.real, z.imag), dim=-1).to(BF16)


def gradient(qkv, d_qkv, rope):
    """Return the gradient of the unrotated heads, bf16 [B T, (N + 2 K) H]."""
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    turned = (q, k) if rope is None else (rotated(q, rope), rotated(k, rope))
    grads = torch.autograd.grad((*turned, v), (q, k, v), d_qkv)
    return torch.cat([g.flatten(2).flatten(0, 1) for g in grads], dim=-1)


@pytest.mark.parametrize(
    ("shape", "head_size", "sequences_differ"),
    [((2, 32), 16, True), ((3, 7), 48, True), ((1, 5), 6, False), ((2, 40), 128, False), ((2, 1), 32, False)],
)
def test_queries_and_keys_are_rotated_where_they_are(shape, head_size, sequences_differ):
    """Every bit is that of splitting and rotating by modules. Values, and what lies beside the heads, stay."""
    generator = torch.Generator().manual_seed(0)
    qkv = (torch.randn(shape[0] * shape[1], 7 * head_size, generator=generator) * 8).to(BF16)
    qkv[0, 0], qkv[-1, -1] = torch.inf, torch.nan
    positions = torch.arange(shape[1], dtype=FP32)
    positions = torch.stack([positions + 3 * i for i in range(shape[0])]) if sequences_differ else positions
    rope = positions[..., None] * 10.0 ** -torch.linspace(0, 3, head_size // 2)
    for device, rotate_in_place in ((DEVICE, launch_cuda_rotate), ("cpu", rotate_heads_)):
        turns, rotated_in_place = rope.to(device), qkv.to(device, copy=True)  # cosines differ between processors
        heads = qkv.to(device).unflatten(0, shape).unflatten(-1, (-1, head_size))
        expected = torch.cat((rotate(heads[:, :, :5], turns), heads[:, :, 5:]), dim=2).flatten(2).flatten(0, 1)
        rotate_in_place(rotated_in_place, turns, 5 * head_size, head_size)
        assert_same_bits(rotated_in_place.cpu(), expected.cpu())


@pytest.mark.parametrize(("head_size", "block_size"), [(16, 16), (32, 16), (64, 32), (128, 64)])
def test_gradients_have_the_bits_of_the_reference(head_size, block_size):
    """It takes one pass if half a head has whole blocks, else two."""
    _, d_qkv, rope = inputs(head_size=head_size)
    cast = BlockCast(block_size)
    for row, column in (("E4M3", "E5M2"), (None, UNREAD)):
        for got, expected in zip(
            kernel(d_qkv, rope, row, column, cast), reference(d_qkv, rope, row, column, cast), strict=True
        ):
            assert_same_bits(got, expected)


def test_rows_of_any_number():
    """No block lies along a column, so any number of rows will do."""
    _, d_qkv, rope = inputs(head_size=64)
    d_qkv = [d[:, :21] for d in d_qkv]
    for row in ("E4M3", None):
        at = rope[:21], row, UNREAD, BlockCast()
        assert_same_bits(kernel(d_qkv, *at)[0], reference(d_qkv, *at)[0])


def reference(d_qkv, rope, row, column, cast):
    """Return the operands by torch, rotated where the kernel runs, because cosines differ between processors."""
    dq, dk = (rotate_back(d.to(DEVICE), rope.to(DEVICE)).cpu() for d in d_qkv[:2])
    return heads_cast_both(dq, dk, d_qkv[2], None, row, column, cast)


def kernel(d_qkv, rope, row, column, cast=BlockCast(), tile=None):  # noqa: B008
    casts = checked_casts(flat_shape(*d_qkv), row, column, cast)
    at = (*(d.to(DEVICE) for d in d_qkv), None if rope is None else rope.to(DEVICE))
    return [x.cpu() for x in launch_cuda(*at, casts, tile)]


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("sequences_differ", [False, True])
@pytest.mark.parametrize("head_size", [16, 48])
def test_the_gradient(rotates, sequences_differ, head_size):
    qkv, d_qkv, rope = inputs(sequences_differ, head_size)
    rope = rope if rotates else None
    row, column = kernel(d_qkv, rope, None, None)
    assert_same_bits(row, column)
    expected = gradient(qkv, d_qkv, rope)
    if rotates:  # a few are neighbours: these products are rounded, complex ones are not
        assert (row != expected).float().mean() < 0.01
        torch.testing.assert_close(row.float(), expected.float(), rtol=2.0**-7, atol=1e-6)
    else:
        assert_same_bits(row, expected)


@pytest.mark.parametrize("tile", [None, Tile(32, 8, 4)])
def test_its_casts(tile):
    _, d_qkv, rope = inputs()
    dqkv, nothing = kernel(d_qkv, rope, None, UNREAD)
    assert nothing.numel() == 0
    cast = BlockCast(16, "floor", "away")
    row, column = kernel(d_qkv, rope, "E5M2", "E4M3", cast, tile)
    assert_same_bits(row, block_cast(dqkv, "E5M2", -1, cast).dequantize(BF16))
    assert_same_bits(column, block_cast(dqkv, "E4M3", -2, cast).dequantize(BF16))


def test_a_tile_wider_than_half_a_head_is_refused():
    _, d_qkv, rope = inputs()
    with pytest.raises(ConfigError, match="tile: 512 columns do not divide"):
        kernel(d_qkv, rope, None, UNREAD, tile=Tile(32, 512, 4))


def test_any_layout():
    """Heads come before positions, as attention gives them."""
    _, d_qkv, rope = inputs()
    others = [d.transpose(1, 2).contiguous().transpose(1, 2) for d in d_qkv]
    for one, other in zip(kernel(others, rope, "E4M3", "E4M3"), kernel(d_qkv, rope, "E4M3", "E4M3"), strict=True):
        assert_same_bits(one, other)

"""The Hadamard transform agrees with a dense matrix in float64, and has the bits of a butterfly of single numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from bits import assert_same_bits
from each import each
from torch._inductor import config as inductor_config

from mxstudy.numerics.grid import round_to_bf16
from mxstudy.numerics.transforms import TRANSFORM_SIZES, butterfly, hadamard
from mxstudy.reader import ConfigError

every_size = each("size", TRANSFORM_SIZES)
every_axis = each("axis", [-1, -2])


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-8, 9, shape, generator=generator)


def signs_of(*shape, seed=1):
    return torch.randint(2, shape, generator=torch.Generator().manual_seed(seed)) * 2.0 - 1.0


def matrix(size):
    return torch.from_numpy(scipy.linalg.hadamard(size).astype(np.float64))


def butterfly_of_numbers(tile):
    """Transform in float32, at strides 1, 2, 4, ..."""
    tile, stride = [np.float32(number) for number in tile], 1
    while stride < len(tile):
        for i in range(len(tile)):
            if not i & stride:
                a, b = tile[i], tile[i + stride]
                tile[i], tile[i + stride] = a + b, a - b
        stride *= 2
    return [number * np.float32(len(tile) ** -0.5) for number in tile]


@every_size
def test_beside_a_dense_matrix(size):
    """Each of log2(size) sums rounds by at most 2^-24 of the sum of all magnitudes."""
    x = numbers(64, size)
    error = (butterfly(x).double() - x.double() @ matrix(size)).abs()
    assert (error <= math.log2(size) * 2.0**-24 * x.double().abs().sum(-1, keepdim=True)).all()


@every_size
@each("signs_after", [False, True])
def test_bit_by_bit(size, signs_after):
    x, signs = numbers(3, 2 * size), signs_of(size)
    before, after = (torch.ones(size), signs) if signs_after else (signs, torch.ones(size))
    tiles = (x.view(-1, size) * before).tolist()
    expected = round_to_bf16(torch.tensor(np.array([butterfly_of_numbers(tile) for tile in tiles]))) * after
    assert_same_bits(hadamard(x, size, signs, signs_after=signs_after), expected.view(x.shape))


@every_size
def test_along_the_rows_axis_it_is_that_of_the_transpose(size):
    x, signs = numbers(2 * size, 5), signs_of(size)
    assert_same_bits(hadamard(x, size, signs, axis=-2), hadamard(x.mT, size, signs).mT)


@every_axis
def test_a_replica_is_as_it_is_alone(axis):
    x, signs = numbers(3, 64, 64), signs_of(3, 1, 32)
    expected = [hadamard(one, 32, sign[0], axis=axis) for one, sign in zip(x, signs, strict=True)]
    assert_same_bits(hadamard(x, 32, signs, axis=axis), torch.stack(expected))


@every_size
@each("signs_after", [False, True])
def test_orthonormal(size, signs_after):
    """It keeps lengths and products, and its inverse restores x up to the two roundings to bf16, 2^-9 each."""
    x, y, signs = numbers(8, size), numbers(8, size, seed=2), signs_of(size)
    there = hadamard(x, size, signs, signs_after=signs_after)
    other = hadamard(y, size, signs, signs_after=signs_after)
    length = x.norm(dim=-1) * y.norm(dim=-1)
    assert ((there.double() @ other.double().T - x.double() @ y.double().T).diagonal().abs() <= 2.0**-7 * length).all()
    back = hadamard(there, size, signs, signs_after=signs_after, inverse=True)
    assert ((back - x).norm(dim=-1) <= 2.0**-7 * x.norm(dim=-1)).all()


def test_signs_after_change_signs_alone():
    x, signs = numbers(8, 64), signs_of(64)
    assert_same_bits(hadamard(x, 64, signs, signs_after=True), hadamard(x, 64) * signs)
    assert (hadamard(x, 64, signs).abs() != hadamard(x, 64).abs()).any()


@pytest.mark.slow
def test_compiled_as_eager():
    """The products before and after it are not fused with its sums where precision is kept."""
    x, signs = numbers(128, 256), signs_of(32)
    cases = list(itertools.product((-1, -2), (False, True)))

    def step(x):
        return [hadamard(x * 1.7, 32, signs, axis=axis, inverse=inverse) * 3.1 for axis, inverse in cases]

    with inductor_config.patch(emulate_precision_casts=True):
        for compiled, eager in zip(torch.compile(step, fullgraph=True)(x), step(x), strict=True):
            assert_same_bits(compiled, eager)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_tile(bad):
    x = numbers(4, 64)
    x[1, 20] = bad
    assert (~hadamard(x, 16).isfinite()).nonzero().tolist() == [[1, column] for column in range(16, 32)]


@each(
    ("size", "axis", "message"),
    [
        (24, -1, r"transform.size: 24 is not a choice; take one of \(16, 32"),
        (512, -1, r"transform.size: 512 is not a choice"),
        (64, -1, r"transform.size: 64 does not divide axis -1 of shape \[48, 96\]; take one of \[16, 32\]"),
        (32, -2, r"transform.size: 32 does not divide axis -2 .*; take one of \[16\]"),
        (32, 0, r"axis: 0 is not an operand's axis"),
    ],
)
def test_bad_sizes(size, axis, message):
    with pytest.raises(ConfigError, match=message):
        hadamard(torch.ones(48, 96), size, axis=axis)


def test_bad_signs():
    with pytest.raises(ConfigError, match=r"transform.signs: 1 of them; give 32"):
        hadamard(torch.ones(4, 64), 32, torch.ones(1))

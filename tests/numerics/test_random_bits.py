"""Philox gives operands their random bits, and rounding by them is unbiased where nothing saturates."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from bits import assert_same_bits, every_format
from each import each
from torch.library import opcheck

from mxstudy.numerics.formats import FORMATS, ROUNDINGS
from mxstudy.numerics.random_bits import (
    RANDOM_BITS,
    Draws,
    philox,
    random_signs,
    random_words,
    stream_key,
    thresholds,
    thresholds_of,
)

KNOWN = {  # {counter and key: words}, philox4x32 10 in Random123's tests/kat_vectors, release 1.14.0
    "00000000 00000000 00000000 00000000 00000000 00000000": "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff": "408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0": "d16cfe09 94fdcceb 5001e420 24126ea1",
}
every_bits = each("bits", RANDOM_BITS)


def words_of(text):
    return [torch.tensor(int(word, 16)) for word in text.split()]


def draws(name="a", step=0, first_row=0, seed=0):
    return Draws(torch.tensor(stream_key(seed, name)), torch.tensor([step, first_row]))


def philox_of_integers(counter, key):
    """Compute Random123's round in Python's integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p2 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p2 >> 32) ^ c1 ^ k0, p2 % 2**32, (p0 >> 32) ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


@each("given", KNOWN)
def test_known_answers(given):
    *counter, k0, k1 = words_of(given)
    assert philox(tuple(counter), (k0, k1)) == tuple(words_of(KNOWN[given]))


def test_any_counter_and_key():
    generator = torch.Generator().manual_seed(0)
    given = torch.randint(2**32, (6, 500), generator=generator)
    got = torch.stack(philox(tuple(given[:4]), tuple(given[4:])))
    for column, words in zip(given.T.tolist(), got.T.tolist(), strict=True):
        assert tuple(words) == philox_of_integers(column[:4], column[4:])


def test_the_key_of_a_stream_is_its_hash():
    digest = hashlib.sha256(b"17:layers.0.attention.qkv/dgrad_dh").hexdigest()
    assert stream_key(17, "layers.0.attention.qkv/dgrad_dh") == (int(digest[:8], 16), int(digest[8:16], 16))
    assert len({stream_key(seed, name) for seed in range(10) for name in "abc"}) == 30


def test_a_word_is_that_of_its_place():
    words = random_words(draws(step=2**32 + 5, first_row=2**33 + 7), 3, 10)
    assert words.dtype == torch.int64
    for row in range(3):
        for column in range(10):
            counter = (column // 4, 7 + row, 5, 0)
            assert words[row, column] == philox_of_integers(counter, stream_key(0, "a"))[column % 4]


def test_a_sign_is_that_of_its_place():
    signs = random_signs(draws(step=5, first_row=7), 32)
    assert signs.dtype == torch.float32
    for i, sign in enumerate(signs.tolist()):
        word = philox_of_integers((i // 4, 7, 5, 1), stream_key(0, "a"))[i % 4]
        assert sign == (-1.0 if word >= 2**31 else 1.0)


def test_rows_of_a_micro_batch_draw_as_they_do_in_the_whole():
    whole = random_words(draws(), 12, 16)
    assert torch.equal(torch.cat([random_words(draws(first_row=row), 4, 16) for row in (0, 4, 8)]), whole)


def test_rows_that_are_dispatched_draw_as_they_do_in_their_places():
    whole, rows = random_words(draws(), 16, 8), torch.tensor([5, 0, 11, 5])
    found = random_words(draws(first_row=2)._replace(rows=rows), 4, 8)
    assert torch.equal(found, whole[rows + 2])


def test_a_replica_draws_as_it_does_alone():
    alone = [draws(seed=seed, step=3, first_row=2) for seed in range(3)]
    stack = Draws(torch.stack([one.key for one in alone]), alone[0].place)
    assert torch.equal(random_words(stack, 5, 6), torch.stack([random_words(one, 5, 6) for one in alone]))
    signs = random_signs(stack, 16)
    assert signs.shape == (3, 1, 16)
    assert torch.equal(signs[:, 0], torch.stack([random_signs(one, 16) for one in alone]))


@pytest.mark.parametrize("replicas", [(), (2,)], ids=str)
def test_a_compiler_is_told_the_shape_of_the_words(replicas):
    key, place = torch.zeros(*replicas, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    arguments = (key, place, 4, 6, 0)
    opcheck(torch.ops.mxstudy.random_words.default, arguments, test_utils="test_faketensor")


def test_words_are_spread_and_streams_uncorrelated():
    """Over 2^16 words each bit is set half of the time.

    Streams, steps, rows and places differ as chance has it.
    """
    words = random_words(draws(), 256, 256)
    for bit in range(32):
        assert abs((words >> bit & 1).double().mean() - 0.5) < 5 * 0.5 / 256
    others = (draws("b"), draws(seed=1), draws(step=1), draws(first_row=256))
    for other in [random_words(one, 256, 256) for one in others] + [words.roll(1, 0), words.roll(1, 1)]:
        assert abs(correlation(words, other)) < 5 / 256
    assert torch.equal(random_words(draws(), 256, 256), words)


def correlation(a, b):
    return torch.corrcoef(torch.stack((a.double().flatten(), b.double().flatten())))[0, 1].item()


@pytest.mark.slow
def test_compiled_as_eager():
    compiled = torch.compile(lambda draws: (random_words(draws, 8, 24), random_signs(draws, 16)), fullgraph=True)
    for step in range(3):
        given = draws(step=step, first_row=8 * step)
        for got, expected in zip(compiled(given), (random_words(given, 8, 24), random_signs(given, 16)), strict=True):
            assert torch.equal(got, expected)


# ----------------------------------------------------------------------------------------------------------- rounding


def stochastically(steps, words, bits):
    """Round steps by the upper bits of the words, as a cast does."""
    return ROUNDINGS["stochastic"].apply(steps, thresholds_of(words, bits))


@every_bits
def test_thresholds_are_of_the_words_of_the_draws(bits):
    assert torch.equal(thresholds(draws(), 16, 24, bits), thresholds_of(random_words(draws(), 16, 24), bits))


@every_bits
def test_up_where_u_is_less_than_the_fraction(bits):
    """Compare with plain arithmetic, in which eight bits first round the fraction down to 1/256."""
    steps = torch.tensor([0.0, -0.0, 0.25, -0.25, 3.75, -3.75, 2.0**23 + 1, 2.0**-30, 1 - 2.0**-24, math.nan, 15.0])
    for u in (0, 1, 2 ** (bits - 2) - 1, 2 ** (bits - 2), 3 * 2 ** (bits - 2), 2**bits - 1):
        word = torch.tensor((u << (32 - bits)) + 17).expand(len(steps))
        expected = []
        for x in steps.double().tolist():
            below = math.nan if math.isnan(x) else math.floor(abs(x))
            fraction = abs(x) - below
            if bits == 8 and not math.isnan(x):
                fraction = math.floor(fraction * 2**bits) / 2**bits
            expected.append(math.copysign(below + (u / 2**bits < fraction), x))
        assert_same_bits(stochastically(steps, word, bits), torch.tensor(expected))


@every_bits
@every_format
def test_the_mean_is_the_number_itself(fmt, bits):
    """The test makes 4096 draws of each fraction. Eight bits round up with the fraction rounded down to 1/256."""
    fractions = torch.arange(1, 200) / 200
    steps = (FORMATS[fmt].emax + fractions) * torch.tensor([1.0, -1.0]).repeat(100)[:199]
    rounded = stochastically(steps.expand(4096, 199), random_words(draws(), 4096, 199), bits)
    probability = (fractions * 2**bits).floor() / 2**bits if bits == 8 else fractions
    deviation = (rounded.abs().mean(0) - FORMATS[fmt].emax - probability).abs()
    assert (deviation <= 5 * (fractions * (1 - fractions) / 4096).sqrt() + 1e-6).all()

"""Random numbers that are a function of their position: the same bits on every device, eager or compiled.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) maps a counter of
four 32-bit words and a key of two to four random words. There is no state. A number follows from the key (seed, module
and operand) and the counter (training step, row of the global tensor, column). So it does not depend on the world size,
the micro-batch, the slot in a stack or a resume, and a recomputed forward draws it again.

Words are uint32 values in int64 tensors, because torch has no uint32 arithmetic.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, library

from mxstudy.compat.torch_compiler import constant
from mxstudy.config.casts import OPERANDS, TRANSFORMS, Hadamard
from mxstudy.reader import require

WORD = 0xFFFFFFFF
HALF_WORD = 0xFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
WORDS = 4  # random words from one counter

ELEMENTS, SIGNS = 0, 1  # the counter's last word: the purpose of the numbers
MOST_BITS = 24
RANDOM_BITS = (MOST_BITS, 8)  # numbers of bits of a word that stochastic rounding can draw

Words = tuple[Tensor, Tensor, Tensor, Tensor]


class Draws(NamedTuple):
    """The key and position of an operand's random numbers, as tensors, so that a new step needs no new code or graph.

    `key`: int64 [2] from `stream_key`, or [S, 2] for a stack of S replicas. `place`: int64 [2], or [S, 2]: the training
    step, and the row of the global tensor that is the operand's first row. `rows`: int64 [rows], the position of each
    row, counted from that first one; None: consecutive rows.
    """

    key: Tensor
    place: Tensor
    rows: Tensor | None = None


def stream_key(seed: int, name: str) -> tuple[int, int]:
    """Return the two key words of a stream: the first 64 bits of the SHA-256 of "seed:name", big-endian."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:4]), int.from_bytes(digest[4:8])


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Tensor, Tensor]) -> Words:
    """Return the four random words of each counter, int64, of the shape that counter and key broadcast to."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(ROUNDS):
        high_0, low_0 = multiply(c0, MULTIPLIERS[0])
        high_2, low_2 = multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3)
    return c0, c1, c2, c3


def multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low word of a * b, computed by halves of b because int64 cannot hold the product."""
    upper, lower = a * (b >> 16), a * (b & HALF_WORD)
    return (upper + (lower >> 16)) >> 16, (((upper & HALF_WORD) << 16) + lower) & WORD


def random_words(draws: Draws, rows: int, columns: int) -> Tensor:
    """Return a random word for each element of an operand: int64 [rows, columns], or [S, rows, columns] for a stack.

    Four neighbours in a row share a counter: the element in row r and column c has word c % 4 of the counter
    (c // 4, first row + r, step, 0).
    """
    return _words(draws, rows, columns, ELEMENTS)


def random_signs(draws: Draws, size: int) -> Tensor:
    """Return a random sign for each of `size` numbers: float32 +1 or -1, [size], or [S, 1, size] for a stack.

    The sign of number i is bit 31 of word i % 4 of the counter (i // 4, first row, step, 1); a set bit is -1.
    """
    signs = 1.0 - 2.0 * (_words(draws, 1, size, SIGNS) >> 31).to(torch.float32)
    return signs if draws.key.ndim > 1 else signs.squeeze(0)


def _words(draws: Draws, rows: int, columns: int, purpose: int) -> Tensor:
    operator = _opaque_words if draws.key.device.type == "cpu" else _fusible_words
    return operator(draws.key, draws.place, rows, columns, purpose, draws.rows)


def _fusible_words(
    key: Tensor, place: Tensor, rows: int, columns: int, purpose: int, row_of: Tensor | None = None
) -> Tensor:
    """Return the words of [rows, columns], with the stack's axis in front if there is one."""
    group = torch.arange(-(-columns // WORDS), device=key.device)
    row = (torch.arange(rows, device=key.device) if row_of is None else row_of)[:, None]
    k0, k1, step, first = (
        words if words.ndim == 0 else words[:, None, None] for words in (*key.unbind(-1), *place.unbind(-1))
    )
    words = philox((group, (first + row) & WORD, step & WORD, purpose), (k0, k1))
    return torch.stack(words, dim=-1).flatten(-2)[..., :columns].contiguous()


# On CPU this is an opaque operator: compiling its inside would take seconds, and running it takes an instant.
_opaque_words = library.custom_op("mxstudy::random_words", _fusible_words, mutates_args=())


@_opaque_words.register_fake
def _(key: Tensor, place: Tensor, rows: int, columns: int, purpose: int, row_of: Tensor | None = None) -> Tensor:
    return key.new_empty((*key.shape[:-1], rows, columns))


def thresholds(draws: Draws, rows: int, columns: int, bits: int = MOST_BITS) -> Tensor:
    """Return for each element what stochastic rounding compares its fraction f of a step with: see `thresholds_of`."""
    return thresholds_of(random_words(draws, rows, columns), bits)


def thresholds_of(words: Tensor, bits: int) -> Tensor:
    """Return thresholds that follow from random words, float32; a fraction f of a step above its threshold rounds up.

    A threshold is u, the upper bits of the word over 2^bits, so that the mean is f. With fewer than 24 bits it is the
    float below u + 2^-bits, so that f is first rounded down to that many bits, as by Transformer Engine.
    """
    words = words >> (32 - bits)
    if bits == MOST_BITS:
        return words.to(torch.float32) * 2.0**-bits
    above = (words + 1).to(torch.float32) * 2.0**-bits
    return (above.view(torch.int32) - 1).view(torch.float32)


# ------------------------------------------------------------------------------------------------------- random streams

STREAMS = (*OPERANDS, *TRANSFORMS)  # the random streams of a linear; each has its own key
CALL, STEP, SEED = range(3)  # rows of Random.places: numbers are new for each micro-batch, for each step, or never
PLACE_OF_SIGNS = {"call": CALL, "step": STEP, "seed": SEED}  # by `Hadamard.signs`


class Random(NamedTuple):
    """The source of a linear's random numbers, as tensors on its device, so that nothing recompiles.

    `keys`: int64 [STREAMS, 2], or [STREAMS, S, 2] for a stack. `places`: int64 [3, 2], or [3, S, 2] for a stack, the
    rows CALL (the step and the first row of the current tokens), STEP (the step and row 0) and SEED (zeros).
    """

    keys: Tensor
    places: Tensor


def draws_of_operand(random: Random | None, operand: str) -> Draws:
    """Return the draws of an operand's rounding; those of a weight are the same in all micro-batches of a step."""
    return draws_of(random, operand, STEP if operand.endswith("_w") else CALL)


def draws_of(random: Random | None, stream: str, place: int) -> Draws:
    """Return the draws of a stream at a place: CALL, STEP or SEED. Raises ConfigError without a source of them."""
    require(random is not None, f"{stream}: it takes random numbers, and there is no seed; give the linear one")
    assert random is not None
    return Draws(random.keys[STREAMS.index(stream)], random.places[place])


def signs_of(transform: Hadamard, stream: str, random: Random | None, device: torch.device) -> Tensor | None:
    """Return the signs of a GEMM's transform, float32 [size] or, for a stack, [S, 1, size], or None if it has none."""
    if transform.vector:
        return written_signs(transform.vector, device)
    if transform.signs == "none":
        return None
    return random_signs(draws_of(random, stream, PLACE_OF_SIGNS[transform.signs]), transform.size)


@constant
def written_signs(vector: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the signs that a recipe states as numbers: float32 [size] on the device, made once per process."""
    return _written_signs(vector, device)


@functools.cache
def _written_signs(vector: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(vector, dtype=torch.float32, device=device)

"""The set of digests agrees with Python's own set."""

import hashlib

import numpy as np
import pytest
from each import each

from mxstudy.data.content_hash import for_validation
from mxstudy.data.duplicates import FULLEST, DigestSet


def digests(texts) -> list[bytes]:
    return [hashlib.sha256(str(text).encode()).digest() for text in texts]


@pytest.mark.integration
def test_as_a_set_of_python_would():
    seen, reference = DigestSet(), set()
    rng = np.random.default_rng(0)
    for number in range(60):
        batch = digests(rng.integers(0, 150_000, 4000).tolist())
        expected = []
        for digest in batch:
            expected.append(digest not in reference)
            reference.add(digest)
        assert seen.add(b"".join(batch)).tolist() == expected, number
    assert seen.size == len(reference) > 65_536
    assert len(reference) <= FULLEST * len(seen.slots)
    assert seen.slots.nbytes / len(reference) < 43
    assert seen.add(b"").tolist() == []


@pytest.mark.integration
def test_collisions_are_told_apart():
    """All digests want the same slot, and one begins with the zeros that mark a free slot."""
    keys = np.zeros((3000, 4), np.uint64)
    keys[:, 0] = np.arange(3000)
    keys[0, 2] = 9  # a part that is not compared
    keys[1, 0] = 3000
    assert DigestSet().add(keys.tobytes()).all()
    assert DigestSet().add(np.concatenate([keys, keys]).tobytes()).tolist() == [True] * 3000 + [False] * 3000


@each("fraction", [0.0, 0.02, 0.5, 0.999])
def test_the_split_is_the_first_64_bits_over_2_to_the_64(fraction):
    batch = [*digests(range(2000)), bytes(32), b"\xff" * 32]
    expected = [int.from_bytes(digest[:8], "big") / 2**64 < fraction for digest in batch]
    assert for_validation(b"".join(batch), fraction).tolist() == expected

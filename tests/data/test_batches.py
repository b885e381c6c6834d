"""Sample i of step s depends on (data_seed, s, i) alone; an epoch visits every window once."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from each import each

from mxstudy.config import Blend, Phase, PySource, blend_of
from mxstudy.data.batches import Batches
from mxstudy.data.permutation import permute
from mxstudy.data.sampling import Sampling
from mxstudy.data.shards import Shards
from mxstudy.reader import ConfigError


def shards_of(folder: Path, train: int, validation: int = 0, file_tokens: int = 10**6) -> Shards:
    """Return shards whose tokens are 0, 1, 2, ... (training) and 10000, 10001, ... (validation)."""
    files = {}
    for split, ids in {"train": np.arange(train), "validation": 10_000 + np.arange(validation)}.items():
        for number, start in enumerate(range(0, len(ids), file_tokens)):
            path = folder / f"{split}-{number:05d}.bin"
            path.write_bytes(ids[start : start + file_tokens].astype("<u2").tobytes())
            files[path.name] = {"bytes": path.stat().st_size}
    manifest = {"dtype": "<u2", "files": files, "tokenizer": {"vocab_size": 20_000}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return Shards(folder, manifest)


def one_corpus(shards: Shards, sequence_length: int, batch_size: int, data_seed: int) -> Batches:
    return Batches({"pysource": shards}, Sampling(blend_of(PySource()), 1000, batch_size, data_seed), sequence_length)


def first_tokens(batches: Batches, steps: range) -> list[int]:
    return [int(row[0]) for step in steps for row in batches.train(step)[0]]


def test_shapes_types_and_shift(tmp_path):
    tokens_BT, targets_BT = one_corpus(shards_of(tmp_path, 1001), 10, 4, data_seed=0).train(3)
    assert tokens_BT.shape == targets_BT.shape == (4, 10)
    assert tokens_BT.dtype == targets_BT.dtype == torch.int64
    assert tokens_BT.is_contiguous()
    assert targets_BT.is_contiguous()
    assert torch.equal(targets_BT, tokens_BT + 1)
    assert (tokens_BT[:, 0] % 10 == 0).all()


def test_any_slice_at_any_time_is_the_slice_of_the_batch(tmp_path):
    shards = shards_of(tmp_path, 501)
    whole = one_corpus(shards, 10, 8, data_seed=1)
    expected = {step: whole.train(step) for step in range(20)}
    for step in (19, 0, 7, 6, 13):
        for start, stop in ((0, 8), (0, 4), (4, 8), (5, 6), (3, None)):
            tokens_BT, targets_BT = one_corpus(shards, 10, 8, data_seed=1).train(step, start, stop)
            assert torch.equal(tokens_BT, expected[step][0][start:stop])
            assert torch.equal(targets_BT, expected[step][1][start:stop])


@pytest.mark.integration
@pytest.mark.parametrize("windows", [1, 2, 7, 50, 64, 65])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_every_window_once_an_epoch_and_epochs_run_on(tmp_path, windows, batch_size):
    batches = one_corpus(shards_of(tmp_path, windows * 10 + 1), 10, batch_size, data_seed=3)
    steps = -(-3 * windows // batch_size)
    samples = first_tokens(batches, range(steps))
    for epoch in range(3):
        assert sorted(samples[epoch * windows : (epoch + 1) * windows]) == list(range(0, windows * 10, 10))


def test_order_depends_on_seed_and_epoch_not_on_batch_size(tmp_path):
    shards = shards_of(tmp_path, 1001)
    order = first_tokens(one_corpus(shards, 10, 10, data_seed=0), range(20))
    assert order == first_tokens(one_corpus(shards, 10, 20, data_seed=0), range(10))
    assert order[:100] != order[100:]
    assert order != first_tokens(one_corpus(shards, 10, 10, data_seed=1), range(20))
    assert order[:100] != sorted(order[:100])


def test_windows_cross_files(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    one = one_corpus(shards_of(tmp_path / "one", 401, 95), 10, 40, data_seed=0)
    many = one_corpus(shards_of(tmp_path / "many", 401, 95, file_tokens=7), 10, 40, data_seed=0)
    assert len(many.train_tokens[0].files) == 58
    for ours, theirs in zip(one.train(0) + one.validation(9), many.train(0) + many.validation(9), strict=True):
        assert torch.equal(ours, theirs)
    assert many.train_tokens[0][5:5].tolist() == []
    assert many.train_tokens[0][6:22].tolist() == list(range(6, 22))
    assert many.train_tokens[0][-2:].tolist() == [399, 400]


def test_validation_is_spread_over_its_split(tmp_path):
    batches = one_corpus(shards_of(tmp_path, 11, 95), 10, 1, data_seed=0)
    tokens_BT, targets_BT = batches.validation(9)
    assert torch.equal(tokens_BT.flatten(), 10_000 + torch.arange(90))
    assert torch.equal(targets_BT, tokens_BT + 1)
    assert tokens_BT.dtype == torch.int64
    assert torch.equal(batches.validation(2)[0], tokens_BT[[0, 4]])
    assert torch.equal(batches.validation(3)[0], tokens_BT[[0, 3, 6]])
    assert batches.validation(0)[0].shape == (0, 10)


def test_too_few_tokens_are_refused(tmp_path):
    shards = shards_of(tmp_path, 11, 95)
    assert one_corpus(shards, 10, 4, data_seed=0).windows == [1]
    with pytest.raises(ConfigError, match="shorter than one sequence: 11 tokens, but 11 \\+ 1 are needed"):
        one_corpus(shards, 11, 4, data_seed=0)
    with pytest.raises(
        ConfigError,
        match=r"validation\.sequences: 10 sequences of 10 tokens are more than the 9 .*\(data\.validation_paths\)$",
    ):
        one_corpus(shards, 10, 4, data_seed=0).validation(10)


@each("size", [1, 2, 3, 4, 5, 16, 17, 1000, 4096, 4097])
@each("seed", [0, 1, -1, 2**64 - 1])
def test_permutation_is_a_bijection(size, seed):
    index = np.arange(size, dtype=np.uint64)
    for epoch in (0, 1, 2**40):
        assert sorted(permute(index, size, seed, np.full_like(index, epoch))) == list(range(size))


def test_permutation_needs_no_table():
    size = 2**52 + 3
    index = np.array([0, 1, size - 1], dtype=np.uint64)
    drawn = permute(index, size, 0, np.zeros_like(index))
    assert len(set(drawn.tolist())) == 3
    assert (drawn < size).all()


@pytest.mark.parametrize("size", [10, 100])
def test_permutations_of_epochs_are_uniform(size):
    """Over many epochs, chi-square holds the places of windows 0 and 1, and their distance, against uniform ones."""
    epochs = np.arange(20_000, dtype=np.uint64)
    first, second = (permute(np.full_like(epochs, i), size, 0, epochs).astype(np.int64) for i in (0, 1))
    for draws, bins in ((first, size), (second, size), ((first - second) % size - 1, size - 1)):
        expected = len(epochs) / bins
        chi2 = ((np.bincount(draws, minlength=bins) - expected) ** 2 / expected).sum()
        assert abs(chi2 - (bins - 1)) < 5 * np.sqrt(2 * (bins - 1))


# ------------------------------------------------------------------------------------------------- several corpora

BLEND = Blend(
    corpora={"a": PySource(), "b": PySource(include_site_packages=True)},
    phases=(Phase(weights={"a": 3, "b": 1}), Phase(from_fraction=0.5, weights={"b": 1})),
)


@pytest.fixture
def blended(tmp_path: Path) -> Batches:
    """Return batches of two corpora, a and b.

    a has 50 windows in training and 9 in validation, b has 30 and 12, and its tokens are 5000 more.
    """
    shards = {}
    for name, train, validation in (("a", 501, 95), ("b", 301, 125)):
        (tmp_path / name).mkdir()
        shards[name] = shards_of(tmp_path / name, train, validation)
    batches = Batches(shards, Sampling(BLEND, 20, 8, data_seed=2), 10)
    batches.train_tokens[1] = batches.train_tokens[1][:] + np.uint16(5000)
    return batches


def test_one_corpus_has_the_order_that_it_always_had(tmp_path):
    """Sample n is window n % windows in the order of epoch n // windows."""
    windows, batch_size = 50, 8
    n = np.arange(200 * batch_size, dtype=np.uint64)
    order = permute(n % np.uint64(windows), windows, 7, n // np.uint64(windows))
    batches = one_corpus(shards_of(tmp_path, windows * 10 + 1), 10, batch_size, data_seed=7)
    assert first_tokens(batches, range(200)) == (10 * order.astype(int)).tolist()


def test_a_corpus_goes_on_where_it_stopped_when_the_blend_changes(blended):
    samples = first_tokens(blended, range(20))
    in_a, in_b = ([n for n in samples if (n >= 5000) == of_b] for of_b in (False, True))
    assert [n for n in samples[80:] if n < 5000] == []
    assert (len(in_a), len(in_b)) == (60, 100)
    assert sorted(in_a[:50]) == list(range(0, 500, 10))
    for epoch in range(3):  # the second begins in the last steps of the first phase or the first steps of the second
        assert sorted(in_b[30 * epoch : 30 * epoch + 30]) == list(range(5000, 5300, 10))


def test_ranks_and_micro_batches_take_slices_of_a_blended_batch(blended):
    for step in (9, 10, 0, 19):
        tokens_BT, targets_BT = blended.train(step)
        for size in (1, 2, 4):
            parts = [blended.train(step, start, start + size) for start in range(0, 8, size)]
            assert torch.equal(torch.cat([part[0] for part in parts]), tokens_BT)
            assert torch.equal(torch.cat([part[1] for part in parts]), targets_BT)
        assert torch.equal(targets_BT, tokens_BT + 1)


def test_validation_has_the_training_s_share_of_each_corpus(blended):
    """60 of 160 samples are from a."""
    assert blended.validation_shares(16) == {"a": 6, "b": 10}
    tokens_BT = blended.validation(16)[0]
    assert tokens_BT[:6, 0].tolist() == [10_000 + 10 * (n * 9 // 6) for n in range(6)]
    assert tokens_BT[6:, 0].tolist() == [10_000 + 10 * (n * 12 // 10) for n in range(10)]
    assert blended.validation_shares(1) == {"a": 0, "b": 1}
    with pytest.raises(
        ConfigError, match="15 sequences of 10 tokens are more than the 12 that the validation split of b"
    ):
        blended.validation(24)


def test_what_was_taken_is_counted_in_tokens_and_epochs(blended):
    assert blended.taken(10) == {"a/tokens": 600, "a/epochs": 1.2, "b/tokens": 200, "b/epochs": 20 / 30}
    assert blended.taken(20) == {"a/tokens": 600, "a/epochs": 1.2, "b/tokens": 1000, "b/epochs": 100 / 30}

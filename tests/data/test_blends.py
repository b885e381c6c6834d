"""Several corpora have identities, one tokenizer, and shards, and errors name the corpus."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mxstudy import config
from mxstudy.config import Blend, Files, Phase
from mxstudy.data import blends, corpus
from mxstudy.reader import ConfigError

BPE = config.TrainedBPE(vocab_size=280)


def texts(folder: Path, name: str, word: str, documents: int = 60) -> Files:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": f"{word} {n} " * 9}) + "\n" for n in range(documents)))
    return Files(format="jsonl", paths=(str(path),), validation_fraction=0.2)


@pytest.fixture
def two(tmp_path: Path) -> Blend:
    return Blend(
        corpora={"a": texts(tmp_path, "a", "alpha"), "b": texts(tmp_path, "b", "beta")},
        phases=(Phase(weights={"a": 1, "b": 3}), Phase(from_fraction=0.5, weights={"a": 1})),
    )


def silent(line: str) -> None:
    """Print nothing."""


def test_the_identity_has_that_of_each_corpus_and_of_one_alone_is_its_own(two: Blend) -> None:
    found = blends.identity(two, config.Bytes())
    assert found["corpora"] == {name: corpus.identity(one) for name, one in two.corpora.items()}
    alone = blends.identity(two.corpora["a"], config.Bytes())
    assert alone == corpus.identity(two.corpora["a"]) | {"tokenizer": {"kind": "bytes"}}


def test_all_corpora_have_the_tokenizer_of_the_largest_in_the_first_phase(two: Blend, tmp_path: Path) -> None:
    assert set(blends.locate(two, BPE, tmp_path)) == {"b"}  # the tokenizer of the other one is not known yet
    prepared = dict(blends.prepare(two, BPE, tmp_path, silent))
    assert list(prepared) == ["b", "a"]
    tokenizers = [one.tokenizer() for one in prepared.values()]
    assert len({one.identity for one in tokenizers}) == 1
    assert len(tokenizers[0].encode_batch(["beta"])[0]) < len(tokenizers[0].encode_batch(["alpha"])[0])
    assert blends.locate(two, BPE, tmp_path) == {name: one.folder for name, one in prepared.items()}
    alone = dict(blends.prepare(two.corpora["b"], BPE, tmp_path, silent))
    assert alone["files"] == prepared["b"]  # not made a second time


@pytest.mark.integration
def test_shards_are_the_same_whoever_tokenises(two: Blend, tmp_path: Path) -> None:
    alone, together = (dict(blends.prepare(two, BPE, tmp_path / str(n), silent, workers=n)) for n in (0, 2))
    for name in two.corpora:
        assert alone[name].manifest["files"] == together[name].manifest["files"]


def test_the_manifest_of_one_corpus_is_as_it_was_and_of_several_has_each(two: Blend, tmp_path: Path) -> None:
    prepared = dict(blends.prepare(two, config.Bytes(), tmp_path, silent))
    one = {"a": prepared["a"]}
    assert blends.manifest_of(one) == prepared["a"].manifest
    whole = blends.manifest_of(prepared)
    assert whole == {"corpora": {name: prepared[name].manifest for name in ("a", "b")}}
    assert blends.manifests_in(whole) == list(whole["corpora"].values())
    assert blends.manifests_in(blends.manifest_of(one)) == [prepared["a"].manifest]


def test_the_unigram_entropy_is_that_of_the_mixture(tmp_path: Path) -> None:
    corpora = {}
    for name, text in (("a", "xx"), ("b", "yyyz")):
        (tmp_path / f"{name}.txt").write_text(text)
        corpora[name] = Files(format="text", paths=(str(tmp_path / f"{name}.txt"),), validation_fraction=0.0)
    blend = Blend(corpora=corpora, phases=(Phase(weights={"a": 1, "b": 1}),))
    prepared = dict(blends.prepare(blend, config.Bytes(), tmp_path, silent))
    x, y, z, eos = 0.25 * 2 / 3, 0.75 * 3 / 5, 0.75 / 5, 0.25 / 3 + 0.75 / 5
    p = np.array([x, y, z, eos])
    found = blends.unigram_entropy_nats(prepared, {"a": 16, "b": 48}, "train")
    assert found == pytest.approx(-(p * np.log(p)).sum(), rel=1e-12)
    p = np.array([2, 1]) / 3
    assert blends.unigram_entropy_nats(prepared, {"a": 64, "b": 0}, "train") == pytest.approx(-(p * np.log(p)).sum())


def test_an_error_names_the_corpus(two: Blend, tmp_path: Path) -> None:
    Path(two.corpora["b"].paths[0]).unlink()  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"^data\.corpora\.b\.paths: .* does not exist"):
        blends.identity(two, config.Bytes())
    with pytest.raises(ConfigError, match=r"^data\.corpora\.b\.paths: .* does not exist"):
        blends.locate(two, config.Bytes(), tmp_path)
    with pytest.raises(ConfigError, match=r"^data\.paths: .* does not exist"):
        blends.identity(two.corpora["b"], config.Bytes())
    (tmp_path / "b.jsonl").write_text('{"content": "x"}\n')
    with pytest.raises(ConfigError, match=r"^data\.corpora\.b\.text_field: .* has no column 'text'"):
        blends.check(two, config.Bytes(), tmp_path)


def test_a_text_that_one_corpus_divides_is_not_another_ones_to_train_on(tmp_path: Path) -> None:
    for name in ("book.txt", "copy.txt", "other.txt"):
        (tmp_path / name).write_text("another text" if name == "other.txt" else "one text")
    book = Files(format="text", paths=(str(tmp_path / "book.txt"),))
    copy = Files(format="text", paths=(str(tmp_path / "copy.txt"),))
    more = Files(format="text", paths=(str(tmp_path / "[co]*.txt"),))

    def blended(other: Files) -> Blend:
        return Blend(corpora={"a": book, "b": other}, phases=(Phase(weights={"a": 1, "b": 1}),))

    blends.identity(blended(copy), config.Bytes())  # divides the text at the same place
    message = r"^data\.corpora: b has a text of which a keeps the last part for validation; leave it out of one of them"
    with pytest.raises(ConfigError, match=message):
        blends.identity(blended(more), config.Bytes())

"""Choose and check the documents and windows of a perplexity run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from mxstudy.config import Corpus, Data, Files, Perplexity, blend_of
from mxstudy.data import corpus
from mxstudy.data.content_hash import sha256_once
from mxstudy.evaluation.checkpoints import Trained
from mxstudy.reader import changed, require

CHUNK_CHARACTERS = 2**19  # the documents of a chunk are scored and saved together


class Document(NamedTuple):
    """A document, its chunk, and its number in its split, from 0."""

    chunk: int
    number: int
    text: str


class Windows(NamedTuple):
    """Length and stride of sliding windows, in tokens."""

    length: int
    stride: int


def check_split(config: Perplexity, trained: Trained) -> None:
    """Raise ConfigError if the validation split may contain documents that the model was trained on.

    A smaller validation fraction selects a subset of a larger one. Files are recognised by their contents.
    """
    asked = config.data.validation_fraction
    require(
        config.split != "all" or asked == Corpus().validation_fraction,
        f"data.validation_fraction: {asked} has no effect, because split=all takes every document; leave it out",
    )
    if config.split != "validation" or trained.data is None:
        return
    if isinstance(config.data, Files):
        require(
            bool(config.data.validation_paths) or not getattr(trained.data, "validation_paths", ()),
            f"data.validation_paths: {trained.name} kept its validation_paths out of the training; name them, or use "
            "split=all for another corpus",
        )
        check_files(config.data, trained)
        if config.data.validation_paths:
            return
    if type(config.data) in map(type, blend_of(trained.data).corpora.values()):
        held_out = trained.data.validation_fraction
        require(
            asked <= held_out,
            f"data.validation_fraction: {asked} is more than the {held_out} that {trained.name} was trained without; "
            f"use data.validation_fraction={held_out}, or split=all for another corpus",
        )


def check_files(data: Files, trained: Trained) -> None:
    """Raise ConfigError if a file was trained on, unless the training split its file or files in the same way."""
    for known in trained.corpora:
        if known["kind"] != "files":
            continue
        asked = corpus.LocalFiles(data)
        is_split_alike = not asked.validation_paths and asked.is_cut == ("split" in known)
        for path in asked.validation_paths or asked.paths:
            require(
                is_split_alike or sha256_once(path) not in known["sha256"],
                f"split: {trained.name} was trained on {path}, which that training did not split in this way, so text "
                "of it may be known to the model; name the files of the training, or use split=all",
            )


def windows_of(config: Perplexity, trained: Trained) -> Windows:
    """Return the windows. Raises ConfigError if they are longer than the training sequences, or skip tokens."""
    length = config.window or trained.max_length
    stride = config.stride or max(length // 2, 1)
    require(
        length <= trained.max_length,
        f"window: {length} tokens are more than the {trained.max_length} that {trained.name} was trained on; "
        f"use at most window={trained.max_length}, or null",
    )
    require(
        stride <= length,
        f"stride: {stride} tokens would skip tokens between windows of {length}; use at most stride={length}",
    )
    return Windows(length, stride)


def corpus_of(config: Perplexity) -> Data:
    """Return the corpus; with split=all, one that keeps nothing for validation, so that no file is cut in two."""
    if config.split == "all" and isinstance(config.data, Files) and not config.data.validation_paths:
        return changed(config.data, validation_fraction=0.0)
    return config.data


def documents_of(config: Perplexity) -> Iterator[Document]:
    """Yield the first documents of the split, each text once; a document's chunk depends only on those before it."""
    documents = corpus.unique_documents(corpus_of(config))
    texts = (text for split, text in documents if config.split in ("all", split))
    characters = 0
    for number, text in enumerate(itertools.islice(texts, config.documents)):
        yield Document(characters // CHUNK_CHARACTERS, number, text)
        characters += len(text)

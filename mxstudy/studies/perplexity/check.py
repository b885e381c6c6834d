"""Which documents and windows a checkpoint reads, and whether the corpus has them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from mxstudy.config import Corpus, Perplexity
from mxstudy.data import corpus
from mxstudy.evaluation.checkpoints import Trained
from mxstudy.reader import require

CHUNK_CHARACTERS = 2**19  # of documents that are scored, and kept, together


class Document(NamedTuple):
    """`number`: in its split, from 0."""

    chunk: int
    number: int
    text: str


class Windows(NamedTuple):
    """In tokens."""

    length: int
    stride: int


def check_split(config: Perplexity, trained: Trained) -> None:
    """That no document counts as held out that the model was trained on: a smaller share is a part of a larger one."""
    asked = config.data.validation_fraction
    require(
        config.split != "all" or asked == Corpus().validation_fraction,
        f"data.validation_fraction: {asked} decides nothing, for split=all takes every document; leave it out",
    )
    if config.split == "validation" and type(config.data) is type(trained.data):
        held_out = trained.data.validation_fraction
        require(
            asked <= held_out,
            f"data.validation_fraction: {asked} is more than the {held_out} that {trained.name} was trained without; "
            f"data.validation_fraction={held_out} is its own, and of another corpus split=all takes every document",
        )


def windows_of(config: Perplexity, trained: Trained) -> Windows:
    """Raises ConfigError for windows that the model was not trained on, and for a stride that leaves tokens out."""
    length = config.window or trained.max_length
    stride = config.stride or max(length // 2, 1)
    require(
        length <= trained.max_length,
        f"window: {length} tokens are more than the {trained.max_length} that {trained.name} was trained on; "
        f"window={trained.max_length}, or null, is the longest",
    )
    require(
        stride <= length,
        f"stride: {stride} tokens would leave some out between windows of {length}; at most stride={length}",
    )
    return Windows(length, stride)


def documents_of(config: Perplexity) -> Iterator[Document]:
    """The first documents of the split, each text once; a document's chunk depends on what is before it alone."""
    found = corpus.unique_documents(config.data)
    texts = (text for split, text in found if config.split in ("all", split))
    characters = 0
    for number, text in enumerate(itertools.islice(texts, config.documents)):
        yield Document(characters // CHUNK_CHARACTERS, number, text)
        characters += len(text)

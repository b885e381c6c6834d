"""Whether a checkpoint can read a corpus, and which of both they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from mxstudy.config import Corpus, Perplexity
from mxstudy.data import corpus
from mxstudy.evaluation.checkpoints import Trained
from mxstudy.reader import require
from mxstudy.studies.trained_model import backend as backend
from mxstudy.studies.trained_model import check_model, identity_of
from mxstudy.studies.trained_model import pinned as pinned

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


def check(config: Perplexity) -> None:
    """That there is such a checkpoint, that norm, precision, windows and split fit it, and that there is text."""
    trained = check_model(config)
    windows_of(config, trained)
    check_split(config, trained)
    remedy = "the corpus has no text" if config.split == "all" else "split=all takes every document"
    require(
        next(documents_of(config), None) is not None,
        f"split: no document of the corpus is in its {config.split} split; {remedy}",
    )


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


def identity_key(config: Perplexity) -> Any:
    return config.checkpoint, config.runs_dir, config.device, config.data


def identity(config: Perplexity) -> tuple[str, dict[str, Any]]:
    return identity_of(config, corpus=corpus.identity(config.data))


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

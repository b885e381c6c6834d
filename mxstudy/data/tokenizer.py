"""Tokenizers between text and ids: bytes, a BPE trained on the corpus, or any tokenizer.json.

Every kind consists of a `tokenizers.Tokenizer` and the id that ends a document, and can be saved as a tokenizer.json
that gives the same ids anywhere. Special tokens are never recognised in a document's text nor added to it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from mxstudy import config
from mxstudy.config import hashed
from mxstudy.reader import ConfigError, require
from mxstudy.whole_files import replace_file

EOS = "<|endoftext|>"
USUAL_EOS = (EOS, "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer:
    """A tokenizer. `vocab_size`: largest id + 1. `identity`: sha256 of the tokenizer.json that `save` writes."""

    def __init__(self, backend: tokenizers.Tokenizer, eos_token: str = EOS) -> None:
        eos_id = backend.token_to_id(eos_token)
        assert eos_id is not None, f"{eos_token!r} is not in the vocabulary"
        backend.encode_special_tokens = True  # a document that spells "<|endoftext|>" does not end there
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.eos_token = eos_token
        self.eos_id = eos_id
        self.vocab_size = max(backend.get_vocab().values()) + 1
        self.json = backend.to_str()
        self.identity = hashlib.sha256(self.json.encode()).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as JSON, which holds the whole tokenizer."""
        return from_json, (self.json, self.eos_token)

    @property
    def splits_at_spaces(self) -> bool:
        """Return whether text that begins with a space is known to get the same ids alone as after any other text.

        The text before must not end in whitespace. GPT-2's pattern, of byte-level tokenizers, ends a word there,
        and each word is tokenised alone. A normalizer, a prefix or an added token could look across words.
        """
        backend, words = self.backend, self.backend.pre_tokenizer
        added = backend.get_added_tokens_decoder().values()
        return (
            isinstance(words, pre_tokenizers.ByteLevel)
            and words.use_regex
            and not words.add_prefix_space
            and backend.normalizer is None
            and all(token.special for token in added)
        )

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text without EOS, uint32 [tokens] (uint8 for bytes); parallel on all cores."""
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def save(self, path: Path) -> None:
        """Write tokenizer.json atomically."""
        replace_file(path, self.json)


class ByteTokenizer(Tokenizer):
    """Bytes as ids: id b is byte b, 256 is EOS; the ids that `tokenizers` gives without merges, at memory speed."""

    def __init__(self) -> None:
        vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
        backend = byte_level(models.BPE(vocab=vocabulary, merges=[]))
        backend.add_special_tokens([EOS])
        super().__init__(backend)

    def __reduce__(self) -> tuple[Any, ...]:
        return ByteTokenizer, ()

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


def byte_characters() -> list[str]:
    """Return GPT-2's character for each byte: the byte itself if printable, else a character from code point 256 on."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printing else next(others)) for byte in range(256)]


def byte_level(model: models.Model) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def load_tokenizer(
    tokenizer: config.Tokenizer, train_texts: Callable[[], Iterator[str]], cache_path: Path
) -> Tokenizer:
    """Return the tokenizer of a config; a BPE is read from `cache_path`, or trained on `train_texts` and saved there.

    Raises ConfigError for a pretrained tokenizer that is not found or whose EOS token is not known.
    """
    if isinstance(tokenizer, config.Bytes):
        return ByteTokenizer()
    if isinstance(tokenizer, config.Pretrained):
        return load_pretrained(tokenizer)
    if not cache_path.exists():
        train_bpe(tokenizer, train_texts()).save(cache_path)
    return open_tokenizer(cache_path)


def open_tokenizer(path: Path, eos_token: str = EOS) -> Tokenizer:
    """Return the tokenizer that `Tokenizer.save` wrote."""
    return Tokenizer(tokenizers.Tokenizer.from_file(str(path)), eos_token)


def identity(tokenizer: config.Tokenizer) -> dict[str, Any]:
    """Return what determines the ids beside the corpus, as plain data; a pretrained tokenizer by content, not path."""
    if isinstance(tokenizer, config.Pretrained):
        loaded = load_pretrained(tokenizer)
        return {"kind": tokenizer.kind, "sha256": loaded.identity, "eos_token": loaded.eos_token}
    return hashed(tokenizer)


def from_json(json: str, eos_token: str) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(json), eos_token)


def train_bpe(tokenizer: config.TrainedBPE, texts: Iterator[str]) -> Tokenizer:
    """Train a byte-level BPE; the ids depend on the texts alone. A small corpus gives fewer ids than `vocab_size`."""
    backend = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=tokenizer.vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(first_bytes(texts, tokenizer.train_bytes), trainer)
    return Tokenizer(backend)


def first_bytes(texts: Iterator[str], size: int) -> Iterator[str]:
    """Yield texts up to `size` bytes of UTF-8 in all; the last one is cut at a character boundary."""
    for text in texts:
        content = text.encode()[:size]
        yield content.decode(errors="ignore")
        size -= len(content)
        if size == 0:
            return


def load_pretrained(tokenizer: config.Pretrained) -> Tokenizer:
    backend = find_pretrained(tokenizer.name)
    candidates = USUAL_EOS if tokenizer.eos_token is None else (tokenizer.eos_token,)
    present = [token for token in candidates if backend.token_to_id(token) is not None]
    require(
        bool(present),
        f"tokenizer.eos_token: {tokenizer.name!r} has none of {', '.join(map(repr, candidates))}; "
        f"set it to the token that ends a document, perhaps one of its special tokens: {special_tokens(backend)}",
    )
    return Tokenizer(backend, present[0])


def find_pretrained(name: str) -> tokenizers.Tokenizer:
    """Return the tokenizer named by a file, a folder, or else a repository on the Hugging Face hub."""
    path = Path(name, "tokenizer.json") if os.path.isdir(name) else Path(name)
    local = os.path.exists(name)
    require(bool(name.strip()), f"tokenizer.name: must name a file, a folder or a tokenizer on the hub, not {name!r}")
    require(not local or path.is_file(), f"tokenizer.name: {path} is no file; give a tokenizer.json, or its folder")
    try:
        return tokenizers.Tokenizer.from_file(str(path)) if local else tokenizers.Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises nothing narrower
        problem = "is not a tokenizer.json" if local else "is neither a local path nor found on the Hugging Face hub"
        raise ConfigError(f"tokenizer.name: {name!r} {problem}: {error}") from error


def special_tokens(backend: tokenizers.Tokenizer) -> str:
    added = backend.get_added_tokens_decoder().values()
    return ", ".join(token.content for token in added if token.special) or "it has none"

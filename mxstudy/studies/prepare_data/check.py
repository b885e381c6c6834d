"""Whether a corpus can be had, and which it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mxstudy.config import PrepareData
from mxstudy.data import corpus, tokenizer
from mxstudy.data.shards import locate


def check(config: PrepareData) -> None:
    """That the corpus, unless it is prepared already, can be had and has text where it is said to be."""
    if not locate(config.data, config.tokenizer, Path(config.cache_dir))[0].exists():
        corpus.check(config.data)


def identity_key(config: PrepareData) -> Any:
    return config.data, config.tokenizer


def identity(config: PrepareData) -> tuple[str, dict[str, Any]]:
    """Always on the CPU."""
    return "cpu", corpus.identity(config.data) | {"tokenizer": tokenizer.identity(config.tokenizer)}

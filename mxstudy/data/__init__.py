"""Data: a corpus, a tokenizer, the shards that both give, and batches of them."""

from mxstudy.data.batches import Batches
from mxstudy.data.shards import Shards, prepare, verify
from mxstudy.data.tokenizer import Tokenizer

__all__ = ["Batches", "Shards", "Tokenizer", "prepare", "verify"]

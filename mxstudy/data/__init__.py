"""Data: a corpus, a tokenizer, the shards made from both, and batches drawn from the shards.

This file imports nothing: batches need torch, and the processes that tokenise start faster without it.
"""

"""Data: a corpus, a tokenizer, the shards that both give, and batches of them.

Nothing is imported here: batches need torch, and the processes that tokenise start sooner without it.
"""

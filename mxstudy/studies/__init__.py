"""Kinds of run, by `study` of their config. Each has check, identity_key, identity, run and summarize."""

from types import ModuleType

from mxstudy.studies import approximation, evaluate, perplexity, pretrain

STUDIES: dict[str, ModuleType] = {
    "pretrain": pretrain,
    "approximation": approximation,
    "evaluate": evaluate,
    "perplexity": perplexity,
}

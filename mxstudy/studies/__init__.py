"""Kinds of run, by `study` of their config. Each module has check, identity, run and summarize."""

from types import ModuleType

from mxstudy.studies import pretrain

STUDIES: dict[str, ModuleType] = {"pretrain": pretrain}

"""Kinds of run, by `study` of their config. Each has check, identity_key, identity, run and summarize."""

from types import ModuleType

from mxstudy.studies import approximation, evaluate, fork, perplexity, prepare_data, pretrain, student_teacher

STUDIES: dict[str, ModuleType] = {
    "pretrain": pretrain,
    "prepare_data": prepare_data,
    "student_teacher": student_teacher,
    "fork": fork,
    "approximation": approximation,
    "evaluate": evaluate,
    "perplexity": perplexity,
}

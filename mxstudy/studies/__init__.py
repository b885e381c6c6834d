"""Kinds of run, by `study` of their config: a `Study` each, in a file or folder of its own."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mxstudy.studies.protocol import Study

MODULES = {
    "pretrain": "mxstudy.studies.pretrain.study",
    "evaluate": "mxstudy.studies.evaluate.study",
    "perplexity": "mxstudy.studies.perplexity.study",
    "prepare_data": "mxstudy.studies.prepare_data",
    "approximation": "mxstudy.studies.approximation.study",
    "student_teacher": "mxstudy.students.study",
    "fork": "mxstudy.students.fork.study",
}


def study_of(kind: str) -> Study[Any]:
    """Return the study of that name, imported when it is asked for: what all of them need takes seconds to import."""
    study: Study[Any] = import_module(MODULES[kind]).STUDY
    return study

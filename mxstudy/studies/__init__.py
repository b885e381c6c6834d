"""The kinds of run, each a `Study` in its own file or folder, by the name that `study` has in a config."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mxstudy.studies.protocol import Study

MODULES = {
    "pretrain": "mxstudy.studies.pretrain.study",
    "evaluate": "mxstudy.studies.evaluate.study",
    "perplexity": "mxstudy.studies.perplexity.study",
    "generate": "mxstudy.studies.generate",
    "prepare_data": "mxstudy.studies.prepare_data",
    "approximation": "mxstudy.studies.approximation.study",
    "student_teacher": "mxstudy.students.study",
    "fork": "mxstudy.students.fork.study",
}


def study_of(kind: str) -> Study[Any]:
    """Return the study of that name; it is imported only now, because importing all studies takes seconds."""
    study: Study[Any] = import_module(MODULES[kind]).STUDY
    return study

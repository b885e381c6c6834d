"""Kinds of run, by `study` of their config: a module each, with `run` and `summarize`. See also `checks`."""

from mxstudy.studies.kinds import Kinds

STUDIES = Kinds(__name__)

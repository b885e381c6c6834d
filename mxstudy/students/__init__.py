"""The student-teacher study: replicas of small MLPs that learn a fixed teacher (instability paper, section 4)."""

from mxstudy.students.model import ResidualMLP
from mxstudy.students.replicas import stack
from mxstudy.students.teacher import build_teacher

__all__ = ["ResidualMLP", "build_teacher", "stack"]

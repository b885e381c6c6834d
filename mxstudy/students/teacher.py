"""Teachers of the student-teacher study: fixed functions of Gaussian inputs, shared by all replicas."""

from __future__ import annotations

import typing
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mxstudy import config
from mxstudy.numerics.cast import BlockCast
from mxstudy.numerics.formats import look_up
from mxstudy.numerics.norm_linear import normalize, rms_exact
from mxstudy.reader import plain, read
from mxstudy.students.model import ResidualMLP


class Kind(NamedTuple):
    """How a teacher's model config differs from its student's, and whether every layer's rows are scaled to RMS 1."""

    changed: dict[str, object]
    scaled: bool = False


PUBLIC_CODE: dict[str, object] = {"residual": False, "expansion": 1, "attention_heads": 0, "sequence_length": 0}

TEACHERS = {
    # The teacher of the paper's public code: no residual, bias or attention, inner size D. It is nearly the zero
    # function: with four layers of GELU its output has a mean square of 1e-6.
    "code": Kind(PUBLIC_CODE),
    # The teacher of the paper's text: the student without its norms, with attention if the student has it.
    "paper": Kind({}),
    # The code's teacher, scaled so that there is something to learn. One factor per layer would not be enough: each
    # layer of SwiGLU squares its input, and after some layers a few rows dominate the RMS. It has no attention, which
    # without a residual averages a sequence's tokens until their targets are nearly the same.
    "scaled": Kind(PUBLIC_CODE, scaled=True),
}


class TeacherRounding(NamedTuple):
    """The student's cast settings and compute dtype, by which a quantised teacher rounds.

    `apply_precision` sets its formats, as it does the student's.
    """

    cast: BlockCast
    compute: torch.dtype


class Teacher(nn.Module):
    """Map x [T, D] to [T, D], both float32, without learned norms, with the student's size, depth and activation.

    It computes in FP32, or, if `quantized`, in the student's precision with vector operations in bf16 and GELU in its
    tanh form, as in the MX runs of the paper's public code. Raises ConfigError for a `kind` that TEACHERS lacks.
    """

    def __init__(self, kind: str, student: config.ResidualMLP, quantized: TeacherRounding | None = None) -> None:
        super().__init__()
        changed, self.scaled = look_up(TEACHERS, kind, "teacher")
        if quantized is None:
            self.mlp = ResidualMLP(like(student, **changed), None, BlockCast(), torch.float32)
        else:
            activation = {"gelu": "gelu_tanh"}.get(student.activation, student.activation)
            mlp = like(student, **changed, activation=activation)
            self.mlp = ResidualMLP(mlp, None, *quantized, vector_ops="bf16")
        self.mlp.requires_grad_(False)

    @torch.no_grad()
    def forward(self, x_TD: Tensor) -> Tensor:
        if not self.scaled:
            return self.mlp(x_TD)
        for layer in self.mlp.layers:
            y_TD = layer(x_TD)
            x_TD = normalize(y_TD, rms_exact(y_TD, eps=0.0))
        return x_TD


def like(student: config.ResidualMLP, **changed: object) -> config.ResidualMLP:
    """Return the student's config with these changes and torch's default initialisation."""
    return typing.cast(config.ResidualMLP, read(config.ResidualMLP, plain(student) | {"init": "torch"} | changed))


def build_teacher(
    kind: str,
    student: config.ResidualMLP,
    data_seed: int,
    quantized: TeacherRounding | None = None,
    redrawn: bool = False,
) -> Teacher:
    """Return a teacher whose weights depend on `data_seed` alone; `redrawn` gives other weights for the same seed."""
    with torch.device("meta"):
        teacher = Teacher(kind, student, quantized)
    teacher.to_empty(device="cpu")
    teacher.mlp.init_weights([data_seed], prefix="redrawn_teacher." if redrawn else "teacher.")
    return teacher

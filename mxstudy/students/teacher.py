"""Teachers of the student-teacher study: fixed functions of Gaussian inputs, one for all replicas."""

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
    """What a teacher has other than its student, and whether every layer's rows are brought to RMS 1."""

    changed: dict[str, object]
    scaled: bool = False


THE_CODES: dict[str, object] = {"residual": False, "expansion": 1, "attention_heads": 0, "sequence_length": 0}

TEACHERS = {
    # That of the paper's public code: no residual, no bias, no attention, inner size D. Nearly the zero function: with
    # four layers of GELU its output has a mean square of 1e-6.
    "code": Kind(THE_CODES),
    # That of the paper's text: the student without its norms, with attention if the student has it.
    "paper": Kind({}),
    # The code's, with something to learn. One factor a layer would not do: each layer of SwiGLU squares its input, and
    # after a few the RMS is that of a few rows. Nor would attention: without a residual it averages a sequence's tokens
    # until their targets are nearly the same.
    "scaled": Kind(THE_CODES, scaled=True),
}


class TeacherRounding(NamedTuple):
    """How the student's precision cuts and rounds; the formats are set as the student's are, by apply_precision."""

    cast: BlockCast
    compute: torch.dtype


class Teacher(nn.Module):
    """x [T, D] float32 -> [T, D] float32, without norms that learn; of `student`'s sizes, depth and activation.

    In FP32, or `quantized`: what the student's precision makes of it, with all that is no GEMM in bf16 and GELU in its
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
    """In torch's default initialisation whatever its own."""
    return typing.cast(config.ResidualMLP, read(config.ResidualMLP, plain(student) | {"init": "torch"} | changed))


def build_teacher(
    kind: str,
    student: config.ResidualMLP,
    data_seed: int,
    quantized: TeacherRounding | None = None,
    redrawn: bool = False,
) -> Teacher:
    """One whose weights depend on `data_seed` alone; if `redrawn`, others."""
    teacher = Teacher(kind, student, quantized)
    teacher.mlp.init_weights([data_seed], prefix="redrawn_teacher." if redrawn else "teacher.")
    return teacher

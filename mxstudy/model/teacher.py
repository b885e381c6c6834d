"""Teachers of the student-teacher study: fixed functions of Gaussian inputs, one for all replicas."""

from __future__ import annotations

import typing
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mxstudy import config
from mxstudy.model.residual_mlp import ResidualMLP
from mxstudy.numerics.cast import BlockCast
from mxstudy.numerics.formats import look_up
from mxstudy.numerics.norm import normalize, rms_exact
from mxstudy.reader import plain, read


class Teacher(nn.Module):
    """x [T, D] float32 -> [T, D] float32, without norms that learn. `scaled`: every layer's rows are brought to RMS 1.

    In FP32 unless a precision is applied to it. Its weights depend on `data_seed` alone.
    """

    def __init__(self, mlp: config.ResidualMLP, data_seed: int, scaled: bool = False) -> None:
        super().__init__()
        self.scaled = scaled
        self.mlp = ResidualMLP(mlp, None, BlockCast(), torch.float32)
        self.mlp.requires_grad_(False)
        self.mlp.init_weights([data_seed], prefix="teacher.")

    @torch.no_grad()
    def forward(self, x_TD: Tensor) -> Tensor:
        for layer in self.mlp.layers:
            y_TD = layer(x_TD)
            x_TD = normalize(y_TD, rms_exact(y_TD, eps=0.0)) if self.scaled else y_TD
        return x_TD


def like(student: config.ResidualMLP, **changed: object) -> config.ResidualMLP:
    """Of its sizes, depth and activation, in torch's default initialisation whatever its own."""
    return typing.cast(config.ResidualMLP, read(config.ResidualMLP, plain(student) | {"init": "torch"} | changed))


def code_teacher(student: config.ResidualMLP, data_seed: int) -> Teacher:
    """That of the paper's public code: no residual, no bias, inner size D.

    Nearly the zero function: with four layers of GELU its output has a mean square of 1e-6.
    """
    return Teacher(like(student, residual=False, expansion=1), data_seed)


def paper_teacher(student: config.ResidualMLP, data_seed: int) -> Teacher:
    """That of the paper's text: the student without its norm."""
    return Teacher(like(student), data_seed)


def scaled_teacher(student: config.ResidualMLP, data_seed: int) -> Teacher:
    """The code's, with something to learn: every layer's rows have RMS 1, and so has the output.

    One factor a layer would not do: each layer of SwiGLU squares its input, and after a few the RMS is that of a few
    rows.
    """
    return Teacher(like(student, residual=False, expansion=1), data_seed, scaled=True)


TEACHERS: dict[str, Callable[[config.ResidualMLP, int], Teacher]] = {
    "code": code_teacher,
    "paper": paper_teacher,
    "scaled": scaled_teacher,
}


def build_teacher(kind: str, student: config.ResidualMLP, data_seed: int) -> Teacher:
    """A row of TEACHERS; ConfigError with the nearest one where there is none."""
    return look_up(TEACHERS, kind, "teacher")(student, data_seed)

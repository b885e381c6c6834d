"""Constants of compiled graphs."""

from __future__ import annotations

import torch

from mxstudy.numerics.constant import constant


def test_it_marks_a_function_as_torch_does() -> None:
    def ours() -> int:
        return 1

    def torchs() -> int:
        return 1

    assert constant(ours) is ours
    assert vars(ours) == vars(torch.compiler.assume_constant_result(torchs)) != {}


def test_it_is_not_traced_into() -> None:
    @constant
    def length() -> int:
        return len(open(__file__).read())  # the compiler cannot trace this

    compiled = torch.compile(lambda x: x + length(), fullgraph=True, backend="eager")
    assert compiled(torch.zeros(())).item() == length()

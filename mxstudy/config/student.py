"""The schema of the student-teacher study's models."""

from __future__ import annotations

from typing import Literal

from mxstudy.reader import require, schema


@schema
class ResidualMLP:
    """Blocks of two linears around an activation; each adds to what it reads (instability paper, Eq. 1).

    `expansion`: the inner size over the hidden size; with swiglu two thirds of it, to the nearest multiple of 32, so
    that the parameters stay as many. `residual`: without it a block replaces what it reads, and has no bias: the
    teacher of the paper's public code. `init`: torch's default, uniform within fan_in^-0.5, or Xavier normal with gain
    0.5 and bias 0.
    """

    kind: Literal["residual_mlp"] = "residual_mlp"
    hidden_size: int
    num_layers: int
    activation: Literal["relu", "gelu", "swiglu"] = "gelu"
    expansion: int = 4
    residual: bool = True
    init: Literal["torch", "xavier"] = "torch"

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "expansion"):
            require(getattr(self, name) > 0, f"{name}: must be positive, not {getattr(self, name)}")
        require(self.ffn_size > 0, f"hidden_size: {self.hidden_size} is too small for swiglu's blocks of 32")

    @property
    def ffn_size(self) -> int:
        if self.activation == "swiglu":
            return 32 * round(2 * self.expansion * self.hidden_size / 3 / 32)
        return self.expansion * self.hidden_size

"""The interface of a block that may run in fused kernels, as the choice of backends uses it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from mxstudy.config.casts import Gemms
from mxstudy.model.linear import MXLinear


@dataclass(frozen=True)
class Backend:
    """A block's backend. `why`: why it is not the fastest one. `but`: the part that it leaves to the reference."""

    name: str
    why: str | None = None
    but: str | None = None


@dataclass(frozen=True)
class Target:
    """Where a model is going to run: compute dtype, device, and whether it is compiled."""

    compute: torch.dtype
    device: torch.device
    compiled: bool = False


class Fusable(nn.Module):
    """A block that can run in fused kernels or module by module, and states why it cannot run fused."""

    def why_not_fused(self, target: Target) -> str | None:
        """Return why the block, in its linears' current formats, cannot run in fused kernels, or None if it can."""
        raise NotImplementedError

    @property
    def left_to_reference(self) -> str | None:
        """Return which part of the block fused kernels leave to the reference, or None if they compute everything."""
        return None

    def set_fused(self, fused: bool) -> None:
        """Switch to fused kernels, in the linears' current formats, or back to running module by module."""
        raise NotImplementedError


def linears_in(module: nn.Module) -> list[MXLinear]:
    return [child for child in module.modules() if isinstance(child, MXLinear)]


def is_plain(module: nn.Module) -> bool:
    """Return whether none of the module's linears is quantised."""
    return all(linear.gemms == Gemms() for linear in linears_in(module))

"""What the plan of backends asks of a block that may run in fused kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from mxstudy.config.casts import Gemms
from mxstudy.model.linear import MXLinear


@dataclass(frozen=True)
class Backend:
    """The backend of a block, and why it is not the fastest one; `but`: what of the block it does not compute."""

    name: str
    why: str | None = None
    but: str | None = None


@dataclass(frozen=True)
class Target:
    """Say where a model is going to run."""

    compute: torch.dtype
    device: torch.device
    compiled: bool = False


class Fusable(nn.Module):
    """A block that says what keeps it from fused kernels, and is set up to run in them or module by module."""

    def why_not_fused(self, target: Target) -> str | None:
        """Return what keeps the block from fused kernels in the formats that its linears have now; None if nothing."""
        raise NotImplementedError

    @property
    def left_to_reference(self) -> str | None:
        """Say what of the block fused kernels leave to the reference; None if they compute all of it."""
        return None

    def take(self, fused: bool) -> None:
        """Run in fused kernels from here on, in the formats that the linears have now, or module by module."""
        raise NotImplementedError


def linears_in(module: nn.Module) -> list[MXLinear]:
    return [one for one in module.modules() if isinstance(one, MXLinear)]


def is_plain(module: nn.Module) -> bool:
    return all(linear.gemms == Gemms() for linear in linears_in(module))

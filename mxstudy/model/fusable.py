"""The interface of a block that may run in fused kernels, as the choice of backends uses it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from mxstudy.compat.torch_modules import has_hooks
from mxstudy.config.casts import Gemms
from mxstudy.model.linear import MXLinear
from mxstudy.model.modules import modules_of
from mxstudy.reader import require


@dataclass(frozen=True)
class Backend:
    """A block's backend. `why`: why it is not the fastest one. `left_to_reference`: the part that it leaves out."""

    name: str
    why: str | None = None
    left_to_reference: str | None = None


@dataclass(frozen=True)
class Target:
    """Where a model will run: compute dtype, device, and whether it is compiled."""

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
        """Return the part of the block that fused kernels leave to the reference, or None if they compute it all."""
        return None

    def set_fused(self, fused: bool) -> None:
        """Switch to fused kernels, in the linears' current formats, or back to running module by module."""
        raise NotImplementedError


def linears_in(module: nn.Module) -> list[MXLinear]:
    return list(modules_of(module, MXLinear).values())


def is_unquantised(module: nn.Module) -> bool:
    """Return whether none of the module's linears is quantised."""
    return all(linear.gemms == Gemms() for linear in linears_in(module))


def why_not_known(name: str, module: nn.Module, known: type[nn.Module]) -> str | None:
    """Return why no kernel computes the module's `forward`, or None if it is the `forward` of the `known` class.

    A subclass, or an instance with a `forward` of its own, counts as another module.
    """
    if type(module) is not known:
        return f"its {name} is a {type(module).__name__}, which has no kernel"
    return f"its {name} has its own forward, which has no kernel" if "forward" in vars(module) else None


def check_hooks(modules: Iterable[nn.Module]) -> None:
    """Raise ConfigError for a hook of modules that a fused block does not call: the hook would never run."""
    for module in modules:
        require(
            not has_hooks(module),
            f"precision.backend: a hook of a {type(module).__name__} is never called in a fused block; set it to "
            "reference",
        )

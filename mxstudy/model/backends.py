"""Which backend computes each block: planned from config, model and device, said, and kept.

    fused       kernels with casts in them                native      the hardware's MX GEMM, module by module
    reference   module by module, in PyTorch: the arithmetic that the others are compared with

All compute the same; on a GPU they sum in orders of their own. A backend is closed: it names what it computes, and
anything else is a reason not to take it. `auto` takes the fastest that has no such reason, block by block.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from mxstudy.config.casts import Gemms
from mxstudy.kernels.native import why_not_native
from mxstudy.model.fusable import Backend, Fusable, Target, is_plain, linears_in
from mxstudy.model.linear import MXLinear
from mxstudy.reader import ConfigError

EARLIER_NAMES = {"joined": "fused"}


def plan_backends(model: nn.Module, backend: str, target: Target) -> dict[str, Backend]:
    """Return the backend of every block, and of a quantised head, by module name, for the formats that they have now.

    Raises ConfigError, with the reason, where `backend` names one that a block cannot have.
    """
    backend = EARLIER_NAMES.get(backend, backend)
    return {name: backend_of(name, module, backend, target) for name, module in parts(model).items()}


def parts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have a backend of their own: blocks, and linears that are in none."""
    blocks = {name: m for name, m in model.named_modules() if isinstance(m, Fusable)}
    outside = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MXLinear) and not any(name.startswith(f"{block}.") for block in blocks)
    }
    return blocks | {name: linear for name, linear in outside.items() if linear.gemms != Gemms()}


def backend_of(name: str, module: nn.Module, backend: str, target: Target) -> Backend:
    refusals = {"native": why_no_native(module, target), "fused": why_not_fused(module, target), "reference": None}
    if backend in refusals and backend != "reference":
        reason = refusals[backend]
        if reason is None:
            return Backend(backend, but=left_of(module, backend))
        is_head = backend == "fused" and isinstance(module, MXLinear)  # in no block that could be
        if is_plain(module) or is_head:
            return Backend("reference", reason)
        raise ConfigError(
            f"precision.backend: {backend} cannot be had for {name}: {reason}; reference runs everywhere, and auto "
            "takes the fastest that can be had"
        )
    if backend == "reference":
        return Backend("reference", "precision.backend asks for it" if refusals["fused"] is None else refusals["fused"])
    if backend == "auto" and refusals["native"] is None and torch.cuda.is_available():  # else nobody has seen the GPU
        return Backend("native")
    return (
        Backend("fused", but=left_of(module, "fused"))
        if refusals["fused"] is None
        else Backend("reference", refusals["fused"])
    )


def apply_backends(model: nn.Module, backends: dict[str, Backend], target: Target) -> None:
    """Set every block up for its backend."""
    for name, backend in backends.items():
        module = model.get_submodule(name)
        module.backend = backend  # type: ignore[assignment]
        for linear in linears_in(module):
            linear.native = backend.name == "native" and linear.gemms != Gemms()
        if isinstance(module, Fusable):
            module.take(backend.name == "fused")


def left_of(module: nn.Module, backend: str) -> str | None:
    """Return what of the module that backend leaves to the reference; None if it computes all of it."""
    return module.left_to_reference if backend == "fused" and isinstance(module, Fusable) else None


def why_no_native(module: nn.Module, target: Target) -> str | None:
    """Return what keeps the module's GEMMs from the hardware's MX GEMM; None if nothing does."""
    quantised = [linear for linear in linears_in(module) if linear.gemms != Gemms()]
    if not quantised:
        return "nothing is quantised"
    for linear in quantised:
        if reason := why_not_native(linear.gemms, target.compute, target.device):
            return reason
        if linear.weight.ndim > 2:
            return "it multiplies matrices, and these are stacks of them"
    return None


def why_not_fused(module: nn.Module, target: Target) -> str | None:
    """Return what keeps the module from fused kernels; None if nothing does."""
    return module.why_not_fused(target) if isinstance(module, Fusable) else "it is in no block"


def backends_of(model: nn.Module) -> dict[str, str]:
    """Return the backend of every block, and of a quantised head, by module name, as it was set up."""
    return {
        name: backend.name for name, module in parts(model).items() if (backend := getattr(module, "backend", None))
    }


def describe_backends(model: nn.Module) -> list[str]:
    """Return a line for each backend that blocks run on, with how many and the reason where it is not the fastest."""
    groups: dict[Backend, list[str]] = defaultdict(list)
    for name, module in parts(model).items():
        groups[getattr(module, "backend", Backend("reference", "no precision was applied"))].append(name)
    return [
        f"{spelled(names)}: {backend.name}" + (f" ({note})" if (note := backend.why or backend.but) else "")
        for backend, names in groups.items()
    ]


def spelled(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} blocks"

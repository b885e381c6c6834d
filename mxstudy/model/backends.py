"""Which backend computes each block: planned from config, model and device, said, and kept.

    joined      fused kernels, with casts in them        native      the hardware's MX GEMM, module by module
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
from mxstudy.model.fusable import Fusable, Place, Road, is_plain, linears_in
from mxstudy.model.linear import MXLinear
from mxstudy.reader import ConfigError


def plan_roads(model: nn.Module, backend: str, place: Place) -> dict[str, Road]:
    """Return the road of every block, and of a quantised head, by module name, for the formats that they have now.

    Raises ConfigError, with the reason, where `backend` names one that a block cannot have.
    """
    return {name: road_of(name, module, backend, place) for name, module in parts(model).items()}


def parts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have a road of their own: blocks, and linears that are in none."""
    blocks = {name: m for name, m in model.named_modules() if isinstance(m, Fusable)}
    outside = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MXLinear) and not any(name.startswith(f"{block}.") for block in blocks)
    }
    return blocks | {name: linear for name, linear in outside.items() if linear.gemms != Gemms()}


def road_of(name: str, module: nn.Module, backend: str, place: Place) -> Road:
    refusals = {"native": why_no_native(module, place), "joined": why_not_joined(module, place), "reference": None}
    if backend in refusals and backend != "reference":
        reason = refusals[backend]
        if reason is None:
            return Road(backend)
        is_head = backend == "joined" and isinstance(module, MXLinear)  # in no block that could be
        if is_plain(module) or is_head:
            return Road("reference", reason)
        raise ConfigError(
            f"precision.backend: {backend} cannot be had for {name}: {reason}; reference runs everywhere, and auto "
            "takes the fastest that can be had"
        )
    if backend == "reference":
        return Road("reference", "precision.backend asks for it" if refusals["joined"] is None else refusals["joined"])
    if backend == "auto" and refusals["native"] is None and torch.cuda.is_available():  # else nobody has seen the GPU
        return Road("native")
    return Road("joined") if refusals["joined"] is None else Road("reference", refusals["joined"])


def take_roads(model: nn.Module, roads: dict[str, Road], place: Place) -> None:
    """Set every block up for its road."""
    for name, road in roads.items():
        module = model.get_submodule(name)
        module.road = road  # type: ignore[assignment]
        for linear in linears_in(module):
            linear.native = road.backend == "native" and linear.gemms != Gemms()
        if isinstance(module, Fusable):
            module.take(road.backend == "joined")


def why_no_native(module: nn.Module, place: Place) -> str | None:
    """Return what keeps the module's GEMMs from the hardware's MX GEMM; None if nothing does."""
    quantised = [linear for linear in linears_in(module) if linear.gemms != Gemms()]
    if not quantised:
        return "nothing is quantised"
    for linear in quantised:
        if reason := why_not_native(linear.gemms, place.compute, place.device):
            return reason
        if linear.weight.ndim > 2:
            return "it multiplies matrices, and these are stacks of them"
    return None


def why_not_joined(module: nn.Module, place: Place) -> str | None:
    """Return what keeps the module from fused kernels; None if nothing does."""
    return module.why_not_joined(place) if isinstance(module, Fusable) else "it is in no block"


def backends_of(model: nn.Module) -> dict[str, str]:
    """Return the backend of every block, and of a quantised head, by module name, as it was set up."""
    return {name: road.backend for name, module in parts(model).items() if (road := getattr(module, "road", None))}


def describe_roads(model: nn.Module) -> list[str]:
    """Return a line for each road that blocks take, with how many and the reason where it is not the fastest."""
    groups: dict[Road, list[str]] = defaultdict(list)
    for name, module in parts(model).items():
        groups[getattr(module, "road", Road("reference", "no precision was applied"))].append(name)
    return [
        f"{spelled(names)}: {road.backend}" + (f" ({road.why})" if road.why else "") for road, names in groups.items()
    ]


def spelled(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} blocks"

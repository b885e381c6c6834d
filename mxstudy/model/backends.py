"""Which backend computes each block: planned from config, model and device, said, and kept.

    joined      fused kernels, with casts in them        native      the hardware's MX GEMM, module by module
    reference   module by module, in PyTorch: the arithmetic that the others are compared with

All compute the same; on a GPU they sum in orders of their own. A backend is closed: it names what it computes, and
anything else is a reason not to take it. `auto` takes the fastest that has no such reason, block by block.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from mxstudy.config.casts import Gemms
from mxstudy.model.decoder import Block, relu2, swiglu
from mxstudy.model.linear import MXLinear
from mxstudy.model.norm import kernel_norm, why_no_kernel_norm
from mxstudy.model.residual_mlp import Block as StudentBlock
from mxstudy.numerics.block_operands import ANY
from mxstudy.numerics.joined_block import JoinedBlock
from mxstudy.numerics.native import why_not_native
from mxstudy.reader import ConfigError

# Activations that fused kernels compute, by the very function that the reference applies.
KERNEL_ACTIVATIONS = {swiglu: "swiglu", F.gelu: "gelu", relu2: "relu2"}


@dataclass(frozen=True)
class Road:
    """The backend of a block, and why it is not the fastest one; `but`: what of the block it does not compute."""

    backend: str
    why: str | None = None
    but: str | None = None


@dataclass(frozen=True)
class Place:
    """Say where a model is going to run."""

    compute: torch.dtype
    device: torch.device
    compiled: bool = False


def plan_roads(model: nn.Module, backend: str, place: Place) -> dict[str, Road]:
    """Return the road of every block, and of a quantised head, by module name, for the formats that they have now.

    Raises ConfigError, with the reason, where `backend` names one that a block cannot have.
    """
    return {name: road_of(name, module, backend, place) for name, module in parts(model).items()}


def parts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have a road of their own: blocks, and linears that are in none."""
    blocks = {name: m for name, m in model.named_modules() if isinstance(m, Block | StudentBlock)}
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
            return Road(backend, but=what_stays(module, backend))
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
    return (
        Road("joined", but=what_stays(module, "joined"))
        if refusals["joined"] is None
        else Road("reference", refusals["joined"])
    )


def take_roads(model: nn.Module, roads: dict[str, Road], place: Place) -> None:
    """Set every block up for its road."""
    for name, road in roads.items():
        module = model.get_submodule(name)
        module.road = road  # type: ignore[assignment]
        for linear in linears_in(module):
            linear.native = road.backend == "native" and linear.gemms != Gemms()
        if isinstance(module, Block):
            module.joined = joined_block(module) if road.backend == "joined" else None
        if isinstance(module, StudentBlock):
            module.take(road.backend == "joined")


def what_stays(module: nn.Module, backend: str) -> str | None:
    """Return what of the module that backend leaves to the reference; None where it computes all of it."""
    has_attention = isinstance(module, StudentBlock) and module.attention is not None
    return "the MLP; attention runs by the reference" if backend == "joined" and has_attention else None


def linears_in(module: nn.Module) -> list[MXLinear]:
    return [one for one in module.modules() if isinstance(one, MXLinear)]


def is_plain(module: nn.Module) -> bool:
    return all(linear.gemms == Gemms() for linear in linears_in(module))


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
    if isinstance(module, Block):
        return why_not_joined_block(module, place)
    if isinstance(module, StudentBlock):
        return module.why_not_joined() if place.device.type == "cuda" else "the kernels of students run on a GPU"
    return "it is in no block"


def why_not_joined_block(block: Block, place: Place) -> str | None:
    """Return the first reason why a decoder's block cannot run in two fused functions."""
    linears = block.linears()
    wqkv, _, up, w2 = linears
    if place.compute != torch.bfloat16:
        return f"kernels compute in bf16, and train.compute is {place.compute}"
    if place.compiled and place.device.type == "cpu":
        return "compiled on CPU, where a compiler fuses what operators would hide"
    if is_plain(block):
        return "nothing is quantised"  # there is nothing to cast, and nothing to gain
    if any(linear.compute is not None or linear.on_tensor_cores for linear in linears):
        return "its linears compute in a dtype of their own"
    for linear in linears:
        if reason := ANY.why_not(linear.gemms):
            return reason
    for linear in (wqkv, up):
        if linear.gain is not None:
            return f"its gain is rounded ({linear.gain})"
        if reason := why_no_kernel_norm(linear.norm, linear.cast.block_size):
            return reason
    if type(wqkv.norm) is not type(up.norm):
        return "its two norms are not alike"
    if block.feed_forward.activation not in KERNEL_ACTIVATIONS:
        return f"its activation ({block.feed_forward.kind}) has no kernel"
    sizes = {cast.block_size or 1 for linear in linears for _, cast in linear.gemms.casts()} | {wqkv.cast.block_size}
    for what, size in (("keys", block.attention.sizes[1]), ("the MLP's inner size", w2.in_features)):
        if uneven := [block_size for block_size in sizes if size % block_size]:
            return f"blocks of {uneven[0]} do not divide {what}, {size}"
    return None


def joined_block(block: Block) -> JoinedBlock:
    """Return the settings of the block's two fused functions."""
    linears = block.linears()
    wqkv = linears[0]
    activation, sizes = KERNEL_ACTIVATIONS[block.feed_forward.activation], block.attention.sizes
    gemms, norm = (linear.gemms for linear in linears), kernel_norm(wqkv.norm)
    cast = wqkv.cast if wqkv.cast.rounding in ("even", "away") else replace(wqkv.cast, rounding="even")
    return JoinedBlock(norm, wqkv.norm.fold_gain, activation, sizes, block.attention.head_size, cast, *gemms)


def backends_of(model: nn.Module) -> dict[str, str]:
    """Return the backend of every block, and of a quantised head, by module name, as it was set up."""
    return {name: road.backend for name, module in parts(model).items() if (road := getattr(module, "road", None))}


def describe_roads(model: nn.Module) -> list[str]:
    """Return a line for each road that blocks take, with how many and the reason where it is not the fastest."""
    groups: dict[Road, list[str]] = defaultdict(list)
    for name, module in parts(model).items():
        groups[getattr(module, "road", Road("reference", "no precision was applied"))].append(name)
    return [
        f"{spelled(names)}: {road.backend}" + (f" ({note})" if (note := road.why or road.but) else "")
        for road, names in groups.items()
    ]


def spelled(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} blocks"

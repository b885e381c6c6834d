"""Choose the backend that computes each block from config, model and device, set it up, and describe the choice.

    native      the hardware's MX GEMM, module by module
    fused       kernels between GEMMs, which also cast; for a head: kernels that cast alone
    grouped     all experts in one GEMM; on a GPU kernels do the plain casts
    reference   module by module, expert by expert, in PyTorch: the arithmetic that the others are compared with

All backends compute the same values, but each may sum in its own order: on a GPU, and on a CPU in the backward of a
Hadamard transform along the tokens. A backend lists what it can compute; anything else is a reason not to use it.
`auto` chooses, for each block, the fastest backend without such a reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from mxstudy.blocks.plans import ALONE
from mxstudy.config.casts import Gemms
from mxstudy.config.precision_plan import EARLIER_BACKENDS
from mxstudy.kernels.native import why_not_native
from mxstudy.model.fusable import Backend, Fusable, Target, is_unquantised, linears_in
from mxstudy.model.linear import MXLinear
from mxstudy.model.modules import modules_of
from mxstudy.model.moe import mixtures_of, why_not_one_gemm
from mxstudy.reader import ConfigError


def plan_backends(model: nn.Module, backend: str, target: Target) -> dict[str, Backend]:
    """Return {module name: backend} for every block, and for a quantised head, in their current formats.

    Raises ConfigError, with the reason, if a block cannot run on the backend that `backend` names.
    """
    backend = EARLIER_BACKENDS.get(backend, backend)
    return {name: backend_of(name, module, backend, target) for name, module in parts(model).items()}


def parts(model: nn.Module) -> dict[str, nn.Module]:
    """Return {name: module} of the modules with a backend of their own: blocks, and quantised linears outside them."""
    blocks = modules_of(model, Fusable)
    inside = tuple(f"{name}." for name in blocks)
    outside = {name: linear for name, linear in modules_of(model, MXLinear).items() if not name.startswith(inside)}
    return blocks | {name: linear for name, linear in outside.items() if linear.gemms != Gemms()}


class FastBackend(NamedTuple):
    """A backend that computes some modules, faster than the reference.

    `why_not`: the reason why it cannot run a module on a target, or None. `use`: switch it on or off in a module.
    `is_certain`: whether it will run on the job's machine if `why_not` returns None; `auto` takes no other.
    """

    why_not: Callable[[nn.Module, Target], str | None]
    use: Callable[[nn.Module, bool, Target], None]
    is_certain: Callable[[], bool]


def backend_of(name: str, module: nn.Module, backend: str, target: Target) -> Backend:
    """Return the backend of one module. Raises ConfigError if it cannot run on the one that `backend` names."""
    chosen = choose(name, module, backend, target)
    if chosen.name == "reference" and target.compiled and mixtures_of(module):
        raise ConfigError(
            f"train.compile: {name} computes its experts one after the other ({chosen.why}), and the compiler cannot "
            "know how many tokens each has; set it to false"
        )
    return chosen


def choose(name: str, module: nn.Module, backend: str, target: Target) -> Backend:
    """Return the backend of one module, without checking whether it can be compiled."""
    reasons = {fast: row.why_not(module, target) for fast, row in FAST.items()}
    if backend in FAST:
        reason = reasons[backend]
        if reason is None:
            return Backend(backend, left_to_reference=left_of(module, backend))
        is_head = backend == "fused" and isinstance(module, MXLinear)
        if is_unquantised(module) or is_head:  # it stays on the reference; other parts do not
            return Backend("reference", reason)
        raise ConfigError(
            f"precision.backend: {backend} cannot run {name}: {reason}; reference runs everywhere, and auto chooses "
            "the fastest backend that can run"
        )
    for fast in CHOICES[backend]:
        if reasons[fast] is None and FAST[fast].is_certain():
            return Backend(fast, left_to_reference=left_of(module, fast))
    why = reasons["grouped"] if mixtures_of(module) else reasons["fused"]
    return Backend("reference", why or "precision.backend asks for it")


def apply_backends(model: nn.Module, backends: dict[str, Backend], target: Target) -> None:
    """Set up every module of `backends` to run on its backend."""
    for name, backend in backends.items():
        module = model.get_submodule(name)
        module.backend = backend  # type: ignore[assignment]
        for fast, row in FAST.items():
            row.use(module, backend.name == fast, target)


def use_native(module: nn.Module, on: bool, target: Target) -> None:
    for linear in linears_in(module):
        linear.native = on and linear.gemms != Gemms()


def use_fused(module: nn.Module, on: bool, target: Target) -> None:
    """Switch a block's fused kernels on or off, or the kernels that cast the operands of a head."""
    if isinstance(module, Fusable):
        module.set_fused(on)
    elif isinstance(module, MXLinear):
        cast_by_kernels([module], on, target)


def use_grouped(module: nn.Module, on: bool, target: Target) -> None:
    """Compute experts in one grouped GEMM, and on a GPU make plain operands by kernels, others in PyTorch.

    Casts along the token axis are slow as a compiler makes them.
    """
    mixtures = mixtures_of(module).values()
    if mixtures:
        cast_by_kernels(linears_in(module), on, target)
    for mixture in mixtures:
        mixture.is_grouped = on


def cast_by_kernels(linears: Iterable[MXLinear], on: bool, target: Target) -> None:
    """Let kernels make the operands of linears that run module by module on a GPU in bf16, if all casts are plain."""
    for linear in linears:
        linear.casts_by_kernel = on and not linear.native and why_no_casts(linear, target) is None


def why_no_casts(linear: MXLinear, target: Target) -> str | None:
    """Return why kernels cannot make the operands of a linear that runs module by module, or None if they can."""
    if target.device.type != "cuda" or target.compute != torch.bfloat16:
        return "outside blocks kernels make operands only on a GPU, and only in bf16"
    return ALONE.why_not(linear.gemms)


def left_of(module: nn.Module, backend: str) -> str | None:
    """Return the part of the module that this backend leaves to the reference, or None if it computes everything."""
    return module.left_to_reference if backend == "fused" and isinstance(module, Fusable) else None


def why_no_native(module: nn.Module, target: Target) -> str | None:
    """Return why the module cannot use the hardware's MX GEMM, or None if it can."""
    quantised = [linear for linear in linears_in(module) if linear.gemms != Gemms()]
    if not quantised:
        return "nothing is quantised"
    for linear in quantised:
        if reason := why_not_native(linear.gemms, target.compute, target.device):
            return reason
        if linear.weight.ndim > 2:
            return "its weight is a stack of matrices, and the hardware's GEMM multiplies single matrices"
    return None


def why_not_fused(module: nn.Module, target: Target) -> str | None:
    """Return why the module cannot run in fused kernels, or None if it can."""
    if isinstance(module, Fusable):
        return module.why_not_fused(target)
    return why_no_casts(module, target) if isinstance(module, MXLinear) else "it is no block and no linear"


def why_not_grouped(module: nn.Module, target: Target) -> str | None:
    """Return why the module's experts cannot be computed in one grouped GEMM, or None if they can."""
    mixtures = mixtures_of(module).values()
    if not mixtures:
        return "it has no experts"
    if target.device.type == "cpu" and not target.compiled:
        return "on CPU its experts are computed one after the other"
    return next((reason for mixture in mixtures if (reason := why_not_one_gemm(mixture, target))), None)


# The backends beside the reference, the fastest first.
FAST = {
    # native: without a GPU here, the job's GPU is unknown
    "native": FastBackend(why_no_native, use_native, lambda: torch.cuda.is_available()),
    "fused": FastBackend(why_not_fused, use_fused, lambda: True),
    "grouped": FastBackend(why_not_grouped, use_grouped, lambda: True),
}
# The backends among which a setting that names none of them chooses.
CHOICES: dict[str, tuple[str, ...]] = {"auto": tuple(FAST), "emulated": ("fused", "grouped"), "reference": ()}


def backends_of(model: nn.Module) -> dict[str, str]:
    """Return {module name: backend's name}, as set up by `apply_backends`, for blocks and a quantised head."""
    return {
        name: backend.name for name, module in parts(model).items() if (backend := getattr(module, "backend", None))
    }


def describe_backends(model: nn.Module) -> list[str]:
    """Return one line per backend in use: the number of blocks, and why they do not run on the fastest backend."""
    groups: dict[Backend, list[str]] = defaultdict(list)
    for name, module in parts(model).items():
        groups[getattr(module, "backend", Backend("reference", "no precision was applied"))].append(name)
    return [
        f"{name_or_count(names)}: {backend.name}"
        + (f" ({note})" if (note := backend.why or backend.left_to_reference) else "")
        for backend, names in groups.items()
    ]


def name_or_count(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} blocks"

"""The activation with both casts of its result, and its backward with both casts of the gradient, in one kernel each.

z = phi(h), or phi(gate) * up with h = gate | up        dh = dz phi'(h), or dz up phi'(gate) | dz phi(gate)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, library

from mxstudy.kernels.operators import (
    BF16,
    UNREAD,
    Casts,
    Tile,
    argument_of,
    both,
    check_tile,
    checked_casts,
    constants,
    empty_both,
    empty_operand,
    launch,
    operand,
    tile_of,
    tile_of_gradient,
)
from mxstudy.kernels.packing import pack_fields, unpack
from mxstudy.numerics.cast import BlockCast
from mxstudy.numerics.formats import look_up
from mxstudy.reader import ConfigError, require

aten = torch.ops.aten


class Phi(NamedTuple):
    """A function phi of an activation, and its backward."""

    apply: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]  # takes dphi and h, returns dh


def relu_backward(dy: Tensor, x: Tensor) -> Tensor:
    return aten.threshold_backward(dy, x, 0)


PHIS = {
    "relu": Phi(F.relu, relu_backward),
    "relu2": Phi(lambda x: F.relu(x).square(), lambda dy, x: relu_backward(dy * (2 * F.relu(x)), x)),
    "silu": Phi(F.silu, aten.silu_backward),
    "gelu": Phi(F.gelu, aten.gelu_backward),
    "gelu_tanh": Phi(
        lambda x: F.gelu(x, approximate="tanh"), lambda dy, x: aten.gelu_backward(dy, x, approximate="tanh")
    ),
}


class KernelActivation(NamedTuple):
    """An activation that has a kernel: the name of its phi, and whether it is gated."""

    phi: str
    gated: bool


ACTIVATIONS = {name: KernelActivation(name, False) for name in ("relu", "relu2", "gelu", "gelu_tanh")}
ACTIVATIONS["swiglu"] = KernelActivation("silu", True)


@dataclass(frozen=True)
class Rounded:
    """An activation, and whether phi(gate) and its result are rounded to bf16."""

    phi: str
    gated: bool
    round_gate: bool
    round_output: bool


def activation_cast_both(
    h: Tensor,
    activation: str,
    row: str | None,
    column: str | None,
    cast: BlockCast,
    *,
    gate_dtype: torch.dtype = BF16,
    dtype: torch.dtype = BF16,
) -> tuple[Tensor, Tensor]:
    """Cast z for both contractions: h [..., rows, columns] bf16, if gated [..., rows, 2 columns] -> two bf16 operands.

    `gate_dtype`, `dtype`: bf16 to round phi(gate) and z to it, float32 for no rounding. Raises ConfigError for an
    unknown activation, for h that is not bf16, and as `checked_casts` does.
    """
    packed, shape = checked(h, activation, gate_dtype, dtype)
    return _activation_cast_both(h, packed, checked_casts(shape, row, column, cast))


def activation_backward_cast_both(
    dz: Tensor,
    h: Tensor,
    activation: str,
    row: str | None,
    column: str | None,
    cast: BlockCast,
    *,
    gate_dtype: torch.dtype = BF16,
    dtype: torch.dtype = BF16,
    again: str | None = UNREAD,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast dh for both contractions: dz [..., rows, columns] and h, both bf16 -> two bf16 operands of h's shape.

    dh is rounded to bf16 before it is cast. `gate_dtype` and `dtype` are those of the forward: d phi(gate) has the
    dtype of phi(gate). The third tensor is z's column operand in the format `again`, for a forward that did not keep
    it, or empty if that is UNREAD. Raises ConfigError as the forward does; no block may span a gated activation's two
    gradients.
    """
    packed, shape = checked(h, activation, gate_dtype, dtype)
    if dz.dtype != BF16 or dz.shape != shape:
        raise ConfigError(
            f"dz: {dz.dtype} {list(dz.shape)} is no gradient of {activation} of {list(h.shape)}, which is bfloat16"
        )
    casts, of_z = checked_casts(shape, row, column, cast), checked_casts(shape, UNREAD, again, cast)
    return _activation_backward_cast_both(dz, h, packed, casts, of_z)


def checked(h: Tensor, activation: str, gate_dtype: torch.dtype, dtype: torch.dtype) -> tuple[str, torch.Size]:
    """Return the packed activation, and the shape of its result. Raises ConfigError as `activation_cast_both` does."""
    require(h.dtype == BF16, f"h: the kernel takes bfloat16, not {h.dtype}")
    known = look_up(ACTIVATIONS, activation, "activation")
    packed = pack_fields(Rounded, *known, BF16 in (gate_dtype, dtype), dtype == BF16)
    return packed, output_shape(h, known.gated)


def output_shape(h: Tensor, gated: bool) -> torch.Size:
    return torch.Size((*h.shape[:-1], h.shape[-1] // (1 + gated)))


def rounded(x: Tensor, to_bf16: bool) -> Tensor:
    """Return x (fp32), rounded to bf16 values if `to_bf16`."""
    return x.to(BF16).to(torch.float32) if to_bf16 else x


@library.custom_op("mxstudy::activation_cast_both", mutates_args=())
def _activation_cast_both(h: Tensor, activation: str, casts: str) -> tuple[Tensor, Tensor]:
    known = unpack(Rounded, activation)
    parts = h.to(torch.float32).chunk(1 + known.gated, dim=-1)
    z = PHIS[known.phi].apply(parts[0])
    if known.gated:
        z = rounded(z, known.round_gate) * parts[1]
    return both(rounded(z, known.round_output), casts)


@_activation_cast_both.register_fake
def _(h: Tensor, activation: str, casts: str) -> tuple[Tensor, Tensor]:
    return empty_both(h.new_empty(output_shape(h, unpack(Rounded, activation).gated)), casts)


@_activation_cast_both.register_kernel("cuda")
def launch_cuda(h: Tensor, activation: str, casts: str, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    from mxstudy.kernels.device.activation import PHIS as KERNELS
    from mxstudy.kernels.device.activation import activation_cast_both_kernel

    known, of_casts = unpack(Rounded, activation), constants(casts)
    shape = output_shape(h, known.gated)
    operands = empty_both(h.new_empty(shape), casts)
    rows, columns = h.numel() // h.shape[-1], shape[-1]
    tile = tile or tile_of(rows, columns, of_casts.block, elements=4096)
    check_tile("rows", tile.rows, rows)
    check_tile("columns", tile.columns, columns)
    launch(
        activation_cast_both_kernel,
        (rows * columns // (tile.rows * tile.columns),),
        (h.contiguous(), *map(argument_of, operands)),
        tile.warps,
        PHI=KERNELS[known.phi][0],
        ACTIVATION=known,
        COLUMNS=columns,
        TILE=tile,
        CAST=of_casts,
    )
    return operands


@library.custom_op("mxstudy::activation_backward_cast_both", mutates_args=())
def _activation_backward_cast_both(
    dz: Tensor, h: Tensor, activation: str, casts: str, of_z: str
) -> tuple[Tensor, Tensor, Tensor]:
    known = unpack(Rounded, activation)
    parts, dz = h.to(torch.float32).chunk(1 + known.gated, dim=-1), dz.to(torch.float32)
    phi, z = PHIS[known.phi], PHIS[known.phi].apply(parts[0])
    gradients = [phi.backward(rounded(dz * parts[1], known.round_gate) if known.gated else dz, parts[0])]
    if known.gated:
        z = rounded(z, known.round_gate)
        gradients.append(dz * z)
        z = z * parts[1]
    again = unpack(Casts, of_z)
    z_again = operand(rounded(z, known.round_output), again.column, -2, again.block_cast)
    return *both(torch.cat(gradients, dim=-1).to(BF16), casts), z_again


@_activation_backward_cast_both.register_fake
def _(dz: Tensor, h: Tensor, activation: str, casts: str, of_z: str) -> tuple[Tensor, Tensor, Tensor]:
    return *empty_both(h, casts), empty_operand(dz, unpack(Casts, of_z).column)


@_activation_backward_cast_both.register_kernel("cuda")
def launch_cuda_backward(
    dz: Tensor, h: Tensor, activation: str, casts: str, of_z: str, tile: Tile | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    from mxstudy.kernels.device.activation import PHIS as KERNELS
    from mxstudy.kernels.device.activation import activation_backward_cast_both_kernel

    dz, h = dz.contiguous(), h.contiguous()
    known, of_casts, cast_of_z = unpack(Rounded, activation), constants(casts), constants(of_z)
    operands, columns = (*empty_both(h, casts), empty_operand(dz, unpack(Casts, of_z).column)), dz.shape[-1]
    rows = dz.numel() // columns
    tile = tile or tile_of_gradient(rows, columns, of_casts, cast_of_z)
    check_tile("rows", tile.rows, rows)
    check_tile("columns", tile.columns, columns)
    launch(
        activation_backward_cast_both_kernel,
        (rows * columns // (tile.rows * tile.columns),),
        (dz, h, *map(argument_of, operands)),
        tile.warps,
        PHI=KERNELS[known.phi][0],
        PHI_BACKWARD=KERNELS[known.phi][1],
        ACTIVATION=known,
        COLUMNS=columns,
        TILE=tile,
        CAST=of_casts,
        CAST_OF_Z=cast_of_z,
    )
    return operands

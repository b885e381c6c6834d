"""The three GEMMs of a linear of all experts, whose weights are one tensor [E, out, in].

The experts' operands are dispatched rows (`mxstudy.numerics.dispatch`). Each expert is a linear of its own: a block of
the token axis, or a scale of a whole tensor, belongs to one expert. There are two ways to compute them:

    loop      expert by expert, each by `mxstudy.numerics.gemms`: every recipe. The host has to know the loads.
    grouped   all experts' rows in one cast, and all GEMMs in one grouped GEMM: what has no scale of a column in wgrad.

Both give the same bits if their GEMMs do. The random numbers of a row are those of its copy, wherever that is
dispatched to. So they do not depend on micro-batches, ranks or other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mxstudy.config.casts import Cast
from mxstudy.numerics.cast import pre_rounded
from mxstudy.numerics.dispatch import Dispatch, to_rows
from mxstudy.numerics.formats import is_random
from mxstudy.numerics.gemms import (
    Bounds,
    Linear,
    Operand,
    common_block_size,
    dgrad_gemm,
    forward_gemm,
    wgrad_gemm,
)
from mxstudy.numerics.grid import to_dtype
from mxstudy.numerics.grouped_gemm import grouped_mm, groups_of, scaled_grouped_mm
from mxstudy.numerics.random_bits import CALL, Draws
from mxstudy.numerics.scales import absmax_bits
from mxstudy.reader import require


@dataclass(frozen=True)
class DispatchedLinear(Linear):
    """A linear that is applied to dispatched rows. `rows`: those of its tokens in their random streams."""

    rows: Tensor | None = None

    def draws(self, name: str) -> Draws | None:
        draws = super().draws(name)
        if draws is None:
            return None
        return self.draws_of_weight(draws) if name.endswith("_w") else draws._replace(rows=self.rows)

    def draws_of_weight(self, draws: Draws) -> Draws:
        """Return the draws of the experts' own weights, from those of the first expert's."""
        raise NotImplementedError


@dataclass(frozen=True)
class OneExpert(DispatchedLinear):
    """One expert's linear. `first`: the first row of its weight in that random stream."""

    first: int = 0

    def draws_of_weight(self, draws: Draws) -> Draws:
        return draws._replace(place=draws.place + torch.tensor([0, self.first], device=draws.place.device))


@dataclass(frozen=True)
class AllExperts(DispatchedLinear):
    """All experts' linears. `weight_rows`: rows of one expert's weight.

    `ends`: int32 [E], the row after each expert's last one.
    """

    weight_rows: int = 0
    ends: Tensor | None = None

    def draws_of_weight(self, draws: Draws) -> Draws:
        assert self.ends is not None
        first = torch.arange(len(self.ends), device=draws.place.device) * self.weight_rows
        place = draws.place + torch.stack((torch.zeros_like(first), first), -1)
        return Draws(draws.key.expand_as(place), place)

    def operand(
        self,
        x: Tensor,
        name: str,
        axis: int,
        dtype: torch.dtype,
        bounds: Bounds | None = None,
        after: Tensor | None = None,
    ) -> Operand:
        """Return the operand as `Linear` does. A scale of a whole tensor is that of each expert, [E, 1, 1]."""
        found, cast = super().operand(x, name, axis, dtype, bounds, after), self.gemms.cast_of(name)
        if found.scale is None or cast is None or cast.outer_scale != "tensor" or x.ndim == 3:
            return found
        rows_a_scale = len(x) // len(found.scale)
        return replace(found, scale=found.scale[self.first_rows // rows_a_scale][:, None])

    def bound(self, x: Tensor, name: str, bounds: Bounds | None) -> Tensor | None:
        """Return the bound as `Linear` does, or the absmax of the expert of each row, or block of rows: [blocks, 1]."""
        cast = self.gemms.cast_of(name)
        bound = super().bound(x, name, bounds)
        if bound is not None or cast is None or cast.outer_scale == "none" or x.ndim == 3:
            return bound
        if cast.outer_scale != "tensor":
            require(
                not name.startswith("wgrad"), f"{name}: a grouped GEMM takes no scale for each column; use the loop"
            )
            return None  # each row has its own scale
        assert self.ends is not None
        row_of_x = torch.arange(len(x), device=x.device, dtype=self.ends.dtype)
        expert_N = torch.searchsorted(self.ends, row_of_x, right=True)
        bits_N = absmax_bits(pre_rounded(to_dtype(x, torch.float32), cast), -1).squeeze(-1)
        bits_E = bits_N.new_zeros(len(self.ends)).scatter_reduce(0, expert_N, bits_N, "amax")
        has_blocks = cast.two_dimensional or (name.startswith("wgrad") and cast.scale != "none")
        experts = expert_N[:: cast.block_size] if has_blocks else expert_N
        return bits_E[experts].view(torch.float32)[:, None]

    @property
    def first_rows(self) -> Tensor:
        """Return the first row of each expert, int32 [E]."""
        assert self.ends is not None
        return torch.cat((self.ends.new_zeros(1), self.ends[:-1]))

    def gemm(self, a_MK: Operand, b_KN: Operand, dtype: torch.dtype) -> Tensor:
        assert self.ends is not None
        size = common_block_size(a_MK, b_KN) if a_MK.block_size or b_KN.block_size else 0
        if not size and a_MK.scale is None and b_KN.scale is None:
            return to_dtype(grouped_mm(a_MK.values, b_KN.values, self.ends), dtype)
        scales = scales_of_groups(a_MK.scale, -1), scales_of_groups(b_KN.scale, -2)
        blocks = a_MK.block_scales, b_KN.block_scales, size
        return to_dtype(scaled_grouped_mm(a_MK.values, b_KN.values, *scales, self.ends, *blocks), dtype)


def scales_of_groups(scale: Tensor | None, axis: int) -> Tensor | None:
    """Return an operand's scale as `scaled_grouped_mm` takes it. `axis`: the contraction axis, of which it has one.

    A scale is 0-dim, that of each row [N, 1], or those of each expert's matrix [E, rows or 1, columns or 1].
    """
    if scale is None or scale.ndim == 0:
        return None if scale is None else scale.view(1, 1)
    return scale.squeeze(axis) if scale.ndim == 3 else scale.T


class ThreeGemms:
    """The three GEMMs of a linear that has no experts; `Loop` and `Grouped` have those of experts."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    def forward(self, x: Tensor, weight: Tensor, dtype: torch.dtype, bounds: Bounds | None) -> Tensor:
        """Return the output [rows, out] in `dtype`, as `forward_gemm` does."""
        return forward_gemm(x, weight, self.linear, dtype, bounds)

    def forward_tokens(
        self, x_TI: Tensor, dispatch: Dispatch, weight: Tensor, dtype: torch.dtype, bounds: Bounds | None
    ) -> Tensor:
        """Return `forward` of the dispatched rows of x [T, in]."""
        return self.forward(to_rows(x_TI, dispatch), weight, dtype, bounds)

    def dgrad(self, dh: Tensor, weight: Tensor, x: Tensor, forward_weight: Tensor, bounds: Bounds | None) -> Tensor:
        """Return the gradient of x [rows, in], as `dgrad_gemm` does."""
        return dgrad_gemm(dh, weight, self.linear, x, forward_weight, bounds)

    def wgrad(self, dh: Tensor, x: Tensor, forward_weight: Tensor, bounds: Bounds | None) -> Tensor:
        """Return the gradient of the weight, or of all experts' weights, as `wgrad_gemm` does."""
        return wgrad_gemm(dh, x, self.linear, forward_weight, bounds)


class Loop(ThreeGemms):
    """The three GEMMs of experts, one expert after the other."""

    def __init__(self, linear: Linear, dispatch: Dispatch, weight_rows: int) -> None:
        super().__init__(linear)
        self.slices, numbers = groups_of(dispatch.ends_E), random_rows(linear, dispatch)
        self.experts = [
            OneExpert(
                linear.gemms, linear.random, rows=None if numbers is None else numbers[rows], first=e * weight_rows
            )
            for e, rows in enumerate(self.slices)
        ]
        self.left = len(dispatch.copies_N) - self.slices[-1].stop

    def each(self) -> Iterator[tuple[int, slice, OneExpert]]:
        """Yield number, rows and linear of every expert."""
        return zip(range(len(self.experts)), self.slices, self.experts, strict=True)

    def filled(self, parts: list[Tensor]) -> Tensor:
        """Return the experts' rows as one matrix, with zeros for the rows after the last expert's."""
        return torch.cat((*parts, parts[0].new_zeros(self.left, parts[0].shape[1])))

    def forward(self, x: Tensor, weight: Tensor, dtype: torch.dtype, bounds: Bounds | None) -> Tensor:
        return self.filled([forward_gemm(x[rows], weight[e], own, dtype, bounds) for e, rows, own in self.each()])

    def dgrad(self, dh: Tensor, weight: Tensor, x: Tensor, forward_weight: Tensor, bounds: Bounds | None) -> Tensor:
        return self.filled(
            [dgrad_gemm(dh[rows], weight[e], own, x[rows], forward_weight[e], bounds) for e, rows, own in self.each()]
        )

    def wgrad(self, dh: Tensor, x: Tensor, forward_weight: Tensor, bounds: Bounds | None) -> Tensor:
        parts = [wgrad_gemm(dh[rows], x[rows], own, forward_weight[e], bounds) for e, rows, own in self.each()]
        return torch.stack(parts)


class Grouped(ThreeGemms):
    """The three GEMMs of experts, each as one grouped GEMM; the host never waits for the number of an expert's rows."""

    def __init__(self, linear: Linear, dispatch: Dispatch, weight_rows: int) -> None:
        ends = torch.cat((dispatch.ends_E[:-1], dispatch.ends_E.new_full((1,), len(dispatch.copies_N))))
        of_all = AllExperts(
            linear.gemms,
            linear.random,
            kernel=linear.kernel,
            rows=random_rows(linear, dispatch),
            weight_rows=weight_rows,
            ends=ends.to(torch.int32),
        )
        super().__init__(of_all)

    def forward_tokens(
        self, x_TI: Tensor, dispatch: Dispatch, weight: Tensor, dtype: torch.dtype, bounds: Bounds | None
    ) -> Tensor:
        """Return `forward` of the dispatched rows of x; if possible, a token is cast once, before it is copied."""
        if not is_cast_once(self.linear.gemms.forward_x):
            return super().forward_tokens(x_TI, dispatch, weight, dtype, bounds)
        x = self.linear.operand(x_TI, "forward_x", -1, dtype, bounds)
        scale = x.scale if x.scale is None or x.scale.ndim == 0 else to_rows(x.scale, dispatch)
        block_scales = None if x.block_scales is None else to_rows(x.block_scales, dispatch)
        x = replace(x, values=to_rows(x.values, dispatch), scale=scale, block_scales=block_scales)
        return self.linear.gemm(x, self.linear.operand(weight, "forward_w", -1, dtype).T, dtype)


def is_cast_once(cast: Cast | None) -> bool:
    """Return whether the row-wise cast gives a token the same codes and scales before and after it is copied."""
    return cast is None or not (cast.two_dimensional or cast.outer_scale == "tensor" or is_random(cast))


def random_rows(linear: Linear, dispatch: Dispatch) -> Tensor | None:
    """Return the row of each dispatched row's random numbers, int64 [N], or None if none are drawn.

    With K copies a token, copy j of a token that is row r of the whole batch has the number r * K + j. `places`
    already adds the first r, so (K - 1) * r is added here.
    """
    if linear.random is None or not any(is_random(cast) for _, cast in linear.gemms.casts()):
        return None
    return dispatch.copies_N + (dispatch.rows_TK.shape[1] - 1) * linear.random.places[CALL, 1]

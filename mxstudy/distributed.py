"""Collective operations over the ranks of a run; without a process group there is one rank, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    return rank() == 0


def sum_over_ranks(x: Tensor) -> Tensor:
    """Replace x in place with its sum over all ranks, and return it."""
    return _reduced(x, dist.ReduceOp.SUM)


def max_over_ranks(x: Tensor) -> Tensor:
    """Replace x in place with its elementwise maximum over all ranks, and return it."""
    return _reduced(x, dist.ReduceOp.MAX)


def mean_over_ranks(x: Tensor) -> Tensor:
    """Replace x in place with its mean over all ranks, and return it."""
    return sum_over_ranks(x).div_(world_size()) if world_size() > 1 else x


def _reduced(x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    if world_size() > 1:
        dist.all_reduce(x, operation)
    return x


def gather_over_ranks(x: Tensor) -> Tensor:
    """Concatenate the x of all ranks along dimension 0: [n, ...], of one shape on all ranks, to [ranks * n, ...]."""
    if world_size() == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def all_of(x: T) -> list[T]:
    """Return the x of every rank, in the order of ranks; x must be picklable."""
    found: list[T] = [x] * world_size()
    if world_size() > 1:
        dist.all_gather_object(found, x)
    return found


def largest_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Return the maximum over all ranks of each value; every rank gives the same names in the same order."""
    largest = max_over_ranks(torch.tensor(list(values.values()), dtype=torch.float64))
    return dict(zip(values, largest.tolist(), strict=True))


def on_first_rank(do: Callable[[], T]) -> T:
    """Call `do` on rank 0 only, then return its result, or raise its exception, on every rank.

    Result and exception must be picklable.
    """
    if world_size() == 1:
        return do()
    outcome: list[tuple[T | None, Exception | None]] = [(None, None)]
    if is_first():
        try:
            outcome = [(do(), None)]
        except Exception as error:
            outcome = [(None, error)]
    dist.broadcast_object_list(outcome, src=0)
    result, raised = outcome[0]
    if raised is not None:
        raise raised
    return cast(T, result)


def on_all_ranks(do: Callable[[], T]) -> list[T]:
    """Call `do` on every rank; return the results of all ranks, or raise the first exception, on every rank.

    Results and exceptions must be picklable.
    """
    outcome: tuple[T | None, Exception | None] = (None, None)
    try:
        outcome = (do(), None)
    except Exception as error:
        outcome = (None, error)
    outcomes = all_of(outcome)
    for _, raised in outcomes:
        if raised is not None:
            raise raised
    return [cast(T, result) for result, _ in outcomes]


def whole(x: Tensor) -> Tensor:
    """Return the full tensor of a sharded tensor (DTensor), on every rank; return any other tensor unchanged."""
    return x.full_tensor() if is_part(x) else x


def is_part(x: Tensor) -> TypeGuard[DTensor]:
    """Return whether x is sharded over the ranks (DTensor)."""
    if not dist.is_initialized():
        return False
    from torch.distributed.tensor import DTensor  # the import takes a second

    return isinstance(x, DTensor)


def own_part(x: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, which may be empty; return any other tensor unchanged."""
    return x.to_local() if is_part(x) else x


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of `whole`, sharded as `like` is, or `whole` itself if `like` is not sharded."""
    if not is_part(like):
        return whole
    from torch.distributed.tensor import distribute_tensor  # the import takes a second

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def draw_in_turns(weights: Sequence[tuple[Tensor, Callable[[], Tensor]]]) -> None:
    """Fill each weight, sharded or not, with the tensor that its function draws; each rank draws another weight.

    A CPU core draws 15 million numbers a second, so the ranks share the work. No rank holds more than two full tensors.
    """
    for turn in range(0, len(weights), world_size()):
        together = weights[turn : turn + world_size()]
        drawn = together[rank()][1]() if rank() < len(together) else torch.empty(0)
        for owner, (weight, _) in enumerate(together):
            weight.copy_(part_of(from_rank(owner, drawn, weight), weight))


def from_rank(owner: int, x: Tensor, like: Tensor) -> Tensor:
    """Return rank `owner`'s x on every rank, with the shape and device of `like`; with one rank, return x itself."""
    if world_size() == 1:
        return x
    mine = x.to(like.device) if rank() == owner else torch.empty(like.shape, dtype=x.dtype, device=like.device)
    dist.broadcast(mine, src=owner)
    return mine

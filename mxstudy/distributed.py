"""What the processes of a run have together. A process that runs alone is the first of one, and nothing travels."""

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
    """x itself, which then holds the sum."""
    return _reduced(x, dist.ReduceOp.SUM)


def max_over_ranks(x: Tensor) -> Tensor:
    """x itself, which then holds the largest of every element."""
    return _reduced(x, dist.ReduceOp.MAX)


def mean_over_ranks(x: Tensor) -> Tensor:
    """x itself, which then holds the mean."""
    return sum_over_ranks(x).div_(world_size()) if world_size() > 1 else x


def _reduced(x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    if world_size() > 1:
        dist.all_reduce(x, operation)
    return x


def gather_over_ranks(x: Tensor) -> Tensor:
    """[n, ...] of every rank, all of one shape, one after another: [ranks * n, ...]."""
    if world_size() == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def all_of(x: T) -> list[T]:
    """What every rank has, in their order. Must be picklable."""
    found: list[T] = [x] * world_size()
    if world_size() > 1:
        dist.all_gather_object(found, x)
    return found


def largest_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Of the same names on every rank."""
    largest = max_over_ranks(torch.tensor(list(values.values()), dtype=torch.float64))
    return dict(zip(values, largest.tolist(), strict=True))


def on_first_rank(do: Callable[[], T]) -> T:
    """Done by the first rank alone; all have what it returns, and raise what it raises. Both must be picklable."""
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


def whole(x: Tensor) -> Tensor:
    """All of a tensor of which every rank has a part, on every rank; of any other itself."""
    return x.full_tensor() if is_part(x) else x


def is_part(x: Tensor) -> TypeGuard[DTensor]:
    """Whether the other ranks have the rest of it."""
    if not dist.is_initialized():
        return False
    from torch.distributed.tensor import DTensor  # takes a second, and a process of no group has none

    return isinstance(x, DTensor)


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of what all ranks have, where `like` is in parts; else all of it."""
    if not is_part(like):
        return whole
    from torch.distributed.tensor import distribute_tensor  # as in is_part

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def draw_in_turns(weights: Sequence[tuple[Tensor, Callable[[], Tensor]]]) -> None:
    """Fill tensors, whole or in parts, with what is drawn for them; a rank draws one of as many as there are ranks.

    A core draws 15 million numbers a second, so sharing the work counts. No rank holds more than two tensors whole.
    """
    for turn in range(0, len(weights), world_size()):
        together = weights[turn : turn + world_size()]
        drawn = together[rank()][1]() if rank() < len(together) else torch.empty(0)
        for owner, (weight, _) in enumerate(together):
            weight.copy_(part_of(from_rank(owner, drawn, weight), weight))


def from_rank(owner: int, x: Tensor, like: Tensor) -> Tensor:
    """That rank's x on every rank, with the shape and on the device of `like`; of one rank x itself."""
    if world_size() == 1:
        return x
    mine = x.to(like.device) if rank() == owner else torch.empty(like.shape, dtype=x.dtype, device=like.device)
    dist.broadcast(mine, src=owner)
    return mine

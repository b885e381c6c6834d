"""Keep a decoder's experts in balance: sum up the routing of a step, and move the routers' biases by it.

Only the training loop counts, once a micro-batch, so recomputed forwards and evaluations are not counted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mxstudy.distributed import sum_over_ranks
from mxstudy.model.decoder import Decoder
from mxstudy.model.moe import mixtures_of


class StepRouting(NamedTuple):
    """The routing of L blocks in a step, over all micro-batches and ranks.

    `names`: those of the mixtures. `loads_LE`: int64, the tokens that went to each expert. `entropy_L`: that of the
    router's probabilities, in nats, the mean over tokens. `balance_loss`: 0-dim, the auxiliary loss of all blocks; None
    if there is none. `paddings`: each mixture's share of dispatched rows that held no token.
    """

    names: tuple[str, ...]
    loads_LE: Tensor
    entropy_L: Tensor
    balance_loss: Tensor | None
    paddings: tuple[float, ...]


class RoutingOfStep:
    """The sums of a decoder's routing over the forwards of one step; a dense decoder has none."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.paddings: tuple[float, ...] = ()
        self.sums: list[Tensor] = []  # loads, entropies, auxiliary loss

    def with_balance_loss(self, loss: Tensor, share: float) -> Tensor:
        """Add the last forward, with its share of the step's tokens, and return its loss plus the auxiliary loss."""
        routings, self.model.routings = self.model.routings, []
        if not routings:
            return loss
        losses = [routing.balance_loss for routing in routings if routing.balance_loss is not None]
        balance_loss = torch.stack(losses).sum() * share if losses else loss.new_zeros(())
        loads_LE = torch.stack([routing.loads_E for routing in routings])
        entropy_L = torch.stack([routing.entropy for routing in routings]) * share
        now, before = (loads_LE, entropy_L, balance_loss.detach()), self.sums
        self.sums = [a + b for a, b in zip(before, now, strict=True)] if before else list(now)
        self.paddings = tuple(routing.padding for routing in routings)
        return loss + balance_loss if losses else loss

    def over_ranks(self) -> StepRouting | None:
        """Return the sums over all ranks, or None for a dense decoder."""
        if not self.sums:
            return None
        loads_LE, entropy_L, balance_loss = (sum_over_ranks(x) for x in self.sums)
        has_loss, names = self.model.config.moe.balance == "loss", tuple(mixtures_of(self.model))
        return StepRouting(names, loads_LE, entropy_L, balance_loss if has_loss else None, self.paddings)


def move_biases(model: Decoder, routing: StepRouting | None, diverged: Tensor) -> None:
    """Move the biases of all routers by the loads of a step, unless `diverged`, bool [] on the device."""
    if routing is not None:
        for mixture, loads_E in zip(mixtures_of(model).values(), routing.loads_LE, strict=True):
            mixture.router.move_bias(loads_E, diverged)

"""Compute logits by the output linear, or with targets their loss."""

from __future__ import annotations

from torch import Tensor

from mxstudy.blocks.linear_cross_entropy import linear_cross_entropy
from mxstudy.blocks.linear_cross_entropy import unit_gradient as unit_gradient
from mxstudy.compat.torch_modules import hooks_of
from mxstudy.model.linear import MXLinear
from mxstudy.reader import require


class Head(MXLinear):
    """A linear to the vocabulary: x [..., D] -> logits [..., V], or with targets int64 [...] to the loss, float32 [].

    The loss is the sum of the tokens' cross-entropies in nats over `divisor`; the logits of all tokens are then never
    in memory at once. Its backward begins with `unit_gradient`. Raises ConfigError for a loss if a hook needs the
    logits. `hooks_of_sharding`: the hooks of FSDP, which do not need them.
    """

    hooks_of_sharding: frozenset[int] = frozenset()

    def forward(self, x: Tensor, targets: Tensor | None = None, divisor: int = 1) -> Tensor:
        if targets is None:
            return super().forward(x)
        require(
            hooks_of(self) <= self.hooks_of_sharding,
            "targets: a hook of the head would get the loss for logits; call the model without targets, or remove it",
        )
        return linear_cross_entropy(x.flatten(0, -2), self.weight_as(x), targets.flatten(), self.arithmetic, divisor)

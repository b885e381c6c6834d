"""The output linear, which returns logits, or with targets the loss."""

from __future__ import annotations

from torch import Tensor

from mxstudy.blocks.linear_cross_entropy import linear_cross_entropy
from mxstudy.compat.torch_modules import has_hooks
from mxstudy.model.linear import MXLinear
from mxstudy.reader import require


class Head(MXLinear):
    """A linear to the vocabulary: x [..., D] -> logits [..., V], or with targets int64 [...] to the loss, float32 [].

    The loss is the sum of the tokens' cross-entropies in nats over `divisor`; the logits of all tokens are then never
    in memory at once. Raises ConfigError for a loss where a hook waits for logits.
    """

    def forward(self, x: Tensor, targets: Tensor | None = None, divisor: int = 1) -> Tensor:
        if targets is None:
            return super().forward(x)
        is_sharded = hasattr(self, "reshard")  # by FSDP, whose own hooks want no logits; its import takes a second
        require(
            is_sharded or not has_hooks(self),
            "targets: a hook of the head would get the loss for logits; call the model without targets, or remove it",
        )
        return linear_cross_entropy(x.flatten(0, -2), self.weight_as(x), targets.flatten(), self.arithmetic, divisor)

"""Keep the keys and values of the tokens that attention has read, so that only the new token of a text is read.

Keys are kept after their norm and the rotary embedding, as queries are compared with them.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Past:
    """Keys and values [B, T, N, H] of one layer, with room for `size` tokens; `length` of them are filled."""

    def __init__(self, size: int) -> None:
        self.size, self.length = size, 0
        self.kept: tuple[Tensor, Tensor] | None = None

    def extended(self, k_BTNH: Tensor, v_BTNH: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of the first tokens or of the next one, and return those of all tokens."""
        assert self.length == 0 or k_BTNH.shape[1] == 1, "several tokens after others would need a mask"
        kept = self.kept = self.kept or (self.room(k_BTNH), self.room(v_BTNH))
        begin, self.length = self.length, self.length + k_BTNH.shape[1]
        for whole, new in zip(kept, (k_BTNH, v_BTNH), strict=True):
            whole[:, begin : self.length] = new
        k, v = (whole[:, : self.length] for whole in kept)
        return k, v

    def room(self, of_BTNH: Tensor) -> Tensor:
        batch, _, heads, size = of_BTNH.shape
        return torch.empty(batch, self.size, heads, size, dtype=of_BTNH.dtype, device=of_BTNH.device)

"""FSDP2: a warning that is known to be harmless, and the hooks for a weight's own all-gather. Checked with torch 2.13.

Its all-gather was also compared with the source of torch 2.11.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

VIEW_RETURNED = r"FSDP2-wrapped module .* returned a view"
BACKWARD = "PRE_BACKWARD"  # the state of a group of parameters while it is gathered for the backward
T = TypeVar("T", bound=Tensor)


def allow_views() -> None:
    """Ignore FSDP2's warning that a sharded module returns a view, in this process and for good.

    Why: it warns about writing to that view, at every forward. Our views are the logits, and nobody writes to them.
    There is no option for it, and other threads would change a filter that lasts for a step.
    """
    warnings.filterwarnings("ignore", VIEW_RETURNED)


class Extension(Protocol):
    """The two functions that FSDP2 calls at a weight's all-gather."""

    def send(self, mesh: Any, size: torch.Size, stride: Sequence[int], module: Any, policy: Any) -> tuple[Any, Any]:
        """Return the tensors of this rank that are gathered, and anything that `receive` needs."""

    def receive(
        self, gathered: tuple[Tensor, ...], needed: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the whole weight and the tensors that FSDP2 must free, or fill `out`, an earlier result."""


def extend_all_gather(weight: Any, extension: Extension) -> None:
    """Have FSDP2 gather a sharded weight (DTensor), which has its memory already, as the extension says.

    Why: FSDP2 looks for these two attributes on a rank's shard when it runs first. On a class of tensors they would
    make optimizer and checkpoints meet that class; set on the tensor they touch nothing else. `to_local` returns
    another tensor.
    """
    shard = weight._local_tensor
    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = extension.send, extension.receive


def is_gathered_for_backward(module: Any) -> bool:
    """Return whether FSDP2 is gathering the weights of that sharded module for its backward.

    Why: FSDP2 does not tell `send`, and the codes for dgrad differ from those for the forward.
    """
    name: str = module._get_fsdp_state()._fsdp_param_group._training_state.name
    return name == BACKWARD


def stand_in(cls: type[T], size: Sequence[int], dtype: torch.dtype, device: torch.device) -> T:
    """Return a tensor of the class with this size, dtype and device, and no memory of its own.

    Why: FSDP2 makes a parameter of what `receive` returns, whose dtype is that of its gradient.
    """
    made: T = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
    return made

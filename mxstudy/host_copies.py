"""Copy tensors between the host and its GPU while both continue to work."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on the device; a copy from memory that is not pinned would wait for the GPU.

    torch copies a tensor that is not contiguous through memory that is not pinned, even if the tensor itself is pinned.
    """
    return (x.contiguous().pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def to_host(x: Tensor) -> Callable[[], Tensor]:
    """Begin to copy x to the host. Return a function that waits for the copy, not for later work, and returns it.

    The host sleeps meanwhile, because other runs may share its cores.
    """
    if x.device.type != "cuda":
        return lambda: x
    copy, copied = x.to("cpu", non_blocking=True), torch.cuda.Event(blocking=True)
    copied.record(torch.cuda.current_stream(x.device))

    def wait() -> Tensor:
        copied.synchronize()
        return copy

    return wait

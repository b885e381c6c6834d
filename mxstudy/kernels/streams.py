"""A side stream that runs independent work in parallel on a GPU: with a small stack one kernel does not fill it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

side_of = cache(torch.cuda.Stream)  # one side stream per device


def side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that runs its work on a side stream, in parallel with later work, until join_side_stream.

    On CPU the work runs in order. Tensors that it reads or makes must live until then, because the allocator does not
    know of the other stream.
    """
    if device.type != "cuda":
        return nullcontext()
    side_of(device).wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(side_of(device))


def join_side_stream(device: torch.device) -> None:
    """Make the current stream wait for the side stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(side_of(device))

"""What needs nothing of each other, side by side on a GPU: of a small stack neither part fills it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

side_of = cache(torch.cuda.Stream)  # a device


def side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """What is launched in it runs beside what follows it, until `join_side_stream`; on a CPU, in order.

    What it reads and makes has to live until then: the allocator knows nothing of another stream.
    """
    if device.type != "cuda":
        return nullcontext()
    side_of(device).wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(side_of(device))


def join_side_stream(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(side_of(device))

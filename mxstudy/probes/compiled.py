"""Compile what a probe computes of activations, on a GPU, where eager code would read and write them many times."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile to kernels that only read the activations; by default the compiler would store long subexpressions."""
    return torch.compile(function, dynamic=False, options={"realize_opcount_threshold": 1000})


def on_gpu_compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`, compiled if the last argument is a tensor on a GPU."""
    return (compiled(function) if arguments[-1].is_cuda else function)(*arguments)

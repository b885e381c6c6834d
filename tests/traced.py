"""Trace with torch.compile as usual, but run the graphs as they are, without making code of them.

This is for tests of graphs: how many there are, that tracing has no break, what is read beside them, what a forward
keeps for its backward. It takes half the time, and a quarter with several processes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch


def run_graphs_as_they_are(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, inputs, **_: graph.forward)


def without_code(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """Act as Inductor, with its passes and its partition into forward and backward, up to where it makes code."""
    from functorch.compile import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs, inner_compile=lambda part, _, **__: make_boxed_func(part.forward))

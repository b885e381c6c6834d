"""torch.compile: constants that cost no import, and roundings that stay. Checked with torch 2.11.0 and 2.13.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def constant(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, marked: its results are constants of a compiled graph, and it is never traced into.

    Why: torch.compiler.assume_constant_result does the same, and first imports the compiler, which takes a second at
    every start. The mark is what torch._dynamo looks for.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def keep_roundings() -> None:
    """Have Inductor round where the code says so: x.to(bfloat16).to(float32) is not x, and x / y is rounded once.

    Why: its options leave two ways open. A pass over the graph (`pointless_convert`) removes such pairs, before torch
    2.13 whatever `emulate_precision_casts` says; and on CPU a kernel remembers what a conversion was made of. Both are
    taken out, in this process and for good. A graph from torch's cache may have lost roundings, so the cache's key has
    a tag of its own.
    """
    import torch._inductor.config as inductor
    import torch.compiler.config as compiler
    from torch._inductor.codegen.cpp import CppKernel
    from torch._inductor.fx_passes import joint_graph

    inductor.emulate_precision_casts = True
    if hasattr(inductor, "eager_numerics"):
        inductor.eager_numerics.division_rounding = True
    for entries in joint_graph.patterns.patterns.values():
        entries[:] = [e for e in entries if getattr(e, "handler", None) is not joint_graph.pointless_convert]
    CppKernel.cache_dtype_convert = lambda *_: None  # type: ignore[method-assign]
    compiler.cache_key_tag = "mxstudy keeps all roundings"

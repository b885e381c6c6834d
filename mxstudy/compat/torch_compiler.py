"""torch.compile: cheap constants, constant floats, kept roundings, rules built once. Checked with 2.11.0 and 2.13.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def constant(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, marked so that a compiled graph takes its results as constants and never traces into it.

    Why: torch.compiler.assume_constant_result does the same, but first imports the compiler, which takes a second at
    every start. torch._dynamo looks for this mark.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def keep_floats_constant() -> None:
    """Make torch.compile compile anew for another value of a float, in this process and for good.

    Why: by default it takes a float that has changed once as unknown, and a kernel's options (the headroom of a cast,
    its largest scale) cannot be unknown. The option has no public name.
    """
    import torch._dynamo.config as dynamo

    dynamo.specialize_float = True


def keep_roundings() -> None:
    """Make Inductor round wherever the code does: x.to(bfloat16).to(float32) is not x, and x / y is rounded once.

    Why: its options leave three gaps. A pass over the graph (`pointless_convert`) removes such pairs of conversions,
    before torch 2.13 whatever `emulate_precision_casts` says. Two others (`addmm`, `unfuse_bias_add_to_pointwise`)
    join a product with the sum after it, or part them, so that a product in bf16 is not rounded before it is added, or
    is rounded where it was not. And on CPU a kernel reuses the source of a conversion. All are removed, in this process
    and for good. A graph from torch's cache may have lost roundings, so the cache's key gets a tag of its own.
    """
    import torch._inductor.config as inductor
    import torch.compiler.config as compiler
    from torch._inductor.codegen.cpp import CppKernel

    inductor.emulate_precision_casts = True
    if hasattr(inductor, "eager_numerics"):
        inductor.eager_numerics.division_rounding = True
    for entries, dropping in entries_that_drop_roundings():
        entries[:] = [entry for entry in entries if entry not in dropping]
    CppKernel.cache_dtype_convert = lambda *_: None  # type: ignore[method-assign]
    compiler.cache_key_tag = "mxstudy keeps all roundings, of products too"


def entries_that_drop_roundings() -> list[tuple[list[Any], list[Any]]]:
    """Return Inductor's lists of passes over a graph, each with those of its entries that change roundings."""
    from torch._inductor.fx_passes import joint_graph, post_grad

    dropping = (joint_graph.pointless_convert, post_grad.addmm, post_grad.unfuse_bias_add_to_pointwise)
    lists = [entries for one in (joint_graph.patterns, *post_grad.pass_patterns) for entries in one.patterns.values()]
    return [(entries, [e for e in entries if getattr(e, "handler", None) in dropping]) for entries in lists]


def build_dtype_rules_once() -> None:
    """Make Inductor build its table of dtype rules once, in this process and for good.

    Why: its handler of dtypes is a singleton, but its constructor runs anew for each operation of a kernel, and fills
    the same table again, in 0.14 ms: 10 of the 81 s in which a graph with all casts was compiled. The table is built
    again only if there are more rules than before.
    """
    from torch._inductor import utils
    from torch._inductor.codegen import common
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler as Handler

    build, built = Handler.__init__, [0, 0]
    if build.__module__ == __name__:
        return

    def build_if_new(self: Handler) -> None:
        rules = [len(utils.op_dtype_propagation_rules), len(common.pointwise_overrides_data)]
        if rules != built:
            build(self)
            built[:] = rules

    Handler.__init__ = build_if_new  # type: ignore[method-assign]

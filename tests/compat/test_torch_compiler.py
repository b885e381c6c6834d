"""torch.compile still has what mxstudy.compat.torch_compiler changes, and the changes have their effect.

If a test of the first half fails with a new torch, look in torch/_dynamo and torch/_inductor for where that part went.
"""

from __future__ import annotations

import inspect
from typing import Any

import forked
import pytest
import torch
from each import each

from mxstudy.compat.torch_compiler import build_dtype_rules_once, constant, keep_roundings
from mxstudy.numerics.cast import BlockCast
from mxstudy.numerics.vector_ops import round_gain
from mxstudy.train.runtime import configure_torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUND_TRIPS = {
    "alone": lambda x: x.to(torch.bfloat16).to(torch.float32),
    "in between": lambda x: (x * 1.0001).to(torch.bfloat16).float() * 3,
    "a gain": lambda x: round_gain(x, "bf16", None, BlockCast()) + 1,
    "before a cast": lambda x: torch.nn.functional.gelu(x.to(torch.bfloat16)).float() * 2,
    "a product": lambda x: x.to(torch.bfloat16) @ x.to(torch.bfloat16) + x.to(torch.bfloat16),
    "a product and a bias": lambda x: torch.addmm(x[0], x, x).to(torch.bfloat16).relu(),
}


def handlers_of(*passes: Any) -> list[object]:
    return [getattr(e, "handler", None) for one in passes for entries in one.patterns.values() for e in entries]


def untouched() -> None:
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor
    import torch.compiler.config as compiler
    from torch._inductor.codegen.cpp import CppKernel
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
    from torch._inductor.fx_passes import joint_graph, post_grad

    handlers = handlers_of(joint_graph.patterns, *post_grad.pass_patterns)
    assert joint_graph.pointless_convert in handlers, "no pass pointless_convert"
    assert post_grad.addmm in handlers, "no pass addmm"
    assert post_grad.unfuse_bias_add_to_pointwise in handlers, "no pass unfuse_bias_add_to_pointwise"
    names = list(inspect.signature(vars(CppKernel)["cache_dtype_convert"]).parameters)
    assert names == ["self", "dst", "dst_dtype", "src", "src_dtype"], names
    assert inductor.emulate_precision_casts is False
    assert inductor.eager_numerics.division_rounding is False
    assert compiler.cache_key_tag == ""
    assert dynamo.specialize_float is False
    rule, same_rule = (vars(DtypePropagationOpsHandler())["add"] for _ in range(2))
    assert rule is not same_rule, "torch builds its table of dtype rules once by itself"


@pytest.mark.slow
def test_torch_has_what_would_drop_roundings_and_constant_floats() -> None:
    """It runs in a process of its own, because this one may have been changed already."""
    process = forked.context().Process(target=untouched)
    process.start()
    process.join()
    assert process.exitcode == 0, "its traceback is in what was captured of stderr"


@pytest.mark.integration
def test_a_kernel_asks_for_the_conversions_that_it_remembers() -> None:
    from torch._inductor.codegen import cpp

    assert "V.kernel.cache_dtype_convert(" in inspect.getsource(cpp)


@pytest.mark.integration
def test_no_pass_removes_conversions_or_joins_a_product_and_a_sum() -> None:
    import torch._inductor.config as inductor
    from torch._inductor.fx_passes import joint_graph, post_grad

    keep_roundings()
    handlers = handlers_of(joint_graph.patterns, *post_grad.pass_patterns)
    assert any(handlers)
    assert joint_graph.pointless_convert not in handlers
    assert post_grad.addmm not in handlers
    assert post_grad.unfuse_bias_add_to_pointwise not in handlers
    assert inductor.emulate_precision_casts
    assert inductor.eager_numerics.division_rounding


@pytest.mark.slow
@each("name", ROUND_TRIPS)
def test_round_trips_stay(name: str) -> None:
    configure_torch(compile=True)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    eager, compiled = ROUND_TRIPS[name](x), torch.compile(ROUND_TRIPS[name])(x)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-6)
    torch.compiler.reset()


@pytest.mark.integration
def test_dtype_rules_are_built_once_and_again_for_a_new_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import utils
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler as Handler

    build_dtype_rules_once()
    build_dtype_rules_once()
    rule = vars(Handler())["add"]
    assert vars(Handler())["add"] is rule
    rules = utils.op_dtype_propagation_rules
    monkeypatch.setitem(rules, "new_operation", rules["add"])
    assert vars(Handler())["new_operation"].keywords == rule.keywords


def test_a_constant_is_marked_as_torch_marks_it() -> None:
    def ours() -> int:
        return 1

    def torchs() -> int:
        return 1

    assert constant(ours) is ours
    assert vars(ours) == vars(torch.compiler.assume_constant_result(torchs)) != {}


def test_a_constant_is_not_traced_into() -> None:
    @constant
    def length() -> int:
        return len(open(__file__).read())  # the compiler cannot trace this

    compiled = torch.compile(lambda x: x + length(), fullgraph=True, backend="eager")
    assert compiled(torch.zeros(())).item() == length()

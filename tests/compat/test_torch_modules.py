"""torch.nn.Module keeps every kind of hook in the tables that mxstudy.compat.torch_modules reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from mxstudy.compat.torch_modules import HOOKS, has_hooks, hooks_of

ADD: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda module: module.register_forward_hook(print),
    "forward pre": lambda module: module.register_forward_pre_hook(print),
    "backward": lambda module: module.register_full_backward_hook(print),
    "backward pre": lambda module: module.register_full_backward_pre_hook(print),
}


@pytest.mark.parametrize("kind", ADD)
def test_a_hook_is_seen_until_it_is_removed(kind: str) -> None:
    module = nn.Linear(1, 1)
    assert not has_hooks(module)
    handle = ADD[kind](module)
    assert has_hooks(module)
    assert len(hooks_of(module)) == 1
    before = hooks_of(module)
    handle.remove()
    assert not has_hooks(module)
    assert not hooks_of(module)
    ADD[kind](module)
    assert not hooks_of(module) & before


def test_torch_has_no_other_table_of_hooks_that_a_call_reads() -> None:
    tables = {name for name in vars(nn.Linear(1, 1)) if name.endswith("_hooks")}
    of_checkpoints = {name for name in tables if "state_dict" in name}
    assert tables - of_checkpoints == set(HOOKS)

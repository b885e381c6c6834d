"""torch.nn.Module: whether a module has hooks. Checked with torch 2.11.0 and 2.13.0."""

from __future__ import annotations

from torch import nn

HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling the module would call a hook.

    Why: a module has methods that add a hook, and none that says whether there is one.
    """
    return any(getattr(module, hooks) for hooks in HOOKS)


def hooks_of(module: nn.Module) -> frozenset[int]:
    """Return the numbers of the hooks that calling the module would call; no two hooks of a process share one."""
    return frozenset(number for hooks in HOOKS for number in getattr(module, hooks))

"""FSDP2: a warning that is known to be harmless. Checked with torch 2.13.0."""

from __future__ import annotations

import warnings

VIEW_RETURNED = r"FSDP2-wrapped module .* returned a view"


def allow_views() -> None:
    """Ignore FSDP2's warning that a sharded module returns a view, in this process and for good.

    Why: it warns about writing to that view, at every forward. Our views are the logits, and nobody writes to them.
    There is no option for it, and a filter for the length of a step would be changed by the threads beside it.
    """
    warnings.filterwarnings("ignore", VIEW_RETURNED)

"""torch.compile that traces as it always does and runs the graphs as they are: no code is made of them.

For what is asked about graphs: how many there are, that tracing has no break, what is read beside them. It takes half
the time, and a quarter with several processes.
"""

from __future__ import annotations

import pytest


def run_graphs_as_they_are(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, inputs, **_: graph.forward)

"""Report the routing of a step's tokens in a mixture of experts."""

from __future__ import annotations

from torch import Tensor, nn

from mxstudy import config
from mxstudy.probes.base import StepView, Values


class Routing:
    """Quantities '<mixture>/<quantity>' over all micro-batches and ranks of the step.

    loads: each expert's share of all copies of tokens, in the order of experts; 1 / E is balance. busiest: tokens of
    the expert with the most tokens. idle: experts without a token. entropy: that of the router's probabilities, in
    nats, the mean over tokens; log E is the entropy of uniform probabilities. padding: the share of dispatched rows
    that held no token.
    """

    name = "routing"

    def __init__(self, settings: config.Routing) -> None:
        self.every_steps = settings.every_steps

    def watch(self, name: str, module: nn.Module, x: Tensor) -> None:
        """Do nothing: the step has counted its tokens."""

    def measure(self, view: StepView) -> Values:
        if view.routing is None:
            return {}
        values: Values = {}
        rows = zip(view.routing.names, view.routing.loads_LE.tolist(), view.routing.entropy_L.tolist(), strict=True)
        for name, loads, entropy in rows:
            values |= {
                f"{name}/loads": [load / sum(loads) for load in loads],
                f"{name}/busiest": float(max(loads)),
                f"{name}/idle": float(loads.count(0)),
                f"{name}/entropy": entropy,
                f"{name}/padding": view.routing.padding,
            }
        return values

"""Report the routing of a step's tokens in a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mxstudy.host_copies import to_host
from mxstudy.probes.base import Later, ScheduledProbe, StepView, Values


class Routing(ScheduledProbe):
    """Quantities '<mixture>/<quantity>' over all micro-batches and ranks of the step.

    loads: each expert's share of all copies of tokens, in the order of experts; 1 / E is balance. busiest: tokens of
    the expert with the most tokens. idle: experts without a token. entropy: that of the router's probabilities, in
    nats, the mean over tokens; log E is the entropy of uniform probabilities. padding: the share of dispatched rows
    that held no token.

    The probabilities are all experts' scores divided by their sum, and sigmoids are all near 1/2 at first, so with a
    sigmoid gate the entropy begins near log E and moves slowly. The padding is fixed by the config, because the number
    of rows does not depend on the routing.
    """

    name = "routing"

    def measure(self, view: StepView) -> Values | Later:
        if view.routing is None:
            return {}
        names, paddings = view.routing.names, view.routing.paddings
        loads_LE, entropy_L = to_host(view.routing.loads_LE), to_host(view.routing.entropy_L)
        return lambda: by_mixture(names, loads_LE(), entropy_L(), paddings)


def by_mixture(names: Sequence[str], loads_LE: Tensor, entropy_L: Tensor, paddings: Sequence[float]) -> Values:
    values: Values = {}
    for name, loads, entropy, padding in zip(names, loads_LE.tolist(), entropy_L.tolist(), paddings, strict=True):
        values |= {
            f"{name}/loads": [load / sum(loads) for load in loads],
            f"{name}/busiest": float(max(loads)),
            f"{name}/idle": float(loads.count(0)),
            f"{name}/entropy": entropy,
            f"{name}/padding": padding,
        }
    return values

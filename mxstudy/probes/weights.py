"""Measure the size of the parameters and the distribution of the gains."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mxstudy.distributed import max_over_ranks, own_part, whole
from mxstudy.model.modules import modules_of
from mxstudy.model.norm import Norm
from mxstudy.probes.base import ScheduledProbe, StepView, Values


class Weights(ScheduledProbe):
    """'<parameter>/<quantity>' after the step: rms, absmax, and for a norm's gain also mean, std (ddof 0), min, max."""

    name = "weights"

    @torch.no_grad()
    def measure(self, view: StepView) -> Values:
        quantities: dict[str, Tensor] = {}
        parameters = dict(view.model.named_parameters())
        absmaxes = max_over_ranks(torch.stack([absmax(own_part(parameter)) for parameter in parameters.values()]))
        for (name, parameter), largest in zip(parameters.items(), absmaxes, strict=True):
            quantities[f"{name}/rms"] = torch.linalg.vector_norm(parameter) / parameter.numel() ** 0.5
            quantities[f"{name}/absmax"] = largest
        for name, gain in ((name, whole(gain)) for name, gain in gains_of(view.model).items()):
            quantities |= {f"{name}/{quantity}": value for quantity, (value,) in moments(gain[None]).items()}
        return dict(zip(quantities, torch.stack([whole(x) for x in quantities.values()]).tolist(), strict=True))


def absmax(x: Tensor) -> Tensor:
    """Return the largest magnitude in x, a scalar, or 0 for an empty x, as the part of a rank may be."""
    return torch.linalg.vector_norm(x, torch.inf) if x.numel() else x.new_zeros(())


def gains_of(model: nn.Module) -> dict[str, Tensor]:
    norms = modules_of(model, Norm)
    return {f"{name}.weight": norm.weight for name, norm in norms.items() if norm.weight is not None}


def moments(gain: Tensor) -> dict[str, Tensor]:
    """Return mean, std (ddof 0), min and max of a gain for each replica: float64 [S] each."""
    gain = gain.flatten(1).double()
    return {"mean": gain.mean(1), "std": gain.std(1, correction=0), "min": gain.amin(1), "max": gain.amax(1)}

"""The probes that a config asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mxstudy import config
from mxstudy.probes.activations import ActivationHistograms, NormOutputRMS
from mxstudy.probes.base import Probe
from mxstudy.probes.gradient_bias import GradientBias
from mxstudy.probes.saturation import Saturation

# By field of config.Probes.
PROBES: dict[str, Callable[[Any], Probe]] = {
    "norm_output_rms": NormOutputRMS,
    "activation_histograms": ActivationHistograms,
    "saturation": Saturation,
    "gradient_bias": GradientBias,
}


def build_probes(probes: config.Probes) -> list[Probe]:
    """Those that are on."""
    settings = {name: getattr(probes, name) for name in PROBES}
    return [PROBES[name](one) for name, one in settings.items() if one.every_steps > 0]

"""Build the probes that a config switches on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mxstudy import config
from mxstudy.probes.activations import ActivationHistograms, NormOutputRMS
from mxstudy.probes.base import Probe
from mxstudy.probes.gradient_bias import GradientBias
from mxstudy.probes.last_bins import LastBin
from mxstudy.probes.memory import Memory
from mxstudy.probes.names import probe_names
from mxstudy.probes.outliers import FeatureRing, OutlierFeatures
from mxstudy.probes.routing import Routing
from mxstudy.probes.saturation import Saturation
from mxstudy.probes.spike_watch import SpikeWatch
from mxstudy.probes.timing import Timing
from mxstudy.probes.weights import Weights
from mxstudy.reader import require

# One entry for each of `probe_names`.
PROBES: dict[str, Callable[[Any], Probe]] = {
    "norm_output_rms": NormOutputRMS,
    "activation_histograms": ActivationHistograms,
    "outlier_features": OutlierFeatures,
    "saturation": Saturation,
    "last_bin": LastBin,
    "gradient_bias": GradientBias,
    "weights": Weights,
    "memory": Memory,
    "timing": Timing,
    "routing": Routing,
}


def build_probes(probes: config.Probes) -> list[Probe]:
    """Return the probes that are on, and the ring of features if spikes are watched and need it.

    Raises ConfigError for a probe without an entry in PROBES.
    """
    settings = {name: getattr(probes, name) for name in probe_names(probes)}
    for name in settings:
        require(name in PROBES, f"probe.{name}: has no row in PROBES (mxstudy/probes/build.py); add one")
    built = [PROBES[name](each) for name, each in settings.items() if each.every_steps]
    outliers = probes.outlier_features
    has_ring = probes.spikes.every_steps and outliers.every_steps and outliers.ring_steps
    return [*built, FeatureRing(outliers)] if has_ring else built


def build_spikes(
    probes: config.Probes, built: list[Probe], folder: Path, pin: Callable[[], str | None], losses: Sequence[float]
) -> SpikeWatch | None:
    """Return the spike watch, or None if it is off. `built`: from `build_probes`; other arguments: see SpikeWatch."""
    ring = next((probe for probe in built if isinstance(probe, FeatureRing)), None)
    return SpikeWatch(probes.spikes, ring, folder, pin, losses) if probes.spikes.every_steps else None

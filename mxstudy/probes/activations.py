"""What the norms take in and give out: the RMS of their outputs, and signed histograms of both sides.

Outputs are recomputed from the norm's input, which the backward keeps anyway: the model's own graph stays the same
with probes on or off, eager or compiled. They are those of the GEMM's operand: normalised, quantised where the plan
quantises it, without the gain.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from mxstudy import config
from mxstudy.model.linear import NormLinear
from mxstudy.model.norm import Norm
from mxstudy.numerics.norm import normalize, rms_exact
from mxstudy.probes.base import Probe, StepView, Values

SMALLEST_EXPONENT, LARGEST_EXPONENT, BINS_PER_OCTAVE = -16, 12, 4


def bin_edges() -> np.ndarray:
    """Edges of the histograms, ascending and symmetric about 0: powers of 2^(1/4) from 2^-16 to 2^12, and infinity.

    The middle bin holds what is smaller than 2^-16 in magnitude.
    """
    exponents = np.arange(SMALLEST_EXPONENT * BINS_PER_OCTAVE, LARGEST_EXPONENT * BINS_PER_OCTAVE + 1)
    magnitudes = np.append(2.0 ** (exponents / BINS_PER_OCTAVE), np.inf)
    return np.concatenate((-magnitudes[::-1], magnitudes))


def norm_of(module: nn.Module) -> Norm:
    norm = module.norm if isinstance(module, NormLinear) else module
    assert isinstance(norm, Norm)
    return norm


def norm_output(module: nn.Module, x: Tensor) -> Tensor:
    """The norm's output as its reader gets it, float32."""
    norm = norm_of(module)
    output = normalize(x, norm.rms(x))
    return module.read(output) if isinstance(module, NormLinear) and norm.fold_gain else output


class NormOutputRMS:
    """RMS over tokens and features of each norm's output, beside that of the exact RMSNorm (MXNorm paper, figure 6)."""

    name = "norm_output_rms"

    def __init__(self, settings: config.NormOutputRMS) -> None:
        self.every_steps = settings.every_steps
        self.mean_squares: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def watch(self, name: str, module: nn.Module, x: Tensor) -> None:
        outputs = {"rms": norm_output(module, x), "rms_true": normalize(x, rms_exact(x, norm_of(module).eps))}
        for quantity, output in outputs.items():
            self.mean_squares.setdefault(f"{name}/{quantity}", []).append(output.square().mean())

    def measure(self, view: StepView) -> Values:
        rms = torch.stack([torch.stack(parts).mean().sqrt() for parts in self.mean_squares.values()]).tolist()
        names, self.mean_squares = list(self.mean_squares), {}
        return dict(zip(names, rms, strict=True))


class ActivationHistograms:
    """Counts of every norm's input and output elements by `bin_edges` (MXNorm paper, figure 7), with its bound."""

    name = "activation_histograms"

    def __init__(self, settings: config.ActivationHistograms) -> None:
        self.every_steps = settings.every_steps
        self.counts: dict[str, Tensor] = {}
        self.bounds: dict[str, float] = {}

    @torch.no_grad()
    def watch(self, name: str, module: nn.Module, x: Tensor) -> None:
        edges = torch.from_numpy(bin_edges()).to(x.device, torch.float32)
        for side, values in {"input": x.float(), "output": norm_output(module, x)}.items():
            counts = torch.bincount(
                torch.bucketize(values.flatten(), edges[1:-1], right=True), minlength=len(edges) - 1
            )
            self.counts[f"{name}/{side}"] = self.counts.get(f"{name}/{side}", 0) + counts
        self.bounds[f"{name}/bound"] = norm_of(module).bound

    def measure(self, view: StepView) -> Values:
        values: Values = {name: counts.tolist() for name, counts in self.counts.items()} | self.bounds
        self.counts, self.bounds = {}, {}
        return values


def build_probes(probes: config.Probes) -> list[Probe]:
    """The probes that are on."""
    built: list[Probe] = [NormOutputRMS(probes.norm_output_rms), ActivationHistograms(probes.activation_histograms)]
    return [probe for probe in built if probe.every_steps > 0]

"""Outlier features: the few features of the residual stream much larger than all others (MXNorm paper, section 4.2).

The ring keeps the absmax of every feature over the last steps, for the heat map around a spike (figure 5);
mxstudy.probes.ring_file describes its file.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from mxstudy import config
from mxstudy.distributed import gather_over_ranks, max_over_ranks
from mxstudy.probes.base import ScheduledProbe, StepView, Values
from mxstudy.probes.compiled import on_gpu_compiled
from mxstudy.probes.ring_file import STEPS
from mxstudy.whole_files import replacing


class OutlierFeatures(ScheduledProbe):
    """Quantities '<norm>/<quantity>' of every norm's input over the step's tokens.

    absmax: the largest |x|. feature: index of the feature that has it. sharing_tokens: number of tokens whose largest
    feature is the same one, with at least half of absmax. rms: over all elements.
    """

    name = "outlier_features"

    def __init__(self, settings: config.OutlierFeatures) -> None:
        super().__init__(settings)
        self.seen: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}

    @torch.no_grad()
    def watch(self, name: str, module: nn.Module, x: Tensor) -> None:
        self.seen.setdefault(name, []).append(on_gpu_compiled(token_maxima, x))

    def measure(self, view: StepView) -> Values:
        tokens = (map(torch.cat, zip(*parts, strict=True)) for parts in self.seen.values())
        rows = torch.stack([outlier(*map(gather_over_ranks, of_norm)) for of_norm in tokens])
        values: Values = {}
        for name, (absmax, feature, sharing, rms) in zip(self.seen, rows.tolist(), strict=True):
            quantities = {"absmax": absmax, "feature": int(feature), "sharing_tokens": int(sharing), "rms": rms}
            values |= {f"{name}/{quantity}": value for quantity, value in quantities.items()}
        self.seen = {}
        return values


def token_maxima(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's absmax, float32 [T], the feature that has it, int64 [T], and its mean square, float32 [T]."""
    x = x.flatten(0, -2)
    absmax_T, feature_T = x.abs().max(-1)
    norm_T = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
    return absmax_T.float(), feature_T, norm_T.square() / x.shape[-1]


def outlier(absmax_T: Tensor, feature_T: Tensor, square_T: Tensor) -> Tensor:
    """Return absmax, feature, sharing_tokens, rms, float64 [4], from each token's absmax, its feature, mean square."""
    absmax, token = absmax_T.max(0)
    feature = feature_T[token]
    sharing = ((feature_T == feature) & (absmax_T >= absmax / 2)).sum()
    return torch.stack([x.double() for x in (absmax, feature, sharing, square_T.double().mean().sqrt())])


class FeatureRing:
    """A ring buffer of the absmax of every feature of every norm's input over the last `ring_steps` steps.

    It is kept on the model's device and writes no rows to the journal. A resumed run begins with an empty ring.
    """

    name, every_steps = "feature_ring", 1

    def __init__(self, settings: config.OutlierFeatures) -> None:
        self.after_steps = settings.ring_steps // 4  # how many of the steps in a spike's file follow the spike
        self.past: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=settings.ring_steps)
        self.now: dict[str, Tensor] = {}

    @torch.no_grad()
    def watch(self, name: str, module: nn.Module, x: Tensor) -> None:
        absmax_D = torch.linalg.vector_norm(x.flatten(0, -2), torch.inf, dim=0)  # reads x once; abs() would copy it
        self.now[name] = torch.maximum(self.now[name], absmax_D) if name in self.now else absmax_D

    def measure(self, view: StepView) -> Values:
        sizes = [len(absmax_D) for absmax_D in self.now.values()]
        absmax = max_over_ranks(torch.cat(list(self.now.values())))
        self.past.append((view.step, dict(zip(self.now, absmax.split(sizes), strict=True))))
        self.now = {}
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Return `steps` and each norm's absmax [steps, size] in the activations' dtype, on CPU."""
        steps, features = zip(*self.past, strict=True)
        norms = {name: torch.stack([step[name] for step in features]).cpu() for name in features[0]}
        return {STEPS: torch.tensor(steps)} | norms

    def write(self, path: Path) -> None:
        """Write the ring's file atomically. Raises OSError."""
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(save(self.tensors()))

"""The schema of what is watched and where it is mirrored; none of it changes a number."""

from __future__ import annotations

from mxstudy.reader import cosmetic, require, schema


@schema
class Scheduled:
    """Measures on every `every_steps`-th step; 0: off."""

    every_steps: int = cosmetic(0)

    def __post_init__(self) -> None:
        require(self.every_steps >= 0, f"every_steps: must not be negative, not {self.every_steps}; 0 is off")


@schema
class NormOutputRMS(Scheduled):
    """RMS of every norm's output, beside that of the exact RMSNorm of the same input."""


@schema
class ActivationHistograms(Scheduled):
    """Signed, log-spaced histograms of every norm's input and output."""


@schema
class OutlierFeatures(Scheduled):
    """The largest activation into every norm, its feature, and how many tokens share it.

    `ring_steps`: of so many last steps the absmax of every feature is kept, to be written out around a spike, where
    `spikes` looks for them; 0: none.
    """

    ring_steps: int = cosmetic(64)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.ring_steps >= 0, f"ring_steps: must not be negative, not {self.ring_steps}; 0 is no ring")


@schema
class Saturation(Scheduled):
    """Last-bin and underflow fractions, scales and SQNR of every quantised operand, on one sequence."""


@schema
class GradientBias(Scheduled):
    """MX gradients against FP32 ones at the same weights, on one sequence: ratio and cosine by layer."""


@schema
class Weights(Scheduled):
    """RMS and absmax of every parameter, and of gains mean and spread."""


@schema
class Memory(Scheduled):
    """Memory of the process; of the GPU what is allocated, what is reserved, and the peak since the last row."""


@schema
class Timing(Scheduled):
    """Milliseconds by phase of the step: data, forward, backward, clip, optimizer."""


@schema
class Spikes(Scheduled):
    """Whether a loss lies above the mean of the last `window_steps` by `threshold` standard deviations.

    A spike keeps the last checkpoint before it, and writes out the ring of `outlier_features`. `every_steps` is 0 or 1.
    """

    window_steps: int = cosmetic(128)
    threshold: float = cosmetic(6.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.every_steps in (0, 1), f"every_steps: looks at every loss (1) or at none (0), not {self.every_steps}"
        )
        require(self.window_steps >= 2, f"window_steps: a spread needs at least 2, not {self.window_steps}")
        require(self.threshold > 0, f"threshold: must be positive, not {self.threshold}")


@schema
class Probes:
    norm_output_rms: NormOutputRMS = NormOutputRMS()
    activation_histograms: ActivationHistograms = ActivationHistograms()
    outlier_features: OutlierFeatures = OutlierFeatures()
    saturation: Saturation = Saturation()
    gradient_bias: GradientBias = GradientBias()
    weights: Weights = Weights()
    memory: Memory = Memory()
    timing: Timing = Timing()
    spikes: Spikes = Spikes()


@schema
class Tracking:
    """The MLflow mirror of the journal; `uri: null` keeps the journal alone."""

    uri: str | None = "sqlite:///mlflow.db"

    def __post_init__(self) -> None:
        require(
            self.uri is None or ("://" in self.uri and not self.uri.startswith("file:")),
            f"uri: {self.uri!r} would be a file store, which MLflow refuses; give sqlite:///mlflow.db or http://HOST:PORT",
        )

"""The schema of probes and of the MLflow mirror; none of it changes a number of the run."""

from __future__ import annotations

from mxstudy.reader import cosmetic, require, schema


@schema
class Scheduled:
    """A probe that measures on every `every_steps`-th step; 0: off."""

    every_steps: int = cosmetic(0)

    def __post_init__(self) -> None:
        require(self.every_steps >= 0, f"every_steps: must not be negative, not {self.every_steps}; 0 is off")


@schema
class NormOutputRMS(Scheduled):
    """RMS of every norm's output, and RMS of the exact RMSNorm's output for the same input."""


@schema
class ActivationHistograms(Scheduled):
    """Signed, log-spaced histograms of every norm's input and output."""


@schema
class OutlierFeatures(Scheduled):
    """The largest activation in every norm's input, its feature, and how many tokens share it.

    `ring_steps`: keep the absmax of every feature for this many last steps, and write them to a file around a spike if
    `spikes` is on; 0: keep none. A quarter of the file's steps follow the spike, so 1 to 3 are refused.
    """

    ring_steps: int = cosmetic(64)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.ring_steps == 0 or self.ring_steps >= 4,
            f"ring_steps: must be 0 (keep none) or at least 4, not {self.ring_steps}: a quarter follows the spike",
        )


@schema
class Saturation(Scheduled):
    """Last-bin and underflow fractions, scales and SQNR of every quantised operand, on one sequence."""


@schema
class LastBin(Scheduled):
    """Fractions of the norms' gains and biases in the last bin; for students also of others, and the gains' spread.

    The others are weights, the inputs of the linears' casts, and the residual stream. A decoder's gains have their mean
    and spread in `weights`.
    """


@schema
class GradientBias(Scheduled):
    """MX gradients against FP32 gradients at the same weights, on one sequence: ratio and cosine by layer.

    `by_operand`: also the gradients with one operand quantised against those with none, for each operand that the
    recipe quantises. It takes a forward and a backward for each of these, and one for none: up to seven beside the two
    of the probe, or nine if the recipe makes backward operands from the forward's (`source: forward`).
    """

    by_operand: bool = cosmetic(False)


@schema
class Weights(Scheduled):
    """RMS and absmax of every parameter; for gains also mean and spread."""


@schema
class Memory(Scheduled):
    """Memory of the process; on a GPU also allocated and reserved memory, and the peak since the last row."""


@schema
class Timing(Scheduled):
    """Milliseconds of each phase of a step: data, forward, backward, clip, optimizer."""


@schema
class Routing(Scheduled):
    """Load of every expert, entropy of the router, and the share of padding, in a mixture of experts."""


@schema
class Spikes(Scheduled):
    """Detect a loss more than `threshold` standard deviations above the mean of the last `window_steps` losses.

    At a spike, the run keeps the last checkpoint before it, and writes the ring of `outlier_features` to a file.
    `every_steps` is 0 or 1.
    """

    window_steps: int = cosmetic(128)
    threshold: float = cosmetic(6.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.every_steps in (0, 1), f"every_steps: must be 1 (every loss) or 0 (off), not {self.every_steps}")
        require(self.window_steps >= 2, f"window_steps: must be at least 2 for a spread, not {self.window_steps}")
        require(self.threshold > 0, f"threshold: must be positive, not {self.threshold}")


@schema
class Probes:
    norm_output_rms: NormOutputRMS = NormOutputRMS()
    activation_histograms: ActivationHistograms = ActivationHistograms()
    outlier_features: OutlierFeatures = OutlierFeatures()
    saturation: Saturation = Saturation()
    last_bin: LastBin = LastBin()
    gradient_bias: GradientBias = GradientBias()
    weights: Weights = Weights()
    memory: Memory = Memory()
    timing: Timing = Timing()
    routing: Routing = Routing()
    spikes: Spikes = Spikes()


@schema
class Tracking:
    """The MLflow mirror of the journal; with `uri: null` there is only the journal.

    `experiment`: the MLflow experiment that shows the run; null: the one of the run's own name.
    """

    uri: str | None = "sqlite:///mlflow.db"  # the MLflow database, or its server, http://HOST:PORT
    experiment: str | None = None

    def __post_init__(self) -> None:
        require(
            self.uri is None or ("://" in self.uri and not self.uri.startswith("file:")),
            f"uri: {self.uri!r} would be a file store, which MLflow refuses; give sqlite:///mlflow.db or http://HOST:PORT",
        )
        name = self.experiment
        require(
            name is None or (name.isprintable() and len(name.strip()) > 0 and len(name) <= 500 and ".." not in name),
            f"experiment: must be a name of 1 to 500 characters in one line, without '..', not {name!r:.40}",
        )

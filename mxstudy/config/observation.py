"""The schema of what is watched and where it is mirrored; none of it changes a number."""

from __future__ import annotations

from mxstudy.reader import cosmetic, require, schema


@schema
class NormOutputRMS:
    """RMS of every norm's output, beside that of the exact RMSNorm of the same input; 0: off."""

    every_steps: int = cosmetic(0)


@schema
class ActivationHistograms:
    """Signed, log-spaced histograms of every norm's input and output; 0: off."""

    every_steps: int = cosmetic(0)


@schema
class Saturation:
    """Last-bin and underflow fractions, scales and SQNR of every quantised operand, on one sequence; 0: off."""

    every_steps: int = cosmetic(0)


@schema
class GradientBias:
    """MX gradients against FP32 ones at the same weights, on one sequence: ratio and cosine by layer; 0: off."""

    every_steps: int = cosmetic(0)


@schema
class Probes:
    norm_output_rms: NormOutputRMS = NormOutputRMS()
    activation_histograms: ActivationHistograms = ActivationHistograms()
    saturation: Saturation = Saturation()
    gradient_bias: GradientBias = GradientBias()


@schema
class Tracking:
    """The MLflow mirror of the journal; `uri: null` keeps the journal alone."""

    uri: str | None = "sqlite:///mlflow.db"

    def __post_init__(self) -> None:
        require(
            self.uri is None or ("://" in self.uri and not self.uri.startswith("file:")),
            f"uri: {self.uri!r} would be a file store, which MLflow refuses; give sqlite:///mlflow.db or http://HOST:PORT",
        )

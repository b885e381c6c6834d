"""Compare the gradient in the plan's formats with that in FP32, at the same weights on the same sequence."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from mxstudy import config
from mxstudy.config.casts import Gemms
from mxstudy.model.decoder import Decoder
from mxstudy.probes.base import ScheduledProbe, StepView, TrainingSequence, Values
from mxstudy.probes.operand_bias import Gradients, of_each_operand
from mxstudy.probes.shadow import shadow_gradients, whole_blocks

WHOLE = "model"
BY_OPERAND = ("/ratio", "/cosine")  # the quantities of a single operand


class GradientBias(ScheduledProbe):
    """Gradient errors '<parameter>/<quantity>', and 'model/<quantity>' over all parameters, at weights after the step.

    g is the gradient with the formats and the compute dtype of the run, h the gradient in FP32 throughout; both use the
    run's norms, estimated or not. ratio: ||g - h|| / ||h||, a lower bound on the operator norm of the noise
    (instability paper, Eq. 5). squared_ratio: its square; the paper's code logs it too, but compares two
    trajectories. cosine: that of g and h. norm_ratio: ||g|| / ||h||. If h is zero, they are not finite.

    model/loss_difference_nats: loss with the formats minus loss in FP32. model/cost_ms: time of the measurement.
    The GPU then holds both gradients, 8 bytes per parameter, and the activations of one sequence in FP32: attention
    with grouped queries has no fused kernel there, and keeps T^2 numbers per head and layer (fewer with activation
    checkpointing).

    With `by_operand` also '<parameter>/<operand>/<quantity>', ratio and cosine, for every operand that is quantised:
    there g is the gradient with this operand alone quantised, and h that with none, in the run's compute dtype
    (`mxstudy.probes.operand_bias`). In bf16 both round, so a ratio below that of a run in bf16 may be rounding.
    """

    name = "gradient_bias"

    def __init__(self, settings: config.GradientBias) -> None:
        super().__init__(settings)
        self.by_operand = settings.by_operand

    def measure(self, view: StepView) -> Values:
        model = view.model
        assert isinstance(model, Decoder)
        wait_for(model)
        began_s = time.perf_counter()
        sequence = whole_blocks(model, view.first_sequence())
        values = against_fp32(model, sequence)
        if self.by_operand:
            values |= by_operand(model, sequence)
        values[f"{WHOLE}/cost_ms"] = (time.perf_counter() - began_s) * 1e3
        return values


def against_fp32(model: Decoder, sequence: TrainingSequence) -> Values:
    """Return the quantities of every parameter and the difference of the losses, of the plan's formats and FP32."""
    loss, gradients = shadow_gradients(model, sequence)
    true_loss, true_gradients = shadow_gradients(model, sequence, Gemms(), torch.float32)
    values = compare([*gradients, WHOLE], with_whole(squared_norms(gradients, true_gradients)))
    return values | {f"{WHOLE}/loss_difference_nats": (loss - true_loss).item()}


def by_operand(model: Decoder, sequence: TrainingSequence) -> Values:
    """Return '<parameter>/<operand>/<quantity>' of every operand that is quantised."""
    parameters = [*dict(model.named_parameters()), WHOLE]
    found = {
        key: value
        for operand, squares in of_each_operand(model, sequence, squared_norms).items()
        for key, value in compare([f"{name}/{operand}" for name in parameters], with_whole(squares)).items()
    }
    return {key: value for key, value in found.items() if key.endswith(BY_OPERAND)}


def with_whole(squares: Tensor) -> np.ndarray:
    """Return the rows of `squared_norms` and, below them, their sum: that of all parameters."""
    rows = np.array(squares.tolist())
    return np.vstack((rows, rows.sum(axis=0)))


def squared_norms(gradients: Gradients, true_gradients: Gradients) -> Tensor:
    """Return ||g||^2, ||h||^2 and ||g - h||^2 of every parameter: float64 [parameters, 3]."""
    triples = ((g, true_gradients[name], g - true_gradients[name]) for name, g in gradients.items())
    norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for triple in triples for x in triple]
    return torch.stack(norms).square().view(-1, 3)


def compare(names: list[str], squares: np.ndarray) -> Values:
    """Return '<name>/<quantity>' for each row of `squares`, as `squared_norms` returns them."""
    return {
        f"{n}/{q}": float(value)
        for q, column in quantities(*squares.T).items()
        for n, value in zip(names, column, strict=True)
    }


def quantities(own: np.ndarray, true: np.ndarray, difference: np.ndarray) -> dict[str, np.ndarray]:
    """Return the quantities, elementwise, from ||g||^2, ||h||^2 and ||g - h||^2."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "ratio": np.sqrt(difference / true),
            "squared_ratio": difference / true,
            "cosine": (own + true - difference) / (2 * np.sqrt(own) * np.sqrt(true)),
            "norm_ratio": np.sqrt(own / true),
        }


def wait_for(model: Decoder) -> None:
    """Wait until the GPU has finished its earlier work, so that only the measurement is timed."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""What the formats do to the gradient: the plan's against FP32's, at the same weights on the same sequence."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from mxstudy import config
from mxstudy.config.casts import Gemms
from mxstudy.model.decoder import Decoder
from mxstudy.probes.base import StepView, Values
from mxstudy.probes.shadow import shadow_gradients, whole_blocks

WHOLE = "model"


class GradientBias:
    """'<parameter>/<quantity>', and 'model/<quantity>' over all parameters as one vector, at weights after the step.

    g is the gradient with the formats and the compute dtype of the run, h that of FP32 throughout; both through the
    run's norms, estimated or not. ratio: ||g - h|| / ||h||, a lower bound on the operator norm of the noise
    (instability paper, Eq. 5). squared_ratio: its square, which the paper's code logs, there between two trajectories.
    cosine of g and h. norm_ratio: ||g|| / ||h||. Where h is zero they are not finite.

    model/loss_difference_nats: the loss of g less that of h. model/cost_ms: what the measurement took. For that time
    the GPU holds both gradients, 8 bytes a parameter, and what one sequence needs in FP32: attention with grouped
    queries has no fused kernel there, and keeps T^2 numbers a head and layer (fewer with activation checkpointing).
    """

    name = "gradient_bias"

    def __init__(self, settings: config.GradientBias) -> None:
        self.every_steps = settings.every_steps

    def watch(self, name: str, module: torch.nn.Module, x: Tensor) -> None:
        """Norms show too little: `measure` runs passes of its own."""

    def measure(self, view: StepView) -> Values:
        model = view.model
        assert isinstance(model, Decoder)
        wait_for(model)
        began_s = time.perf_counter()
        sequence = whole_blocks(model, view.first_sequence())
        loss, gradients = shadow_gradients(model, sequence)
        true_loss, true_gradients = shadow_gradients(model, sequence, Gemms(), torch.float32)
        squares = np.array(squared_norms(gradients, true_gradients).tolist())
        values = compare([*gradients, WHOLE], np.vstack((squares, squares.sum(axis=0))))
        values[f"{WHOLE}/loss_difference_nats"] = (loss - true_loss).item()
        values[f"{WHOLE}/cost_ms"] = (time.perf_counter() - began_s) * 1e3
        return values


def squared_norms(gradients: dict[str, Tensor], true_gradients: dict[str, Tensor]) -> Tensor:
    """Of every parameter ||g||^2, ||h||^2 and ||g - h||^2: float64 [parameters, 3]."""
    triples = ((g, true_gradients[name], g - true_gradients[name]) for name, g in gradients.items())
    norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for triple in triples for x in triple]
    return torch.stack(norms).square().view(-1, 3)


def compare(names: list[str], squares: np.ndarray) -> Values:
    """The quantities of a vector a row, from what `squared_norms` gives."""
    return {
        f"{n}/{q}": float(value)
        for q, column in quantities(*squares.T).items()
        for n, value in zip(names, column, strict=True)
    }


def quantities(own: np.ndarray, true: np.ndarray, difference: np.ndarray) -> dict[str, np.ndarray]:
    """From ||g||^2, ||h||^2 and ||g - h||^2, elementwise."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "ratio": np.sqrt(difference / true),
            "squared_ratio": difference / true,
            "cosine": (own + true - difference) / (2 * np.sqrt(own) * np.sqrt(true)),
            "norm_ratio": np.sqrt(own / true),
        }


def wait_for(model: Decoder) -> None:
    """Until the GPU has done what was asked before, so that the clock starts with the measurement."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)

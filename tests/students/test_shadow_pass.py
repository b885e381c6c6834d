"""A student's FP32 version equals the student built in FP32, and gradients agree with numpy's arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from each import each
from small_students import ATTENTION, BF16, FP32, LAYER_NORM, NORMS, SIZE, TOKENS, samples, small, student
from torch import Tensor

from mxstudy.students.model import ResidualMLP
from mxstudy.students.probes.bias import gradient_bias
from mxstudy.students.probes.shadow import gradients, in_fp32, smooth_forward

pytestmark = pytest.mark.integration
SEEDS = [5, 0, 9]
ESTIMATED = [name for name in NORMS if name.startswith("mxnorm")]
EXACT = [name for name in NORMS if name not in ESTIMATED]


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean((-2, -1))


def batch() -> tuple[Tensor, Tensor]:
    x, target = samples(2, TOKENS, SIZE)
    return x, target


@pytest.mark.slow
@each("norm", NORMS)
@each("ops", ["fp32", "bf16", "code"])
@each("model", [{}, ATTENTION], ids=str)
def test_in_fp32_nothing_of_the_run_is_left_but_its_parameters(norm: str, ops: str, model: dict) -> None:
    """It has the bits of the student that was built in FP32, and the run's own stays as it was."""
    if norm in ESTIMATED and ops == "code":
        pytest.skip("a folded gain cannot be rounded op by op")
    options = {"gain": "fp32" if norm == "none" else "bf16", "vector_ops": ops}
    run = student(small(**model), NORMS[norm], SEEDS, "mxfp8", BF16, **options)
    pure = student(small(**model), NORMS[norm], SEEDS, "fp32", FP32)
    own = gradients(run, loss, *batch())
    shadow = in_fp32(run)
    assert [id(p) for p in shadow.parameters()] == [id(p) for p in run.parameters()]
    found, want = gradients(shadow, loss, *batch()), gradients(pure, loss, *batch())
    assert torch.equal(shadow(batch()[0]), pure(batch()[0]))
    for name, g in want.items():
        assert torch.equal(found[name], g), name
        assert not torch.equal(own[name], g), name
    again = gradients(run, loss, *batch())
    assert all(torch.equal(again[name], g) for name, g in own.items())
    assert all(p.grad is None for p in run.parameters())


def smooth_gradients(model: ResidualMLP) -> dict[str, Tensor]:
    x, target = batch()
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss(smooth_forward(model, x), target).sum(), list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


@each("norm", EXACT)
@each("model", [{}, {"activation": "swiglu"}, {"residual": False}, {"activation": "relu"}, ATTENTION], ids=str)
def test_the_smooth_student_is_the_student(norm: str, model: dict) -> None:
    mlp = student(small(**model), NORMS[norm], SEEDS)
    assert torch.equal(smooth_forward(mlp, batch()[0]), mlp(batch()[0]))
    want = gradients(mlp, loss, *batch())
    for name, g in smooth_gradients(mlp).items():
        torch.testing.assert_close(g, want[name], rtol=1e-4, atol=1e-6 * g.abs().max().item())


@pytest.mark.parametrize("norm", ESTIMATED)
def test_of_an_estimated_rms_it_has_the_functions_own_derivative(norm: str) -> None:
    """It is a difference quotient's derivative, where training has a straight-through estimate."""
    mlp = student(small(), NORMS[norm], [1])
    x, target = batch()
    torch.testing.assert_close(smooth_forward(mlp, x), mlp(x), rtol=1e-5, atol=1e-6)
    weight, g = mlp.layers[0].down.weight, smooth_gradients(mlp)["layers.0.down.weight"]
    direction, losses = g / g.norm(), []
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * 1e-2 * direction
            losses.append(loss(mlp(x), target).double().item())
            weight -= sign * 1e-2 * direction
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(g.norm().item(), rel=2e-3)
    trained = gradients(mlp, loss, x, target)["layers.0.down.weight"]
    assert (trained - g).norm() > 1e-3 * g.norm()


# -------------------------------------------------------------------------------------------------------------- bias


def test_values_are_those_of_numpy() -> None:
    run = student(small(), LAYER_NORM, SEEDS, "mxfp8", BF16)
    own, true = gradients(run, loss, *batch()), gradients(in_fp32(run), loss, *batch())
    found = gradient_bias(own, true)
    assert {name.split("/")[0] for name in found} == {"layers.0", "layers.1", "model"}
    for r in range(len(SEEDS)):
        for place in ("layers.0", "layers.1", "model"):
            chosen = [name for name in own if place == "model" or name.startswith(f"{place}.")]
            g, h = (np.concatenate([x[n][r].double().numpy().ravel() for n in chosen]) for x in (own, true))
            ratio = np.linalg.norm(g - h) / np.linalg.norm(h)
            want = {
                "ratio": ratio,
                "squared_ratio": ratio**2,
                "cosine": g @ h / np.linalg.norm(g) / np.linalg.norm(h),
                "norm_ratio": np.linalg.norm(g) / np.linalg.norm(h),
            }
            assert {q: found[f"{place}/{q}"][r] for q in want} == pytest.approx(want, rel=1e-5)
    assert all(0.001 < ratio < 0.5 for ratio in found["model/ratio"])


def test_fp32_has_no_bias_and_coarser_formats_have_more() -> None:
    def ratios(row: str, compute: torch.dtype) -> list[float]:
        run = student(small(), LAYER_NORM, SEEDS, row, compute)
        return gradient_bias(*(gradients(m, loss, *batch()) for m in (run, in_fp32(run))))["model/ratio"]

    assert ratios("fp32", FP32) == [0.0] * 3
    for bf16, mxfp8, mxfp4 in zip(ratios("bf16", BF16), ratios("mxfp8", BF16), ratios("mxfp4", BF16), strict=True):
        assert 0 < 1.5 * bf16 < mxfp8 < mxfp4 / 2


def test_unrelated_gradients_of_one_length_have_a_squared_ratio_of_2() -> None:
    """The paper takes this for the sign of a divergence."""
    draw = torch.Generator().manual_seed(0)
    own, true = ({"layers.0.w": torch.randn(2, 300, 300, generator=draw)} for _ in range(2))
    found = gradient_bias(own, true)
    assert found["model/squared_ratio"] == pytest.approx([2, 2], abs=0.03)
    assert found["model/cosine"] == pytest.approx([0, 0], abs=0.015)


def test_a_broken_replica_leaves_its_neighbours_bits() -> None:
    def measured(broken: bool) -> dict[str, list[float]]:
        run = student(small(), LAYER_NORM, SEEDS, "mxfp8", BF16)
        if broken:
            with torch.no_grad():
                run.layers[0].down.weight[1, 2, 3] = torch.nan
        return gradient_bias(gradients(run, loss, *batch()), gradients(in_fp32(run), loss, *batch()))

    sound, broken = measured(False), measured(True)
    assert np.isnan(broken["model/ratio"][1])
    assert all([sound[name][r] for r in (0, 2)] == [broken[name][r] for r in (0, 2)] for name in sound)

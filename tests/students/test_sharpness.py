"""Sharpness equals the eigenvalues of explicit Hessians: of matrices, and of a student written anew in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from each import each, slow_but
from small_students import LAYER_NORM, samples, small, student
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mxstudy.students.model import ResidualMLP
from mxstudy.students.probes.sharpness import (
    Vector,
    hessian,
    largest_eigenvalue,
    power_iteration,
    preconditioned,
    stability,
)

pytestmark = pytest.mark.integration
WIDTH, SEEDS = 4, [5, 0, 9]
ATTENDS = {"attention_heads": 2, "sequence_length": 8}


def mse(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean((-2, -1))


def kl(y: Tensor, target: Tensor) -> Tensor:
    return (target.softmax(-1) * (target.log_softmax(-1) - y.log_softmax(-1))).sum(-1).mean(-1)


LOSSES = {"mse": mse, "kl": kl}


def tiny(seeds: list[int] = SEEDS, **options: int) -> ResidualMLP:
    """Return a student of 152 parameters per replica. MX formats and bf16 do not affect the FP32 loss's Hessian."""
    model = small(hidden_size=WIDTH, expansion=2, **options)
    return student(model, LAYER_NORM, seeds, gain="bf16", vector_ops="bf16")


def batch() -> tuple[Tensor, Tensor]:
    x, target = samples(2, 16, WIDTH)
    return x, target


def normed_linear(name: str, p: dict[str, Tensor], y: Tensor) -> Tensor:
    gain, bias = p[f"{name}.norm.weight"][0], p[f"{name}.norm.bias"][0]
    return F.layer_norm(y, (WIDTH,), gain, bias) @ p[f"{name}.weight"].T


def attention(qkv: Tensor) -> Tensor:
    """Compute heads and sequences of ATTENDS by torch's own attention, where that has second derivatives."""
    heads, length = ATTENDS.values()
    q, k, v = (t.view(-1, length, heads, WIDTH // heads).transpose(1, 2) for t in qkv.chunk(3, -1))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, WIDTH)


def explicit_hessian(model: ResidualMLP, r: int, loss: str) -> Tensor:
    """Return the Hessian of a student made of torch's own layers, [parameters, parameters] float64."""
    x, target = (t.double() for t in batch())
    shapes = {name: p[r].shape for name, p in model.named_parameters()}

    def loss_of(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes.values()])
        p = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        y = x
        for k in range(2):
            if model.config.attention_heads:
                y = (
                    y
                    + attention(normed_linear(f"layers.{k}.attention.qkv", p, y))
                    @ p[f"layers.{k}.attention.out.weight"].T
                )
            h = F.gelu(normed_linear(f"layers.{k}.up", p, y))
            y = y + h @ p[f"layers.{k}.down.weight"].T + p[f"layers.{k}.bias"]
        return LOSSES[loss](y, target)

    flat = torch.cat([p[r].detach().double().flatten() for p in model.parameters()])
    return torch.autograd.functional.hessian(loss_of, flat)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "loss"),
    slow_but([(ATTENDS, "kl")], [({}, "mse"), ({}, "kl"), (ATTENDS, "mse"), (ATTENDS, "kl")]),
    ids=str,
)
def test_the_largest_eigenvalue_is_that_of_the_explicit_hessian(options: dict[str, int], loss: str) -> None:
    model = tiny(**options)
    found = largest_eigenvalue(hessian(model, LOSSES[loss], *batch()), model, 300)
    for r in range(len(SEEDS)):
        want = torch.linalg.eigvalsh(explicit_hessian(model, r, loss))[-1].item()
        assert found.value[r].item() == pytest.approx(want, rel=1e-3)
        assert found.residual[r] < 0.03


@pytest.mark.slow
def test_preconditioned_it_is_that_of_the_scaled_hessian() -> None:
    model = tiny()
    draw = torch.Generator().manual_seed(4)
    diagonal = [0.01 + torch.rand(p.shape, generator=draw) for p in model.parameters()]
    product = preconditioned(hessian(model, mse, *batch()), diagonal)
    found = largest_eigenvalue(product, model, 400)
    for r in range(len(SEEDS)):
        scale = torch.cat([d[r].flatten() for d in diagonal]).double().rsqrt()
        want = torch.linalg.eigvalsh(scale[:, None] * explicit_hessian(model, r, "mse") * scale)[-1].item()
        assert found.value[r].item() == pytest.approx(want, rel=1e-3)


# ------------------------------------------------------------------------------------------------ the power method


def matrices(*spectra: list[float]) -> tuple[Tensor, Tensor]:
    """Return symmetric float64 [S, n, n] with those eigenvalues, and their eigenvectors."""
    draw = torch.Generator().manual_seed(2)
    size = len(spectra[0])
    bases = torch.linalg.qr(torch.randn(len(spectra), size, size, generator=draw, dtype=torch.float64)).Q
    return bases @ torch.diag_embed(torch.tensor(spectra, dtype=torch.float64)) @ bases.mT, bases


def start(replicas: int, size: int) -> Vector:
    return [torch.randn(1, size, 1, generator=torch.Generator().manual_seed(0)).double().expand(replicas, -1, -1)]


def test_a_negative_eigenvalue_of_larger_magnitude_is_passed_over() -> None:
    h, _ = matrices([3.0, 1.0, -9.0, 0.5], [3.0, 1.0, -2.0, 0.5], [-1.0, -2.0, -3.0, -4.0])
    found = power_iteration(lambda v: [h @ v[0]], start(3, 4), 400)
    assert found.value.tolist() == pytest.approx([3, 3, -1], rel=1e-6)


def test_the_residual_is_large_until_it_has_converged_and_bounds_the_error() -> None:
    spectrum = [2.0, 1.9, 1.0, 0.1, 0.0]
    h, _ = matrices(spectrum)
    few, many = (power_iteration(lambda v: [h @ v[0]], start(1, 5), n) for n in (3, 600))
    assert few.residual > 0.01 > 1e-6 > many.residual
    for found in (few, many):
        nearest = min(abs(found.value.item() - x) for x in spectrum)
        assert nearest <= (found.residual * found.value.abs()).item() + 1e-12


def test_a_warm_start_goes_on_and_a_broken_one_starts_anew() -> None:
    """A warm start has every bit of the iteration from where the last one ended.

    As many iterations at once may differ: a start is divided by its length, which in FP32 is 1 or a bit beside it. The
    order of the sums, and so the processor, decides that.
    """
    model = tiny()
    product = hessian(model, mse, *batch())
    cold = largest_eigenvalue(product, model, 30)
    warm = largest_eigenvalue(product, model, 30, cold.vector)
    assert torch.equal(warm.value, power_iteration(product, cold.vector, 30).value)
    assert (warm.residual < cold.residual).all()
    broken = [v.clone() for v in cold.vector]
    broken[0][1, 0, 0] = torch.nan
    found = largest_eigenvalue(product, model, 30, broken)
    assert torch.equal(found.value, torch.stack((warm.value[0], cold.value[1], warm.value[2])))


def test_a_replica_has_its_sharpness_in_any_slot_beside_any_neighbour() -> None:
    """A replica keeps its bits beside one that is NaN.

    In other stacks the last digits of sums may differ.
    """

    def measured(seeds: list[int], broken: int | None = None) -> tuple[Tensor, Tensor]:
        model = tiny(seeds)
        if broken is not None:
            with torch.no_grad():
                model.layers[0].up.weight[broken, 0, 0] = torch.nan
        found = largest_eigenvalue(hessian(model, mse, *batch()), model, 20)
        return found.value, found.residual

    together, beside_nan = measured(SEEDS), measured(SEEDS, 1)
    assert beside_nan[0][1].isnan()
    for sound, found in zip(together, beside_nan, strict=True):
        assert torch.equal(sound[[0, 2]], found[[0, 2]])
    torch.testing.assert_close(measured([9, 5])[0], together[0][[2, 0]], rtol=1e-4, atol=0)


# ------------------------------------------------------------------------------------------------------------ Eq. 10


@each(("zeta", "largest"), [(0.0, 2.0), (0.25, 1.6), (1.0, 1.0)])
def test_the_bound_is_broken_above_2_over_lr_and_1_plus_zeta(zeta: float, largest: float) -> None:
    lr = torch.tensor([0.1])
    for factor, holds in ((0.999, True), (1.001, False)):
        assert (stability(torch.tensor([factor * largest / 0.1]), lr, torch.tensor([zeta])) <= 1 + 1e-6).item() == holds


def test_noise_larger_than_the_gradient_is_stable_nowhere() -> None:
    sharpness = torch.tensor([1e-3, 1.0, 10.0])
    assert (stability(sharpness, torch.tensor(0.1), torch.tensor(1.5)) > 1).all()

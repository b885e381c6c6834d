"""On a GPU a mixture in one grouped GEMM agrees with the loop over experts, and never waits for a size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from precision_files import of_file
from small_mixtures import MOE, NORMS, OUTER_SCALES, outer_scaled, plan, tokens
from torch import Tensor

from mxstudy.model.decoder import Decoder
from mxstudy.model.moe import mixtures_of
from mxstudy.model.norm import Norm
from mxstudy.model.precision import apply_precision
from mxstudy.numerics.dispatch import dispatch_of
from mxstudy.numerics.grouped_gemm import grouped_mm
from mxstudy.train.runtime import configure_torch

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
SCALED = ("fp8_blockwise", *OUTER_SCALES)
LARGE = replace(MOE, hidden_size=256, ffn_size=128, moe=replace(MOE.moe, num_experts=8))


def on_gpu(norm: str, row: str, compiled: bool = False) -> Decoder:
    if row in SCALED:
        precision = outer_scaled(row) if row in OUTER_SCALES else of_file(row)
    else:
        precision = plan(row, block_size=16 if row.startswith("nvfp4") else 32)
    model = Decoder(LARGE, NORMS[norm], precision.settings, torch.bfloat16).to(DEVICE)
    model.init_weights(0)
    apply_precision(model, precision, 0, "bf16", DEVICE, compiled=compiled)
    if compiled:
        configure_torch(compile=True)
        for block in model.layers:
            block.compile(fullgraph=True)
    return model


def gradients(model: Decoder) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(tokens(8).to(DEVICE))
    logits.float().square().mean().backward()
    return logits.detach(), {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("norm", ["rmsnorm", "mxnorm"])
@pytest.mark.parametrize("row", ["bf16", "mxfp8", "mx_mix", "mxfp4", "fp8_tensor", "nvfp4_forward_only", *SCALED])
def test_one_grouped_gemm_computes_what_the_loop_computes(norm: str, row: str) -> None:
    model = on_gpu(norm, row)
    assert all(mixture.is_grouped for mixture in mixtures_of(model).values())
    grouped = gradients(model)
    for mixture in mixtures_of(model).values():
        mixture.is_grouped = False
    loop = gradients(model)
    torch.testing.assert_close(grouped[0], loop[0], rtol=0.02, atol=0.02)
    for name, gradient in loop[1].items():
        error = torch.linalg.vector_norm(grouped[1][name] - gradient) / torch.linalg.vector_norm(gradient)
        assert error < 0.02, name


@pytest.mark.parametrize("row", ["mxfp8", "fp8_tensor", *SCALED])
def test_experts_without_a_token_have_gradients_of_zeros(row: str) -> None:
    """A group without tokens has rows of zeros alone."""
    model = on_gpu("rmsnorm", row)
    for mixture in mixtures_of(model).values():
        mixture.router.bias.copy_(torch.tensor([9.0, 9.0, *[0.0] * 6]))
    _, found = gradients(model)
    for name, gradient in found.items():
        if name.endswith(("feed_forward.w13.weight", "feed_forward.w2.weight")):
            assert gradient[:2].any()
            assert not gradient[2:].any(), name


@pytest.mark.parametrize("row", ["mxfp8", "fp8_tensor"])
def test_a_step_has_the_same_bits_twice(row: str) -> None:
    model = on_gpu("mxnorm", row)
    first, second = gradients(model), gradients(model)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(second[1][name], gradient) for name, gradient in first[1].items())


@pytest.mark.parametrize("row", ["mxfp8", "fp8_tensor", *SCALED])
def test_nothing_waits_for_the_gpu(row: str) -> None:
    model = on_gpu("mxnorm", row)
    gradients(model)  # loads the kernels
    read = tokens(8).to(DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(read).float().square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest relative distance of a gradient, in the Euclidean norm."""
    norm = torch.linalg.vector_norm
    return max((norm(other[name] - gradient) / norm(gradient)).item() for name, gradient in one.items())


@pytest.mark.slow
@pytest.mark.parametrize("row", ["mxfp8", "fp8_tensor", *SCALED])
def test_compiled_blocks_compute_the_same(row: str) -> None:
    """Compiled norms sum in another order. It changes no more than last bits of the RMS do, here by a tenth of eps."""
    _, eager = gradients(on_gpu("mxnorm", row))
    _, compiled = gradients(on_gpu("mxnorm", row, compiled=True))
    nudged = on_gpu("mxnorm", row)
    for module in nudged.modules():
        if isinstance(module, Norm):
            module.eps *= 1.1
    assert distance(eager, compiled) < 2 * distance(eager, gradients(nudged)[1])


def test_a_dispatch_is_that_of_the_cpu() -> None:
    chosen = torch.stack([torch.randperm(16)[:3] for _ in range(1000)])
    found, expected = dispatch_of(chosen.to(DEVICE), 16, 32), dispatch_of(chosen, 16, 32)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))


def test_torchs_grouped_gemm_is_the_loop_on_the_cpu() -> None:
    """Sums of whole numbers are exact."""
    a, b = (torch.randint(-8, 9, shape).float() for shape in ((96, 64), (3, 64, 32)))
    ends = torch.tensor([32, 40, 96], dtype=torch.int32)
    left, right = a.bfloat16().to(DEVICE), b.bfloat16().to(DEVICE)
    assert torch.equal(grouped_mm(left, right, ends.to(DEVICE)).cpu(), grouped_mm(a, b, ends).bfloat16())
    c = torch.randint(-8, 9, (96, 16)).float()
    product = grouped_mm(left.T, c.bfloat16().to(DEVICE), ends.to(DEVICE))
    assert torch.equal(product.cpu(), grouped_mm(a.T, c, ends).bfloat16())

"""S layers of a stack give the bits of S layers alone, whatever their neighbours hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from appendix_e import BOUNDS, RMS, Rms, inputs
from each import each
from gemms import linear, operands

from mxstudy.config import PRECISIONS, BlockCast, Cast, Gemms
from mxstudy.numerics.gemms import Linear, mx_linear
from mxstudy.numerics.norm_linear import norm_linear
from mxstudy.reader import ConfigError

REPLICAS = 5
SPOILED = 3  # the replica that has a NaN
SCALES = 2.0 ** torch.tensor([0, -40, 30, 5, 12])  # one scale per replica
every_row = each("row", PRECISIONS)
every_dtype = each("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])

Layer = Callable[..., torch.Tensor]


def cast_of(row: str) -> BlockCast:
    return BlockCast(16 if row.startswith("nvfp4") else 32)


def linear_of(row: str) -> Linear:
    return linear(PRECISIONS[row], cast_of(row))


def stacked(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return each tensor as a stack, with one NaN.

    Rows are shifted and scaled, so that no two replicas are equal.
    """
    stacks = []
    for tensor in tensors:
        matrix = tensor if tensor.ndim == 2 else tensor[None]
        turned = [matrix.roll((7 * r, 11 * r), (0, 1)) * SCALES[r].to(tensor.dtype) for r in range(REPLICAS)]
        stacks.append(torch.stack(turned))
    stacks[0][SPOILED, 5, 7] = torch.nan
    return stacks


def run(layer: Layer, leaves: list[torch.Tensor], dh: torch.Tensor) -> list[torch.Tensor]:
    """Return the layer's output, and the gradients of its inputs."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    h = layer(*leaves)
    h.backward(dh)
    return [h.detach(), *(leaf.grad for leaf in leaves)]


def assert_alone_or_together(layer: Layer, leaves: list[torch.Tensor], dh: torch.Tensor) -> None:
    """Check every bit, replica by replica.

    A parameter of one row has a single axis where it is alone.
    """
    together = run(layer, leaves, dh)
    for r in range(REPLICAS):
        alone = run(layer, [leaf[r, 0] if leaf.shape[1] == 1 else leaf[r] for leaf in leaves], dh[r])
        for one, other in zip(together, alone, strict=True):
            assert one.dtype == other.dtype
            assert same_bits(one[r].reshape(other.shape), other), f"replica {r}"
            assert (r == SPOILED) or other.isfinite().all()
    assert together[0][SPOILED].isnan().any()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def mild(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the tensors with a third of their exponents, so that no product with the replicas' scales leaves FP32."""
    return tuple((torch.sign(t) * t.abs().float() ** (1 / 3)).to(t.dtype) for t in tensors)


@pytest.mark.slow
@every_row
@every_dtype
def test_a_replica_of_a_linear_is_the_linear_alone(row: str, dtype: torch.dtype) -> None:
    x, weight, dh = stacked(mild(operands(dtype)))
    assert_alone_or_together(lambda x, weight: mx_linear(x, weight, linear_of(row)), [x, weight], dh)


@pytest.mark.integration
@every_row
@each(
    ("rms", "fold_gain", "centers"),
    [(RMS["exact"], False, False), (RMS["exact"], False, True), (RMS["exact"], True, False), (RMS["p1"], True, False)],
    ids=["RMSNorm", "LayerNorm", "RMSNorm folded", "MXNorm"],
)
def test_a_replica_behind_a_norm_is_the_norm_and_linear_alone(
    row: str, rms: Rms, fold_gain: bool, centers: bool
) -> None:
    given = inputs(torch.float32, spread=3)
    bias = (given.gain.flip(0),) if centers else ()
    *leaves, dh = stacked((given.x, given.gain, given.weight, *bias, given.dh))
    options = {"rms": rms, "bounds": BOUNDS, "fold_gain": fold_gain, "centers": centers, "linear": linear_of(row)}
    assert_alone_or_together(lambda *leaves: norm_linear(*leaves, **options), leaves, dh)


def test_the_pre_rounding_of_a_stack_is_that_of_its_replicas() -> None:
    for row in ("mxfp8", "fp8_tensor", "nvfp4_forward_only"):
        cast = dataclasses.replace(cast_of(row), operand_pre_round=True)
        x, weight, dh = stacked(mild(operands(torch.float32)))
        rounded = linear(PRECISIONS[row], cast)
        assert_alone_or_together(lambda x, weight, one=rounded: mx_linear(x, weight, one), [x, weight], dh)


@pytest.mark.integration
@every_row
def test_a_replica_does_not_know_its_slot(row: str) -> None:
    x, weight, dh = stacked(mild(operands(torch.float32)))
    order = torch.tensor([3, 1, 4, 0, 2])

    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return mx_linear(x, weight, linear_of(row))

    for one, other in zip(run(layer, [x, weight], dh), run(layer, [x[order], weight[order]], dh[order]), strict=True):
        assert same_bits(one[order], other)


@pytest.mark.integration
@every_row
def test_leading_axes_of_a_replica_are_its_tokens(row: str) -> None:
    """Blocks of 32 tokens cross them, and none crosses from one replica to the next."""
    x, weight, dh = stacked(mild(operands(torch.float32)))

    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return mx_linear(x, weight, linear_of(row))

    h, dx, dweight = run(layer, [x.unflatten(1, (8, 16)), weight], dh.unflatten(1, (8, 16)))
    for one, other in zip((h.flatten(1, 2), dx.flatten(1, 2), dweight), run(layer, [x, weight], dh), strict=True):
        assert same_bits(one, other)


@each("row", ["bf16", "mxfp8", "fp8_tensor", "nvfp4_forward_only"])
def test_results_are_rounded_to_another_dtype_than_that_of_the_operands(row: str) -> None:
    """x and W are FP32. Every GEMM's result has bf16 values, and gradients have the dtype of their tensor."""
    x, weight, dh = operands(torch.float32)
    h, dx, dweight = run(
        lambda x, weight: mx_linear(x, weight, linear_of(row), torch.bfloat16),
        [x, weight],
        dh.bfloat16(),
    )
    assert (h.dtype, dx.dtype, dweight.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    for gradient in (dx, dweight):
        assert torch.equal(gradient, gradient.bfloat16().float())
    if row == "bf16":
        in_bf16 = run(lambda x, w: mx_linear(x, w, Linear(Gemms())), [x.bfloat16(), weight.bfloat16()], dh.bfloat16())
        for one, other in zip((h, dx, dweight), in_bf16, strict=True):
            assert torch.equal(one, other.to(one.dtype))
    else:
        full = mx_linear(x, weight, linear_of(row))
        assert torch.equal(h, full.bfloat16())


def test_native_gemms_multiply_no_stacks() -> None:
    forward = linear(Gemms(forward_x=Cast(format="E4M3"), forward_w=Cast(format="E4M3")), native=True)
    with pytest.raises(ConfigError, match="multiplies matrices, not stacks"):
        mx_linear(torch.ones(2, 32, 32), torch.ones(2, 32, 32), forward)

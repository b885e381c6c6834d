"""The GEMMs of experts, in both ways, have the bits of each expert's own GEMM by the array reference.

Numbers are integers below 400, and sums of their products are below 2^24, so FP32 sums are exact in any order.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from reference import fake_quantize_array

from mxstudy.blocks.operands import plain_operand
from mxstudy.config.casts import OPERANDS, BlockCast, Cast, Gemms, Hadamard
from mxstudy.config.recipes import PRECISIONS
from mxstudy.numerics import gemms as gemms_of_a_linear
from mxstudy.numerics.cast import quantize_as
from mxstudy.numerics.dispatch import Dispatch, dispatch_of, sum_of_copies
from mxstudy.numerics.gemms import CastKernel, Linear, mx_linear
from mxstudy.numerics.norm_linear import NormBounds
from mxstudy.numerics.quantized import Quantized
from mxstudy.numerics.random_bits import STREAMS, Random, stream_key
from mxstudy.numerics.readers import NormOutput, read_norm, read_rows

TOKENS, IN, OUT, EXPERTS, K = 96, 64, 32, 6, 2
LOADS = {0: 70, 1: 49, 2: 32, 3: 0, 4: 8, 5: 33}  # more than blocks, a whole block, nobody, a part of one


def chosen() -> torch.Tensor:
    """Return the experts of each token, with `LOADS`. No token goes to one twice."""
    copies = torch.tensor([expert for expert, load in LOADS.items() for _ in range(load)])
    experts_TK = torch.stack((copies[:TOKENS], copies[TOKENS:]), 1)
    assert (experts_TK[:, 0] != experts_TK[:, 1]).all()
    return experts_TK[torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))]


def integers(*shape: int, seed: int) -> torch.Tensor:
    """Return bf16 integers, some large, most small, so that the elements of a block are rounded."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([3, 20, 380])[torch.randint(0, 3, shape, generator=generator)]
    return (torch.rand(shape, generator=generator) * 2 * sizes - sizes).round().bfloat16().float()


def filled(name: str) -> Gemms:
    return PRECISIONS[name].filled(BlockCast())


def alignment(gemms: Gemms) -> int:
    return 32 if any(gemms.casts()) else 8


def normed(x_TI: torch.Tensor) -> NormOutput:
    """Return the output of a norm with a gain of 1."""
    return NormOutput(x_TI, torch.ones(x_TI.shape[1]), None, NormBounds(1e6, 1e6), fold_gain=False)


def computed(
    gemms: Gemms,
    is_grouped: bool,
    random: Random | None = None,
    align: int = 0,
    kernel: CastKernel | None = None,
) -> list[torch.Tensor]:
    """Return H of each copy, and the gradients of x and of the weights.

    Each copy has its own gradient of H.
    """
    dispatch = dispatch_of(chosen(), EXPERTS, align or alignment(gemms))
    x_TI = integers(TOKENS, IN, seed=1).requires_grad_()
    weight = integers(EXPERTS, OUT, IN, seed=2).bfloat16().requires_grad_()
    linear = Linear(gemms, random, kernel=kernel)
    h_NO = read_norm(normed(x_TI), weight, linear, torch.bfloat16, dispatch, is_grouped)
    dh = integers(TOKENS * K, OUT, seed=3).bfloat16()
    dh_NO = torch.cat((dh, torch.zeros(1, OUT)))[dispatch.copies_N].bfloat16()
    h_NO.backward(dh_NO)
    assert x_TI.grad is not None
    assert weight.grad is not None
    assert not h_NO[dispatch.copies_N == TOKENS * K].any()
    return [h_NO.detach()[dispatch.rows_TK], x_TI.grad, weight.grad]


def by_hand(gemms: Gemms) -> list[torch.Tensor]:
    """Return the same in numpy, expert by expert, with the tokens of each filled up with zeros to whole blocks."""
    experts = chosen().numpy()
    x, dh = integers(TOKENS, IN, seed=1).double().numpy(), integers(TOKENS * K, OUT, seed=3).double().numpy()
    weight = integers(EXPERTS, OUT, IN, seed=2).bfloat16().double().numpy()

    def q(values: np.ndarray, operand: str, axis: int) -> np.ndarray:
        fmt = gemms.format(operand)
        return values if fmt is None else fake_quantize_array(values, fmt, axis)

    def bf16(values: np.ndarray) -> torch.Tensor:
        assert np.abs(values).max() < 2**24
        return torch.from_numpy(values).float().bfloat16()

    h, dx, dw = torch.zeros(TOKENS, K, OUT).bfloat16(), torch.zeros(TOKENS, K, IN), []
    for e in range(EXPERTS):
        tokens, js = np.nonzero(experts == e)
        zeros = [(0, -len(tokens) % 32), (0, 0)]
        x_e, dh_e = np.pad(x[tokens], zeros), np.pad(dh[tokens * K + js], zeros)
        if not len(tokens):
            dw.append(torch.zeros(OUT, IN).bfloat16())
            continue
        h[tokens, js] = bf16(q(x_e, "forward_x", 1) @ q(weight[e], "forward_w", 1).T)[: len(tokens)]
        dx[tokens, js] = bf16(q(dh_e, "dgrad_dh", 1) @ q(weight[e], "dgrad_w", 0)).float()[: len(tokens)]
        dw.append(bf16(q(dh_e, "wgrad_dh", 0).T @ q(x_e, "wgrad_x", 0)))
    return [h, dx[:, 0] + dx[:, 1], torch.stack(dw)]


WAYS = {"loop": (False, None), "grouped": (True, None), "grouped, by kernels": (True, plain_operand)}


@pytest.mark.parametrize(("is_grouped", "kernel"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "mx_mix", "mxfp6_e2m3"])
def test_each_expert_is_a_linear_of_its_own(recipe, is_grouped, kernel):
    gemms = filled(recipe)
    for what, got, want in zip(
        ("H", "dX", "dW"), computed(gemms, is_grouped, kernel=kernel), by_hand(gemms), strict=True
    ):
        assert torch.equal(got, want), what


def test_the_casts_of_these_numbers_are_no_identity():
    exact, cast = by_hand(filled("bf16")), by_hand(filled("mxfp8"))
    assert not any(torch.equal(one, other) for one, other in zip(exact, cast, strict=True))


@pytest.mark.parametrize("is_grouped", [False, True], ids=["loop", "grouped"])
def test_more_zeros_change_nothing(is_grouped):
    found = [computed(filled("mxfp8"), is_grouped, align=align) for align in (32, 64, 160)]
    assert all(torch.equal(one, first) for other in found[1:] for one, first in zip(other, found[0], strict=True))


def test_an_expert_without_tokens_has_a_gradient_of_zeros():
    for is_grouped in (False, True):
        assert not computed(filled("mxfp8"), is_grouped)[2][3].any()


def test_a_scale_of_a_tensor_is_that_of_one_expert():
    """The linear without experts gives the same on the rows of each expert."""
    gemms = filled("fp8_tensor")
    h, _, dw = computed(gemms, is_grouped=False)
    experts, x = chosen(), integers(TOKENS, IN, seed=1)
    weights, dh = integers(EXPERTS, OUT, IN, seed=2).bfloat16(), integers(TOKENS * K, OUT, seed=3).bfloat16()
    for e in (0, 1, 4):
        tokens, js = (experts == e).nonzero(as_tuple=True)
        weight = weights[e].clone().requires_grad_()
        own = mx_linear(x[tokens], weight, Linear(gemms), torch.bfloat16)
        own.backward(dh[tokens * K + js])
        assert torch.equal(h[tokens, js], own.detach())
        assert torch.equal(dw[e], weight.grad)


E4M3 = Cast(format="E4M3")
STOCHASTIC, SQUARE = replace(E4M3, rounding="stochastic"), replace(E4M3, block_size=16, two_dimensional=True)
SOME = dict.fromkeys(OPERANDS, E4M3)
RECIPES = {
    "stochastic": dict.fromkeys(OPERANDS, STOCHASTIC),
    "square blocks": SOME | {"forward_w": SQUARE, "dgrad_w": SQUARE, "wgrad_dh": SQUARE, "forward_x": SQUARE},
    "transforms": SOME
    | {
        "forward_transform": Hadamard(size=16),
        "dgrad_transform": Hadamard(size=32, signs="step"),
        "wgrad_transform": Hadamard(size=16, signs="call"),
    },
    "from the forward": SOME | {"wgrad_x": replace(E4M3, source="forward"), "dgrad_w": replace(E4M3, source="forward")},
    "masked": SOME | {"forward_x": replace(E4M3, mask_clipped=True, scale_rule="floor")},
    "candidates": SOME | {"forward_w": replace(E4M3, candidates=(1.0, 1.5))},
}
TENSOR = Cast(format="E5M2", scale="none", outer_scale="tensor")
NVFP4 = Cast(format="NVFP4", scale="E4M3", block_size=16, outer_scale="tensor", chain="training")
ROW, BOUND = replace(NVFP4, outer_scale="row"), replace(NVFP4, outer_scale="bound", chain="inference")
SCALED = {  # recipes whose accumulators are scaled
    "fp8_tensor": dict.fromkeys(OPERANDS, TENSOR),
    "fp8_tensor, stochastic": dict.fromkeys(OPERANDS, replace(TENSOR, rounding="stochastic", pre_round=True)),
    "nvfp4": dict.fromkeys(OPERANDS, NVFP4)
    | dict.fromkeys(("forward_w", "dgrad_w"), replace(NVFP4, two_dimensional=True))
    | dict.fromkeys(("dgrad_dh", "wgrad_dh"), replace(NVFP4, rounding="stochastic"))
    | {"wgrad_transform": Hadamard(size=16, signs="seed")},
    "square blocks of rows": dict.fromkeys(OPERANDS, replace(NVFP4, two_dimensional=True)),
    "four over six": dict.fromkeys(OPERANDS, replace(NVFP4, largest_scale=256.0, candidates=(1.0, 1.5))),
    "one operand": {"forward_x": NVFP4, "dgrad_w": TENSOR, "wgrad_x": NVFP4},
    "rows and columns": {"forward_x": ROW, "forward_w": ROW, "dgrad_dh": ROW, "dgrad_w": ROW},
    "bounds": {"forward_x": BOUND, "forward_w": NVFP4, "wgrad_dh": NVFP4, "wgrad_x": BOUND},
    "rows without blocks": {"forward_x": replace(TENSOR, outer_scale="row"), "wgrad_x": TENSOR},
    "a bound without blocks": {"forward_x": replace(TENSOR, outer_scale="bound", pre_round=True), "forward_w": TENSOR},
    "a bound in the training chain": {"forward_x": replace(BOUND, chain="training"), "forward_w": NVFP4},
    "a bound under a transform": {"forward_x": BOUND, "forward_w": ROW, "forward_transform": Hadamard(size=16)},
    "from the forward": dict.fromkeys(OPERANDS, NVFP4)
    | {"wgrad_x": replace(NVFP4, source="forward"), "dgrad_w": replace(TENSOR, source="forward")},
    "masked": dict.fromkeys(OPERANDS, TENSOR) | {"forward_x": replace(NVFP4, mask_clipped=True)},
    "headroom": dict.fromkeys(OPERANDS, replace(E4M3, headroom=0.75)),
}


def random(first_row: int = 0) -> Random:
    keys = torch.tensor([stream_key(7, name) for name in STREAMS])
    places = torch.tensor([[5, first_row], [5, 0], [0, 0]])
    return Random(keys, places)


@pytest.mark.parametrize(
    "recipe", [*RECIPES.values(), *SCALED.values()], ids=[*RECIPES, *(f"{n}, scaled" for n in SCALED)]
)
def test_both_ways_have_the_same_bits(recipe):
    gemms = Gemms(**recipe).filled(BlockCast())
    one, other = (computed(gemms, is_grouped, random()) for is_grouped in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


ONCE = {
    "no outer scale": E4M3,
    "row": ROW,
    "bound": BOUND,
    "row, no blocks": replace(TENSOR, outer_scale="row"),
    "bound, no blocks": replace(TENSOR, outer_scale="bound"),
}
BY_COPY = {"tensor": TENSOR, "stochastic": replace(ROW, rounding="stochastic"), "square blocks": SQUARE}


@pytest.mark.parametrize("name", [*ONCE, *BY_COPY])
def test_a_token_is_cast_once_unless_its_cast_depends_on_where_it_goes(name, monkeypatch):
    """A scale of an expert, random numbers of a copy and square blocks of an expert's rows so depend."""
    cast_rows = []

    def counted(x: torch.Tensor, *others: Any) -> Quantized:
        cast_rows.append(len(x))
        return quantize_as(x, *others)

    monkeypatch.setattr(gemms_of_a_linear, "quantize_as", counted)
    dispatch, weight = dispatch_of(chosen(), EXPERTS, 32), integers(EXPERTS, OUT, IN, seed=2).bfloat16()
    linear = Linear(Gemms(forward_x=(ONCE | BY_COPY)[name]).filled(BlockCast()), random())
    read_norm(normed(integers(TOKENS, IN, seed=1)), weight, linear, torch.bfloat16, dispatch, True)
    assert cast_rows == [TOKENS if name in ONCE else len(dispatch.copies_N)]


@pytest.mark.parametrize("recipe", [SCALED["fp8_tensor"], SCALED["nvfp4"]], ids=["fp8_tensor", "nvfp4"])
def test_a_nan_makes_the_scale_of_its_experts_nan_in_both_ways(recipe):
    """Each other expert's gradient stays finite."""
    dispatch, gemms = dispatch_of(chosen(), EXPERTS, 32), Gemms(**recipe).filled(BlockCast())
    found = []
    for is_grouped in (False, True):
        x_TI, weight = integers(TOKENS, IN, seed=1), integers(EXPERTS, OUT, IN, seed=2).bfloat16().requires_grad_()
        x_TI[0, 0] = torch.nan
        h = read_norm(normed(x_TI), weight, Linear(gemms, random()), torch.bfloat16, dispatch, is_grouped)
        h.backward(integers(*h.shape, seed=3).bfloat16() * (dispatch.copies_N < TOKENS * K)[:, None])
        found.append((h.detach()[dispatch.rows_TK], weight.grad))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0, equal_nan=True)
    with_nan = found[1][1].isnan().flatten(1).any(1).nonzero().flatten()
    assert with_nan.tolist() == sorted(chosen()[0].tolist())


def test_random_numbers_are_those_of_a_token_wherever_it_goes():
    """A batch in two halves rounds as the whole does, because the rows of a copy do not depend on the others."""
    gemms = Gemms(forward_x=STOCHASTIC).filled(BlockCast())
    x_TI, weight, experts = integers(TOKENS, IN, seed=1), integers(EXPERTS, OUT, IN, seed=2).bfloat16(), chosen()

    def outputs(rows: slice) -> torch.Tensor:
        dispatch = dispatch_of(experts[rows], EXPERTS, 32)
        h = read_norm(normed(x_TI[rows]), weight, Linear(gemms, random(rows.start)), torch.bfloat16, dispatch, True)
        return h[dispatch.rows_TK]

    whole, half = outputs(slice(0, TOKENS)), TOKENS // 2
    assert torch.equal(torch.cat((outputs(slice(0, half)), outputs(slice(half, TOKENS)))), whole)


@pytest.mark.parametrize("is_grouped", [False, True], ids=["loop", "grouped"])
def test_rows_that_are_dispatched_already_are_read_as_they_are(is_grouped):
    """A token's gradient is the sum of its copies'."""
    dispatch, gemms = dispatch_of(chosen(), EXPERTS, 32), filled("mxfp8")
    x_TI, weight = integers(TOKENS, IN, seed=1).requires_grad_(), integers(EXPERTS, OUT, IN, seed=2).bfloat16()
    rows = torch.cat((x_TI.detach(), torch.zeros(1, IN)))[dispatch.tokens_N.clamp_max(TOKENS)].bfloat16()
    of_norm, of_rows = (weight.clone().requires_grad_() for _ in range(2))
    h = read_norm(normed(x_TI), of_norm, Linear(gemms), torch.bfloat16, dispatch)
    found = read_rows(rows.requires_grad_(), of_rows, Linear(gemms), torch.bfloat16, dispatch, is_grouped)
    assert torch.equal(found, h)
    dh = integers(*h.shape, seed=3).bfloat16() * (dispatch.copies_N < TOKENS * K)[:, None]
    h.backward(dh)
    found.backward(dh)
    assert torch.equal(of_rows.grad, of_norm.grad)
    assert torch.equal(sum_of_copies(rows.grad, Dispatch(*dispatch)), x_TI.grad)


def test_a_folded_gain_is_in_the_weight_and_its_gradient_is_of_the_product():
    """The gradient of x / rms is that without a fold, and the weight's is times the gain."""
    dispatch, gain = (
        dispatch_of(chosen(), EXPERTS, 8),
        2.0 ** torch.randint(-1, 2, (IN,), generator=torch.Generator().manual_seed(4)),
    )
    x, w = integers(TOKENS, IN, seed=1), integers(EXPERTS, OUT, IN, seed=2)

    def gradients(fold_gain: bool) -> list[torch.Tensor]:
        y = (x if fold_gain else x * gain).clone().requires_grad_()
        weight = w.clone().requires_grad_()
        of = NormOutput(y, gain, None, NormBounds(1e6, 1e6), fold_gain)
        h = read_norm(of, weight, Linear(Gemms()), torch.float32, dispatch)
        h.backward(h.detach().sign())
        return [h.detach(), y.grad, weight.grad]  # type: ignore[list-item]

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))


def test_a_dispatch_sums_back_to_its_tokens():
    dispatch = Dispatch(*dispatch_of(chosen(), EXPERTS, 8))
    ones = torch.ones(len(dispatch.copies_N), 1)
    assert torch.equal(sum_of_copies(ones, dispatch), torch.full((TOKENS, 1), float(K)))

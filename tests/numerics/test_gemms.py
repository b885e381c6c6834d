"""In the three GEMMs every operand is cast along its contraction axis, from high precision, and results round once."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from each import each
from gemms import (
    CAST,
    IN,
    OUT,
    TOKENS,
    UNQUANTISED,
    assert_gemms,
    fits,
    gemm,
    linear,
    one_operand,
    operands,
    run,
)
from reference import Array, fake_quantize_array
from reference_float_scales import nvfp4_array

from mxstudy.config import PRECISIONS, BlockCast
from mxstudy.numerics.cast import block_cast
from mxstudy.numerics.formats import any_random
from mxstudy.numerics.gemms import Bounds, forward_gemm, mx_linear
from mxstudy.reader import ConfigError

OPERANDS = ["forward_x", "forward_w", "dgrad_dh", "dgrad_w", "wgrad_dh", "wgrad_x"]
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(TOKENS, IN), (8, 16, IN), (2, 4, 16, IN)]  # blocks of 32 tokens cross the leading axes

# The rows of the table: forward X, W; dgrad dH, W; wgrad dH, X.
TABLE = {
    "fp32": "-    -    -    -    -    -",
    "bf16": "-    -    -    -    -    -",
    "mxfp8": "E4M3 E4M3 E4M3 E4M3 E4M3 E4M3",
    "mxfp8_e5m2_grad": "E4M3 E4M3 E5M2 E4M3 E5M2 E4M3",
    "mx_mix": "E4M3 E4M3 E5M2 E5M2 E5M2 E4M3",
    "mxfp8_forward_only": "E4M3 E4M3 - - - -",
    "mxfp8_e5m2_forward_only": "E5M2 E5M2 - - - -",
    "mxfp8_e5m2_bf16_act": "- E5M2 - E5M2 - -",
    "mxfp6_e2m3_bf16_act": "- E2M3 - E2M3 - -",
    "mxfp8_e5m2_act_grad": "E5M2 E4M3 E5M2 E4M3 E5M2 E5M2",
    "mxfp8_backward_only": "- - E4M3 E4M3 E4M3 E4M3",
    "mxfp8_bf16_act_fwd": "- E4M3 E4M3 E4M3 E4M3 -",
    "mxfp8_bf16_act": "- E4M3 - E4M3 - -",
    "mxfp8_bf16_weight": "E4M3 - E4M3 - E4M3 E4M3",
    "mxfp8_bf16_weight_fwd": "E4M3 - E4M3 E4M3 E4M3 E4M3",
    "mxfp8_act_only": "E4M3 - - - - E4M3",
    "mxfp8_e5m2": "E5M2 E5M2 E5M2 E5M2 E5M2 E5M2",
    "mxfp8_e5m2_weight": "E4M3 E5M2 E4M3 E5M2 E4M3 E4M3",
    "mxfp8_e5m2_act": "E5M2 E4M3 E4M3 E4M3 E4M3 E5M2",
    "mxfp6_e2m3": "E2M3 E2M3 E2M3 E2M3 E2M3 E2M3",
    "mxfp6_e3m2": "E3M2 E3M2 E3M2 E3M2 E3M2 E3M2",
    "mxfp4": "E2M1 E2M1 E2M1 E2M1 E2M1 E2M1",
    "fp8_tensor": "E4M3 E4M3 E5M2 E4M3 E5M2 E4M3",
    "nvfp4_forward_only": "NVFP4 NVFP4 - - - -",
}


# --------------------------------------------------------------------------------------------------------- the table


def test_the_table_of_precisions() -> None:
    found = {name: [gemms.format(operand) or "-" for operand in OPERANDS] for name, gemms in PRECISIONS.items()}
    assert found == {name: row.split() for name, row in TABLE.items()}
    scopes = {name: {cast.outer_scale for _, cast in gemms.casts()} for name, gemms in PRECISIONS.items()}
    assert {name for name, found in scopes.items() if found - {"none"}} == {"fp8_tensor", "nvfp4_forward_only"}
    assert scopes["fp8_tensor"] == {"tensor"}
    assert {cast.scale for _, cast in PRECISIONS["fp8_tensor"].casts()} == {"none"}
    assert not any(any_random(gemms.filled(BlockCast())) or gemms.reads_forward for gemms in PRECISIONS.values())


def test_a_precision_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRECISIONS["mxfp8"].forward_x = None


@pytest.mark.integration
@each("name", TABLE)
@each("dtype", DTYPES)
@each("shape", SHAPES[:2])
def test_every_precision(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert_gemms(*operands(dtype, shape), PRECISIONS[name], BlockCast(16) if name.startswith("nvfp4") else CAST)


# ------------------------------------------------------------------------------------------------- operand by operand


@pytest.mark.integration
@each("operand", OPERANDS)
@each("fmt", ["E4M3", "E5M2", "E2M1"])
@each("dtype", DTYPES)
@each("shape", SHAPES)
def test_one_operand_quantised(operand: str, fmt: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The others stay as they are, and the two GEMMs that do not read it keep their bits."""
    gemms = one_operand(operand, fmt)
    assert_gemms(*operands(dtype, shape), gemms)
    plain = run(*operands(dtype, shape), UNQUANTISED)
    changed = [not torch.equal(a, b) for a, b in zip(run(*operands(dtype, shape), gemms), plain, strict=True)]
    assert changed == [operand.startswith(gemm_name) for gemm_name in ("forward", "dgrad", "wgrad")]


@each("dtype", DTYPES)
@each("fmt", ["E4M3", "E5M2"])
@each("operand", OPERANDS)
def test_blocks_along_the_other_axis_would_be_seen(operand: str, fmt: str, dtype: torch.dtype) -> None:
    """The test above can fail: at least a quarter of the elements are off."""
    x, weight, dh = operands(dtype)
    X, W, dH = (t.double().numpy() for t in (x, weight, dh))
    index, left, right = {"forward": (0, X, W.T), "dgrad": (1, dH, W), "wgrad": (2, dH.T, X)}[operand.split("_")[0]]
    got = run(x, weight, dh, one_operand(operand, fmt))[index]
    if operand in ("forward_x", "dgrad_dh", "wgrad_dh"):  # contracted along axis 1
        swapped = gemm(fake_quantize_array(left, fmt, 0), right)
    else:
        swapped = gemm(left, fake_quantize_array(right, fmt, 1))
    assert fits(got, swapped).float().mean() < 0.75


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_second_cast_would_be_seen(dtype: torch.dtype) -> None:
    """The gradients' operands come from x, W and dH, not from another GEMM's: references made from those do not fit."""
    x, weight, dh = operands(dtype)
    X, W, dH = (t.double().numpy() for t in (x, weight, dh))
    _, dx, dw = run(x, weight, dh, PRECISIONS["mxfp8"])

    def q(t: Array, *axes: int) -> Array:
        for axis in axes:
            t = fake_quantize_array(t, "E4M3", axis)
        return t

    assert fits(dx, gemm(q(dH, 1), q(W, 0))).all()
    assert fits(dx, gemm(q(dH, 1), q(W, 1, 0))).float().mean() < 0.5
    assert fits(dw, gemm(q(dH, 0).T, q(X, 0))).all()
    assert fits(dw, gemm(q(dH, 0).T, q(X, 1, 0))).float().mean() < 0.5
    assert fits(dw, gemm(q(dH, 1, 0).T, q(X, 0))).float().mean() < 0.5


@pytest.mark.integration
@each("dtype", DTYPES)
@each(
    ("block_size", "rule", "rounding"),
    [
        *itertools.product((16, 64), ("rceil",), ("even",)),
        (32, "floor", "even"),
        (32, "ceil", "away"),
        (32, "even", "away"),
    ],
)
def test_block_size_rule_and_rounding_reach_every_operand(
    dtype: torch.dtype, block_size: int, rule: str, rounding: str
) -> None:
    cast = BlockCast(block_size, rule, rounding)
    for operand in OPERANDS:
        assert_gemms(*operands(dtype), one_operand(operand, "E4M3"), cast)


@pytest.mark.parametrize("row", ["mxfp8", "mxfp6_e2m3"])
def test_operands_are_rounded_to_bf16_first(row: str) -> None:
    """They are rounded half away, as in microxcaling: fp32 operands beside a tie of both roundings move."""
    x, weight, dh = operands(torch.float32)
    halves = [(t.view(torch.int32) & -0x10000 | 0x8000).view(torch.float32) for t in (x, weight, dh)]
    pre_rounding = BlockCast(operand_pre_round=True)
    assert_gemms(*halves, PRECISIONS[row], pre_rounding)
    plain, rounded = (run(*halves, PRECISIONS[row], cast) for cast in (CAST, pre_rounding))
    assert all(not torch.equal(a, b) for a, b in zip(plain, rounded, strict=True))


# --------------------------------------------------------------------------------- one FP32 scale a tensor, or a row


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_scale_a_tensor_needs_no_blocks(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, dh = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((7, 13), (5, 13), (7, 5)))
    assert_gemms(x, weight, dh, PRECISIONS["fp8_tensor"])


def test_one_scale_a_tensor_loses_what_is_small_beside_the_largest() -> None:
    """This is why blocks exist: a token 2^-20 below another is lost, and with a scale per block it is not."""
    x, weight = torch.ones(32, 64), torch.ones(64, 64)
    x[0] = 2.0**-20
    assert mx_linear(x, weight, linear(PRECISIONS["fp8_tensor"]))[0].abs().max() == 0
    assert (mx_linear(x, weight, linear(PRECISIONS["mxfp8"]))[0] == 64 * 2.0**-20).all()


def test_a_token_in_nvfp4_does_not_depend_on_its_neighbours() -> None:
    x, weight, _ = operands(torch.float32)
    nvfp4 = linear(PRECISIONS["nvfp4_forward_only"], BlockCast(16))
    together, alone = mx_linear(x, weight, nvfp4), mx_linear(x[5:6], weight, nvfp4)
    torch.testing.assert_close(together[5:6], alone, rtol=1e-6, atol=0)


@pytest.mark.parametrize("pre_round", [False, True])
def test_a_tokens_scale_in_nvfp4_is_that_of_its_cast_alone(pre_round: bool) -> None:
    x, _, _ = operands(torch.float32)
    cast = BlockCast(16, operand_pre_round=pre_round)
    together = linear(PRECISIONS["nvfp4_forward_only"], cast).operand(x, "forward_x", -1, torch.float32)
    alone = torch.stack([block_cast(row, "NVFP4", -1, cast).tensor_scale for row in x])
    assert torch.equal(together.scale.squeeze(-1), alone)


@each("bound", [4.0, 32.0, 512.0])
def test_a_bound_saves_nvfp4_the_pass_over_the_row(bound: float) -> None:
    """The block's scale follows the tensor's scale.

    So the result keeps its accuracy, however loose the bound.
    """
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(64, 96, generator=generator), torch.randn(80, 96, generator=generator)
    nvfp4 = linear(PRECISIONS["nvfp4_forward_only"], BlockCast(16))
    exact = x @ weight.T

    def error(bounds: Bounds | None) -> float:
        h = forward_gemm(x, weight, nvfp4, torch.float32, bounds)
        return ((h - exact).norm() / exact.norm()).item()

    given = Bounds(torch.tensor(bound), torch.tensor(bound))
    values, scales, tensor_scale = nvfp4_array(x.double().numpy(), np.float32(bound) / np.float32(2688), 1)
    decoded = torch.tensor(values * np.repeat(scales * float(tensor_scale), 16, 1)).float()
    operand = nvfp4.operand(x, "forward_x", -1, torch.float32, given)
    torch.testing.assert_close(operand.dequantize(), decoded, rtol=1e-6, atol=0)
    assert error(None) == pytest.approx(0.13, abs=0.02)
    assert error(given) == pytest.approx(error(None), rel=0.05)


# ------------------------------------------------------------------------------------------------------------- edges


def test_an_expanded_and_a_transposed_gradient() -> None:
    x, weight, dh = operands(torch.float32)
    for strided in (torch.ones(()).expand(TOKENS, OUT), dh.T.contiguous().T):
        strided_results = run(x, weight, strided, PRECISIONS["mxfp8"])
        for got, want in zip(strided_results, run(x, weight, strided.contiguous(), PRECISIONS["mxfp8"]), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_only_one_gradient_is_wanted(frozen: str) -> None:
    x, weight, dh = operands(torch.float32)
    _, dx, dw = run(x, weight, dh, PRECISIONS["mxfp8"])
    leaf, parameter = x.clone().requires_grad_(frozen != "x"), weight.clone().requires_grad_(frozen != "weight")
    mx_linear(leaf, parameter, linear(PRECISIONS["mxfp8"])).backward(dh)
    assert leaf.grad is None if frozen == "x" else torch.equal(leaf.grad, dx)
    assert parameter.grad is None if frozen == "weight" else torch.equal(parameter.grad, dw)


@pytest.mark.parametrize("operand", ["wgrad_dh", "wgrad_x"])
def test_tokens_that_do_not_fill_blocks_are_refused(operand: str) -> None:
    x, weight, dh = (t[:40] if len(t) == TOKENS else t for t in operands(torch.float32))
    with pytest.raises(ConfigError, match="40"):
        run(x, weight, dh, one_operand(operand, "E4M3"))
    assert_gemms(x, weight, dh, PRECISIONS["mxfp8_forward_only"])


@pytest.mark.parametrize("rows", [(TOKENS, 40, OUT), (TOKENS, IN, 40)])
def test_widths_that_do_not_fill_blocks_are_refused(rows: tuple[int, int, int]) -> None:
    tokens, width, out = rows
    x, weight = torch.ones(tokens, width), torch.ones(out, width)
    with pytest.raises(ConfigError, match="40"):
        run(x, weight, torch.ones(tokens, out), PRECISIONS["mxfp8"])

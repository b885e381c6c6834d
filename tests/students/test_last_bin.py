"""Last bins of a stack's tensors equal a count by the paper's formula, one replica and one block at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from each import each
from small_students import ATTENTION, BF16, FP32, LAYER_NORM, NORMS, SIZE, TOKENS, samples, set_casts, small, student
from torch import Tensor

from mxstudy import config
from mxstudy.model.precision import apply_precision
from mxstudy.numerics import BlockCast, fake_quantize
from mxstudy.students.model import ResidualMLP
from mxstudy.students.probes.last_bin import last_bin

SEEDS = [5, 0, 9]


def cast_by(model: ResidualMLP, scale_rule: str, **options: Any) -> None:
    set_casts(model, "mxfp8", BlockCast(scale_rule=scale_rule, **options))


def counted(values: Tensor, emax: int = 8, largest: float = 448.0) -> float:
    """Return the share of |v| > max * 2^(floor(log2 absmax) - emax), in blocks of 32 consecutive numbers."""
    beyond = 0
    for block in np.abs(values.detach().double().numpy().reshape(-1, 32)):
        scale = 2.0 ** (math.floor(math.log2(block.max())) - emax)
        beyond += int((block > largest * scale).sum())
    return beyond / values.numel()


def test_fractions_are_those_of_the_papers_count() -> None:
    """Gains, weights and activations are in MXFP8 under floor, through torch's own layer norm and GELU."""
    model, x = student(small(), LAYER_NORM, SEEDS, "mxfp8", gain="bf16"), samples(TOKENS, SIZE)
    cast_by(model, "floor")
    found = last_bin(model, x)
    layer = model.layers[0]
    for r in range(len(SEEDS)):
        gain, bias = layer.up.norm.weight[r, 0].bfloat16().float(), layer.up.norm.bias[r, 0]
        y = F.layer_norm(x, (SIZE,), gain, bias)
        h = (
            fake_quantize(y, "E4M3", scale_rule="floor")
            @ fake_quantize(layer.up.weight[r], "E4M3", scale_rule="floor").T
        )
        for place, values in {
            "up.norm.weight": layer.up.norm.weight[r],
            "up.weight": layer.up.weight[r],
            "down.weight": layer.down.weight[r],
            "up.input": y,
            "down.input": F.gelu(h),
            "output": layer(x.expand(len(SEEDS), -1, -1))[r],
        }.items():
            want = pytest.approx(counted(values), abs=2.5 / values.numel())  # rounding may move a number or two
            assert found[f"layers.0.{place}/floor/overflow_fraction"][r] == want, place
    assert not any("rceil" in name for name in found)


def test_a_norm_that_rounds_is_counted_as_its_linear_reads_it() -> None:
    model, x = student(small(), LAYER_NORM, SEEDS, "mxfp8", vector_ops="bf16"), samples(16 * TOKENS, SIZE)
    cast_by(model, "floor")
    found, rounded, exact = last_bin(model, x), [], []
    for r in range(len(SEEDS)):
        norm = model.layers[0].up.norm
        y = F.layer_norm(x.bfloat16().float(), (SIZE,), norm.weight[r, 0], norm.bias[r, 0])
        rounded.append(counted(y.bfloat16()))
        exact.append(counted(y))
    assert found["layers.0.up.input/floor/overflow_fraction"] == pytest.approx(rounded, abs=2.5 / x.numel())
    assert min(np.subtract(exact, rounded)) > 10 / x.numel()


def test_operands_that_are_rounded_to_bf16_first_are_counted_so() -> None:
    model, x = student(small(), LAYER_NORM, SEEDS, "mxfp8"), samples(TOKENS, SIZE)
    cast_by(model, "floor", operand_pre_round=True)
    weight = model.layers[0].up.weight
    weight.data[:, 0, :] = torch.tensor([1.0] * (SIZE - 1) + [1.7501])  # in bf16 1.75, the last that is not beyond
    pre_rounded = last_bin(model, x)["layers.0.up.weight/floor/overflow_fraction"]
    cast_by(model, "floor")
    more = np.subtract(last_bin(model, x)["layers.0.up.weight/floor/overflow_fraction"], pre_rounded)
    assert (more >= 1 / weight[0].numel()).all()


def test_attention_has_places_of_its_own() -> None:
    model, x = student(small(**ATTENTION), LAYER_NORM, SEEDS, "mxfp8", gain="bf16"), samples(TOKENS, SIZE)
    cast_by(model, "floor")
    found, layer = last_bin(model, x), model.layers[0]
    heads, length = (ATTENTION[name] for name in ("attention_heads", "sequence_length"))
    for r in range(len(SEEDS)):
        qkv, out = layer.attention.qkv, layer.attention.out
        y = F.layer_norm(x, (SIZE,), qkv.norm.weight[r, 0].bfloat16().float(), qkv.norm.bias[r, 0])
        operands = (fake_quantize(t, "E4M3", scale_rule="floor") for t in (y, qkv.weight[r]))
        split = [t.view(-1, length, heads, SIZE // heads).transpose(1, 2) for t in F.linear(*operands).chunk(3, -1)]
        mixed = F.scaled_dot_product_attention(*split).transpose(1, 2).reshape(TOKENS, SIZE)
        for place, values in {
            "qkv.norm.weight": qkv.norm.weight[r],
            "qkv.weight": qkv.weight[r],
            "out.weight": out.weight[r],
            "qkv.input": y,
            "out.input": mixed,
        }.items():
            want = pytest.approx(counted(values), abs=2.5 / values.numel())  # rounding may move a number or two
            assert found[f"layers.0.attention.{place}/floor/overflow_fraction"][r] == want, place
    plain = last_bin(student(small(), LAYER_NORM, SEEDS, "mxfp8", gain="bf16"), x)
    assert {name.partition("/")[0] for name in found.keys() - plain.keys()} == {
        f"layers.{k}.attention.{place}"
        for k in range(2)
        for place in ("qkv.norm.weight", "qkv.input", "qkv.weight", "out.input", "out.weight")
    }


def test_gains_below_1_are_all_in_the_last_bin() -> None:
    """In the paper's example gains of 0.88 to 0.91 all are under floor. Above 1, or under rceil, none is."""
    model = student(small(), LAYER_NORM, [0, 1], "mxfp8")
    cast_by(model, "rceil")
    ramp = torch.linspace(0.88, 0.91, SIZE)
    with torch.no_grad():
        model.layers[1].up.norm.weight.copy_(torch.stack((ramp, ramp + 0.14))[:, None])
    found = last_bin(model, samples(TOKENS, SIZE))
    place = "layers.1.up.norm.weight"
    assert found[f"{place}/floor/overflow_fraction"] == [1.0, 0.0]
    assert found[f"{place}/floor/max_fraction"] == [1.0, 0.0]
    assert found[f"{place}/rceil/overflow_fraction"] == [0.0, 0.0]
    for what, function in {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}.items():
        want = [function(x.double().numpy()) for x in (ramp, ramp + 0.14)]
        assert found[f"{place}/{what}"] == pytest.approx(want, rel=1e-6)


@pytest.mark.integration
@each(
    ("row", "fmt"),
    [
        ("fp32", "E4M3"),
        ("mxfp6_e2m3", "E2M3"),
        ("mxfp8_e5m2", "E5M2"),
        ("fp8_tensor", "E4M3"),
        ("mxfp8_bf16_act", "E4M3"),
    ],
)
def test_formats_are_those_of_the_forward_or_e4m3(row: str, fmt: str) -> None:
    found = last_bin(student(small(), LAYER_NORM, [0], row), samples(TOKENS, SIZE))
    assert {name.split("/")[0] for name in found if name.startswith("gaussian")} == {f"gaussian.{fmt}"}
    emax, largest = {"E4M3": (8, 448.0), "E5M2": (15, 57344.0), "E2M3": (2, 7.5)}[fmt]
    share = counted(samples(4000, SIZE), emax, largest)
    assert found[f"gaussian.{fmt}/floor/overflow_fraction"] == pytest.approx([share], abs=1e-3)


@pytest.mark.parametrize("row", ["mxfp8", "mxfp8_backward_only"])
def test_what_is_rounded_at_random_is_seen_as_rounded_to_even(row: str) -> None:
    """It is seen in the forward's own blocks, or where E4M3 under the run's settings stands for them."""
    found = {}
    for rounding in ("even", "stochastic"):
        model = student(small(), LAYER_NORM, SEEDS, row)
        rows = (config.PrecisionRow(plan={"layers.*": row}),)
        precision = config.Precision(schedule=rows, scale_rule="floor", rounding=rounding)
        apply_precision(model, precision, 0, "fp32", torch.device("cpu"), SEEDS)
        assert model.layers[0].up.random is None or rounding == "stochastic"
        found[rounding] = last_bin(model, samples(TOKENS, SIZE))
    for place in ("layers.0.up.input", "layers.0.up.weight", "layers.1.down.weight"):  # no GEMM has run before
        for what in ("overflow_fraction", "max_fraction"):
            even, stochastic = (found[rounding][f"{place}/floor/{what}"] for rounding in ("even", "stochastic"))
            assert even == stochastic != [0.0] * len(SEEDS), place


@pytest.mark.parametrize("norm", [name for name in NORMS if name.startswith("mxnorm")])
def test_a_folded_gain_is_in_the_weight(norm: str) -> None:
    model, x = student(small(), NORMS[norm], [3, 4], "mxfp8"), samples(TOKENS, SIZE)
    cast_by(model, "floor")
    layer = model.layers[0].up
    found = last_bin(model, x)
    for r in range(2):
        weight = layer.weight[r] * layer.norm.weight[r]
        assert found["layers.0.up.weight/floor/overflow_fraction"][r] == counted(weight)
        y = layer.norm.normalize(x)
        assert found["layers.0.up.input/floor/overflow_fraction"][r] == counted(y)


@pytest.mark.integration
@pytest.mark.parametrize("options", [{}, {"vector_ops": "bf16"}, {"vector_ops": "code"}, {"gain": "mx"}])
@pytest.mark.parametrize("sizes", [{}, ATTENTION], ids=str)
def test_neighbours_and_the_model_stay_what_they_are(sizes: dict[str, int], options: dict[str, Any]) -> None:
    x = samples(TOKENS, SIZE)

    def measured(*broken: int) -> dict[str, list[float]]:
        model = student(small(**sizes), LAYER_NORM, SEEDS, "mxfp8", BF16, **options)
        with torch.no_grad():
            for r in broken:
                model.layers[0].up.weight[r, 1, 1] = torch.nan
        before = model(x)
        found = last_bin(model, x)
        assert torch.equal(before.nan_to_num(), model(x).nan_to_num())
        assert not any(module._forward_hooks for module in model.modules())
        return found

    sound, broken = measured(), measured(1)
    assert sound.keys() == broken.keys()
    assert any(sound[name][1] != broken[name][1] for name in sound)
    for name in sound:
        assert [sound[name][r] for r in (0, 2)] == [broken[name][r] for r in (0, 2)], name


def test_a_part_of_a_block_counts_for_what_it_has() -> None:
    """85 and 170 numbers count as if zeros followed them, but shares are of the numbers alone."""
    model = student(small(hidden_size=32, activation="swiglu", swiglu_multiple=1), None, [0], "mxfp8", FP32)
    cast_by(model, "floor", pad_blocks=True)
    weight = model.layers[1].down.weight
    weight.data = samples(1, 32, 85)
    found = last_bin(model, samples(TOKENS, 32))
    share = counted(F.pad(weight, [0, 11])) * 96 / 85
    assert 0 < share == pytest.approx(found["layers.1.down.weight/floor/overflow_fraction"][0], rel=1e-9)


def test_equation_2_to_the_letter() -> None:
    """5.55 % of normal numbers are in the last bin, and 0.86 % are beyond the scale's reach."""
    found = last_bin(student(small(hidden_size=256), None, [0], "mxfp8", FP32), x := samples(512, 256))
    blocks = x.abs().view(-1, 32)
    beyond = sum(int((block > 0.875 * block.max()).sum()) for block in blocks)
    assert found["layers.0.up.input/literal_fraction"] == [beyond / x.numel()]
    assert beyond / x.numel() == pytest.approx(0.0555, rel=0.02)


def test_scales_of_single_elements() -> None:
    """The public code's bump has scales of single elements.

    Beside floor's count it counts what is still clamped, and has no Gaussian to compare with.
    """
    model, x = student(small(), None, [0], "mxfp8", FP32), samples(TOKENS, SIZE)
    cast_by(model, "code_bump")
    found = last_bin(model, x)
    assert "gaussian.E4M3/floor/overflow_fraction" in found
    assert not any(name.startswith("gaussian.E4M3/code_bump") for name in found)
    for place in ("layers.0.up.input", "layers.1.output"):
        bumped, floor = (found[f"{place}/{rule}/overflow_fraction"][0] for rule in ("code_bump", "floor"))
        assert 0 < bumped < floor


def test_a_student_without_norm_has_no_gains() -> None:
    found = last_bin(student(small(activation="swiglu"), None, [0], "mxfp8", FP32), samples(TOKENS, SIZE))
    assert {name.split("/")[0] for name in found if not name.startswith("gaussian")} == {
        f"layers.{k}.{place}"
        for k in range(2)
        for place in ("up.input", "up.weight", "down.input", "down.weight", "output")
    }

import json
from dataclasses import replace

import pytest
import torch
from each import each
from precision_applied import MODEL, applied

from mxstudy import config
from mxstudy.config import PRECISIONS, BlockCast, Cast, Gemms, hashed
from mxstudy.config.casts import Hadamard
from mxstudy.model.backends import backends_of, plan_backends
from mxstudy.model.describe_precision import describe, describe_cast
from mxstudy.model.fusable import Backend, Target, linears_in
from mxstudy.reader import ConfigError


def test_a_plan_reaches_the_linears_that_its_patterns_name_and_no_others():
    decoder, rows = applied({"layers.*": "mxfp8", "layers.1.*.wo": "mxfp8_e5m2_grad"}, scale_rule="floor")
    assert rows["layers.0.attention.wo"] == "mxfp8"
    assert rows["layers.1.attention.wo"] == "mxfp8_e5m2_grad"
    assert rows["output"] == "bf16"
    settings = BlockCast(scale_rule="floor")
    assert decoder.layers[1].attention.wo.gemms == PRECISIONS["mxfp8_e5m2_grad"].filled(settings)
    assert decoder.layers[1].attention.wo.cast == settings
    assert decoder.output.gemms == Gemms()


def test_the_row_of_the_schedule_is_that_of_the_step():
    schedule = (
        config.PrecisionRow(plan={"layers.*": "mxfp8"}),
        config.PrecisionRow(from_step=10, plan={"layers.*": "bf16"}),
    )
    assert applied(schedule, step=9)[1]["layers.0.attention.wo"] == "mxfp8"
    assert applied(schedule, step=10)[1]["layers.0.attention.wo"] == "bf16"


def test_an_unknown_row_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="'mxfp9' is not a choice; did you mean 'mxfp8'"):
        applied({"layers.*": "mxfp9"})


def test_a_plain_row_must_be_the_compute_dtype():
    with pytest.raises(ConfigError, match=r"asks for fp32, but train.compute is bf16; make them equal"):
        applied({"layers.*": "fp32"})


def test_sizes_that_the_block_does_not_divide_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"64 does not divide layers.0.feed_forward.w2's input size 96"):
        applied({"layers.*": "mxfp8"}, block_size=64)
    with pytest.raises(ConfigError, match=r"32 does not divide output's output size 50"):
        applied({"*": "mxfp8"})


def test_the_head_can_be_quantised_when_its_vocabulary_divides():
    decoder, _ = applied({"*": "mxfp8"}, model=replace(MODEL, vocab_size=64))
    assert decoder.output.gemms == PRECISIONS["mxfp8"].filled(BlockCast())


def test_the_plan_as_applied_is_described_by_operand():
    assert describe(*applied({"layers.*": "mxfp8_e5m2_grad"})).splitlines() == [
        "8 linears in mxfp8_e5m2_grad: forward E4M3 x E4M3, dgrad E5M2 x E4M3, wgrad E5M2 x E4M3",
        "1 linear in bf16: no operand is cast",
        "2 blocks: fused",
    ]


@each(
    ("row", "gemms"),
    [
        ("mxfp8_backward_only", "forward unquantised, dgrad E4M3 x E4M3, wgrad E4M3 x E4M3"),
        ("mxfp8_bf16_act_fwd", "forward unquantised x E4M3, dgrad E4M3 x E4M3, wgrad E4M3 x unquantised"),
    ],
)
def test_the_description_says_which_operands_are_not_quantised(row, gemms):
    assert describe(*applied({"layers.*": row})).splitlines()[0] == f"8 linears in {row}: {gemms}"


def test_the_description_says_what_is_not_in_the_formats():
    x, dh = "E4M3 (one scale a tensor)", "E5M2 (one scale a tensor)"
    assert describe(*applied({"*.wo": "fp8_tensor"})).splitlines()[1:] == [
        f"2 linears in fp8_tensor: forward {x} x {x}, dgrad {dh} x {x}, wgrad {dh} x {x}",
        "fp8_tensor: a scale or random signs span a micro-batch: numbers depend on its size and on the number of ranks",
        "2 blocks: fused",
    ]


@each(
    ("field", "value", "said"),
    [
        ("candidates", (1.0, 1.5), "E2M1 (candidates 1, 1.5)"),
        ("scale_rule", "floor", "E2M1 (scale_rule floor)"),
        ("block_size", 16, "E2M1 (blocks of 16)"),
        ("pre_round", True, "E2M1 (pre_round True)"),
        ("mask_clipped", True, "E2M1 (gradients masked)"),
        ("pad", True, "E2M1 (padded)"),
        ("rounding", "stochastic", "E2M1 (stochastic)"),
    ],
)
def test_the_description_says_every_field_that_is_not_usual(field, value, said):
    cast = replace(Cast(format="E2M1"), **{field: value}).filled(BlockCast())
    assert describe_cast(cast) == said


def test_fp32_scales_of_both_operands_are_in_blocks_alike():
    own = Gemms(
        forward_x=Cast(format="E4M3", scale="FP32", block_size=32),
        forward_w=Cast(format="E4M3", scale="FP32", block_size=16),
    )
    with pytest.raises(
        ConfigError, match=r"^precision\.recipes\.own\.forward_w\.block_size: layers.* the same block size, not"
    ):
        applied({"layers.*": "own"}, recipes={"own": own})


def test_the_order_of_overlapping_patterns_is_in_the_fingerprint():
    plans = ({"layers.*": "mxfp8", "*.wqkv": "mxfp4"}, {"*.wqkv": "mxfp4", "layers.*": "mxfp8"})
    one, other = (hashed(config.Precision(schedule=(config.PrecisionRow(plan=plan),))) for plan in plans)
    assert json.dumps(one, sort_keys=True) != json.dumps(other, sort_keys=True)


def test_one_scale_a_tensor_needs_no_sizes_that_divide():
    decoder, _ = applied({"*": "fp8_tensor"}, block_size=64)
    assert decoder.output.gemms == PRECISIONS["fp8_tensor"].filled(BlockCast(64))


def test_every_option_of_the_cast_reaches_the_linears():
    decoder, _ = applied(
        {"layers.*": "mxfp8"}, block_size=16, scale_rule="even", rounding="away", operand_pre_round=True
    )
    settings, linear = BlockCast(16, "even", "away", True), decoder.layers[0].attention.wo
    assert (linear.cast, linear.gemms) == (settings, PRECISIONS["mxfp8"].filled(settings))
    assert {(c.block_size, c.scale_rule, c.rounding, c.pre_round, c.pad) for _, c in linear.gemms.casts()} == {
        (16, "even", "away", True, False)
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "precision.block_size: layers.0.attention.wqkv, forward_x: NVFP4 has blocks of 16, not 32"),
        (
            {"block_size": 16, "pad_blocks": True},
            "precision.pad_blocks: .*, forward_x: NVFP4 needs complete blocks",
        ),
    ],
)
def test_what_nvfp4_does_not_have_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        applied({"layers.*": "nvfp4_forward_only"}, **settings)


@pytest.mark.parametrize("row", ["nvfp4_forward_only", "fp8_tensor"])
def test_a_scale_rule_without_e8m0_scales_is_refused(row):
    message = (
        rf"^precision.scale_rule: floor is set, and no operand of {row} \(forward_x, .* has E8M0 scales to round by"
    )
    with pytest.raises(ConfigError, match=rf"{message} it; write precision.scale_rule=rceil, or take another recipe$"):
        applied({"layers.*": row}, block_size=16, scale_rule="floor")


def test_blocks_that_only_a_part_of_the_plan_has_may_be_set():
    """Blocks may be set if some part of the plan has them.

    Casts with one scale per tensor do not use them, but other casts of the plan, or a norm, do.
    """
    plan = {"layers.*": "mxfp8", "*.wo": "fp8_tensor"}
    decoder, _ = applied(plan, block_size=64, pad_blocks=True)
    found = [
        {(cast.block_size, cast.pad) for _, cast in linear.gemms.casts()} for linear in linears_in(decoder.layers[0])
    ]
    assert found == [{(64, True)}, {(None, None)}, {(64, True)}, {(64, True)}]


@pytest.mark.parametrize(
    ("cast", "message"),
    [
        (
            Cast(format="NVFP4"),
            r"scale: layers.0.attention.wqkv, forward_x: NVFP4 has E4M3 scales, not E8M0; set it to E4M3, with an oute",
        ),
        (
            Cast(format="E4M9"),
            r"format: layers.0.attention.wqkv, forward_x: 'E4M9' is not a choice; did you mean 'E4M3'",
        ),
        (Cast(format="E4M3", rounding="down"), r"rounding: layers.0.attention.wqkv, forward_x: 'down' is not a choice"),
        (Cast(format="E4M3", block_size=48), r"block_size: 48 does not divide layers.0.attention.wqkv's input size 64"),
        (
            Cast(format="NVFP4", scale="E4M3", block_size=32),
            r"block_size: .* NVFP4 has blocks of 16, not 32; set it to 16",
        ),
    ],
)
def test_what_a_recipe_of_ones_own_has_wrong_is_refused_by_the_key_that_has_it(cast, message):
    with pytest.raises(ConfigError, match=rf"^precision\.recipes\.own\.forward_x\.{message}"):
        applied({"layers.*": "own"}, recipes={"own": Gemms(forward_x=cast)})


def test_blocks_that_cannot_be_filled_up_are_not_advised_to_be():
    nvfp4 = Cast(format="NVFP4", scale="E4M3", outer_scale="tensor", block_size=16)
    with pytest.raises(ConfigError, match=r"16 does not divide output's output size 50; choose sizes that it divides$"):
        applied({"output": "own"}, recipes={"own": Gemms(dgrad_w=nvfp4)})


def test_a_transform_that_does_not_divide_is_refused_by_its_key():
    own = Gemms(dgrad_dh=Cast(format="E4M3"), dgrad_transform=Hadamard(size=64))
    key = r"precision\.recipes\.own\.dgrad_transform\.size"
    with pytest.raises(ConfigError, match=rf"^{key}: 64 does not divide .* size 96; choose sizes that it divides$"):
        applied({"*.w2": "own"}, model=replace(MODEL, hidden_size=96), recipes={"own": own})


def test_code_bump_is_refused_for_other_formats_by_operand():
    with pytest.raises(
        ConfigError,
        match=r"precision.scale_rule: .*wqkv, dgrad_dh: code_bump is for E4M3 in blocks along one axis, not",
    ):
        applied({"layers.*": "mxfp8_e5m2_grad"}, scale_rule="code_bump")


@pytest.mark.parametrize("format", ["E4M3", "E2M3"])
def test_the_scales_that_a_norm_reads_are_those_of_its_cast(format):
    norm = config.PostRoundMXNorm(format=format)
    row, other = ("mxfp8", "mxfp6_e2m3") if format == "E4M3" else ("mxfp6_e2m3", "mxfp8")
    decoder, _ = applied({"layers.*": row}, norm=norm)
    assert decoder.layers[0].attention.wqkv.norm.fmt == format
    applied({"layers.*": "bf16"}, norm=norm)
    with pytest.raises(ConfigError, match=f"norm.format: {format}, but layers.0.attention.wqkv casts the norm's"):
        applied({"layers.*": other}, norm=norm)
    with pytest.raises(ConfigError, match="norm: PostRoundMXNorm reads E8M0 scales"):
        applied({"layers.*": "nvfp4_forward_only"}, norm=norm, block_size=16)
    with pytest.raises(ConfigError, match=r"reads block scales, but .* with one scale per tensor; use rmsnorm"):
        applied({"layers.*": "fp8_tensor"}, norm=norm)


def test_the_native_backend_is_refused_where_there_is_none():
    with pytest.raises(ConfigError, match=r"native cannot run layers.0: it needs CUDA with compute capability"):
        applied({"layers.*": "mxfp8"}, backend="native")


def test_the_native_backend_is_refused_for_a_row_that_it_does_not_have(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(ConfigError, match=r"native cannot run layers.0: it mul.*, not E5M2 x E4M3; reference runs"):
        applied({"layers.*": "mxfp8_e5m2_grad"}, backend="native", device="cuda")


@pytest.mark.parametrize(
    ("backend", "row", "taken"),
    [
        ("auto", "mxfp8", "native"),
        ("native", "mxfp8", "native"),
        ("emulated", "mxfp8", "fused"),
        ("fused", "mxfp8", "fused"),
        ("reference", "mxfp8", "reference"),
        ("auto", "mxfp8_e5m2_grad", "fused"),
    ],
)
def test_the_native_backend_where_there_is_one(backend, row, taken, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    decoder, rows = applied({"layers.*": row}, backend=backend, device="cuda")
    linear = decoder.layers[0].attention.wo
    assert linear.gemms == PRECISIONS[row].filled(BlockCast())
    assert linear.native == (linear.arithmetic.decode is not None) == (taken == "native")
    assert not decoder.output.native
    assert decoder.output.gemms == Gemms()
    assert describe(decoder, rows).splitlines()[2].startswith(f"2 blocks: {taken}")
    assert backends_of(decoder) == dict.fromkeys(("layers.0", "layers.1"), taken)


def test_the_first_and_the_last_blocks_can_be_left_out():
    model = replace(MODEL, num_layers=5)
    _, rows = applied({"*": "mxfp8"}, model=replace(model, vocab_size=64), skip_blocks=2)
    quantised = {name.split(".")[1] for name, row in rows.items() if row == "mxfp8" and name.startswith("layers.")}
    assert quantised == {"2"}
    assert rows["output"] == "mxfp8"
    with pytest.raises(ConfigError, match=r"precision.skip_blocks: 3 at both ends leave none of 5"):
        applied({"layers.*": "mxfp8"}, model=model, skip_blocks=3)
    with pytest.raises(ConfigError, match="skip_blocks: must not be negative"):
        config.Precision(schedule=(config.PrecisionRow(plan={}),), skip_blocks=-1)


def test_ends_of_their_own_and_the_tail_nearest_to_15_percent_can_be_left_out():
    def left_out(blocks, skip_blocks):
        _, rows = applied({"layers.*": "mxfp8"}, model=replace(MODEL, num_layers=blocks), skip_blocks=skip_blocks)
        return sorted({int(name.split(".")[1]) for name, row in rows.items() if row == "bf16" and "layers" in name})

    assert left_out(5, (1, 2)) == [0, 3, 4]
    assert left_out(5, (0, 1)) == [4]
    assert [len(left_out(n, "tail")) for n in (2, 6, 9, 10, 11, 12)] == [1, 1, 1, 1, 2, 2]
    assert left_out(20, "tail") == [17, 18, 19]
    decoder, rows = applied({"layers.*": "mxfp8"}, model=replace(MODEL, num_layers=5), skip_blocks=(1, 2))
    assert "not quantised: block 0, 3, 4 of 0 to 4, 60% of the linears" in describe(decoder, rows)
    for ends, message in (
        ((2, 3), r"precision.skip_blocks: \[2,3\] leave none of 5"),
        ((1, -1), "skip_blocks: must not be negative"),
        ((2, 2), r"skip_blocks: write 2 instead of \[2, 2\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            left_out(5, ends)
    with pytest.raises(ConfigError, match=r"precision.skip_blocks: tail leave none of 1"):
        left_out(1, "tail")


def test_the_head_runs_in_the_row_of_the_blocks_where_it_is_asked_to():
    _, rows = applied({"layers.*": "mxfp8"}, model=replace(MODEL, vocab_size=64), head=True)
    assert set(rows.values()) == {"mxfp8"}
    with pytest.raises(ConfigError, match=r"head: takes the recipe of the plan's pattern 'layers.\*'"):
        applied({"layers.0.*": "mxfp8"}, head=True)


def test_stacks_are_not_native_and_asking_for_native_ones_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("mxstudy.model.backends.why_not_native", lambda *_: None)
    decoder, _ = applied({"layers.*": "mxfp8"})
    linear = decoder.layers[0].attention.wo
    assert linear.native
    linear.weight = torch.nn.Parameter(torch.empty(3, *linear.weight.shape))
    place = Target(torch.bfloat16, torch.device("cpu"))
    planned = plan_backends(decoder, "auto", place)
    assert planned["layers.0"].name != "native"
    assert planned["layers.1"] == Backend("native")
    with pytest.raises(ConfigError, match=r"cannot run layers.0: its weight is a stack of matrices"):
        plan_backends(decoder, "native", place)


def test_a_quantised_head_does_not_keep_blocks_from_being_fused():
    decoder, _ = applied({"layers.*": "mxfp8"}, model=replace(MODEL, vocab_size=64), head=True, backend="fused")
    assert backends_of(decoder) == {"layers.0": "fused", "layers.1": "fused", "output": "reference"}

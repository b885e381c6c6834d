"""What a stack of students cannot do is refused, in one line, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from each import each
from student_runs import configured

from mxstudy.reader import ConfigError
from mxstudy.students import study as student_teacher


def schedule(*rows: tuple[int, str], pattern: str = "layers.*") -> list[dict[str, Any]]:
    return [{"from_step": step, "plan": {pattern: row}} for step, row in rows]


FP32 = {"precision__schedule": schedule((0, "fp32")), "train__compute": "fp32"}
NO_NORM = {"norm": None, "student": {"vector_ops": "bf16"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model__hidden_size": 48}, "precision.block_size: 32 does not divide layers.0.up's input size 48"),
    ({"precision__block_size": 64}, "precision.block_size: 64 does not divide layers.0.up's input size 32"),
    ({"norm": {"kind": "mxnorm", "p": 2}, "model__hidden_size": 48}, "model.hidden_size: 48 does not divide into"),
    (
        {"model__activation": "swiglu", "model__swiglu_multiple": 1, "model__hidden_size": 64},
        "precision.block_size: 32 does not divide layers.0.up's output size 342",
    ),
    (
        {"precision__scale_rule": "code_bump", "precision__schedule": schedule((0, "mx_mix"))},
        "precision.scale_rule: layers.0.up, dgrad_dh: code_bump is for E4M3 in blocks along one axis",
    ),
    (
        {"precision__scale_rule": "floor", "precision__schedule": schedule((0, "fp8_tensor"))},
        "has E8M0 scales to round by it; write precision.scale_rule=rceil, or take another recipe",
    ),
    (
        {"norm": {"kind": "mxnorm_postround"}, "precision__scale_rule": "code_bump"},
        "precision.scale_rule: code_bump gives a block no scale; use floor",
    ),
    ({"norm": None, "student": {"norm_ops": "fp32"}}, "student.norm_ops: there is no norm; set it to null"),
    ({"student": {"norm_ops": "skipped"}}, "student.norm_ops: 'skipped' is not a choice"),
    ({"teacher": {"from_disk": True, "quantized": True}}, "teacher.from_disk: stored targets were computed in FP32"),
    ({"teacher": {"from_disk": True}, "label_noise": 0.0}, "teacher.from_disk: stored targets have label noise"),
    ({"train__batch_size": 48}, "train.batch_size: 48 samples do not divide into blocks of 32"),
    (
        {"train__batch_size": 48, "precision__schedule": schedule((0, "mxfp8_forward_only"), (5, "mxfp8"))},
        "train.batch_size: 48 samples do not divide into blocks of 32",
    ),
    ({"precision__schedule": schedule((0, "mxpf8"))}, "'mxpf8' is not a choice; did you mean 'mxfp8'?"),
    ({"precision__schedule": schedule((0, "mxfp8"), (9, "mxpf8"))}, "'mxpf8' is not a choice"),
    ({"precision__schedule": schedule((0, "mxfp8"), pattern="layres.*")}, "did you mean 'layers.*'?"),
    ({"precision__schedule": schedule((0, "mxfp8"), (24, "bf16"))}, "a row starts at step 24, after the last of 24"),
    ({"precision__schedule": schedule((0, "mxfp8"), (99, "bf16"))}, "a row starts at step 99, after the last of 24"),
    ({"precision__schedule": schedule((0, "mxfp8"), (9, "fp32"))}, "asks for fp32, but train.compute is bf16"),
    (
        {
            "model": {
                "kind": "residual_mlp",
                "hidden_size": 32,
                "num_layers": 1,
                "attention_heads": 1,
                "sequence_length": 8,
            },
            "precision__schedule": [{"plan": {"layers.*": "mxfp8", "layers.0.attention.*": "bf16"}}],
            "teacher": {"kind": "code", "quantized": True},
            "student": {"gain": "bf16", "vector_ops": "bf16"},
        },
        "teacher.quantized: in the teacher precision.schedule: pattern 'layers.0.attention.*' matches no linear",
    ),
    ({"precision__backend": "native"}, "precision.backend: native cannot run"),
    ({"precision__skip_blocks": 1}, "precision.skip_blocks: 1 at both ends leave none of 2"),
    ({"norm": None}, "student.gain: there is no norm to round the gain of; leave it at fp32"),
    ({"norm": {"kind": "layernorm", "affine": False}}, "student.gain: the norm has none to round to mx"),
    (FP32, "student.gain: mx uses the cast of the forward of layers.0.up, which is not in"),
    (
        {"precision__schedule": schedule((0, "mxfp8"), (9, "mxfp8_backward_only"))},
        "student.gain: mx uses the cast of the forward of layers.0.up, which is not in",
    ),
    ({"precision__schedule": schedule((0, "fp8_tensor"))}, "student.gain: mx uses the cast of the forward"),
    (
        {
            "precision__schedule": schedule((0, "own")),
            "precision__recipes": {"own": {"forward_w": {"format": "E2M1", "headroom": 0.75}}},
            "probe": {"last_bin": {"every_steps": 1}},
        },
        "probe.last_bin.every_steps: student.gain=mx rounds the gains of layers.0.up with headroom=0.75, but the probe",
    ),
    (
        {
            "precision__schedule": schedule((0, "own")),
            "precision__recipes": {"own": {"forward_w": {"format": "E2M1", "scale_rule": "floor", "statistic": "std"}}},
        },
        "student.gain: mx would take its scales from the std of blocks, as the forward does, and equal gains have none",
    ),
    ({"precision__gain": "bf16"}, "precision.gain: bf16 is for language models; students take student.gain"),
    (
        {"norm": {"kind": "rmsnorm"}, "student": {"freeze_norm_bias": True}},
        "student.freeze_norm_bias: the norm has no bias; set it to false",
    ),
    (
        {"norm": {"kind": "mxnorm", "p": 2}, "student": {"vector_ops": "code"}},
        "student.vector_ops: code rounds every step of the norm, but with a folded gain",
    ),
    ({"student": {"gain": "mxfp8"}}, "student.gain: 'mxfp8' is not a choice"),
    ({"loss": "kl"}, "label_noise: must be 0 with loss=kl"),
    ({"seeds": [1, 1]}, "seeds: give one or more, each once, not [1, 1]"),
    ({"seeds": []}, "seeds: give one or more, each once, not []"),
    ({"optimizer": {"kind": "adam", "eps": -1.0}}, "optimizer.eps: must not be negative, not -1.0"),
    ({"lrs": [0.0]}, "lrs: must be positive, not [0.0]"),
    ({"optimizer": {"kind": "adamw", "lr": 1e-3}}, "optimizer.kind: 'adamw' is not a choice"),
]
if not torch.cuda.is_available():
    REFUSED.append(({"train__device": "cuda"}, "train.device: cuda was asked for, but there is no GPU"))

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"train__batch_size": 48, "precision__schedule": schedule((0, "mxfp8_forward_only"))},  # nothing along the batch
    {"precision__schedule": schedule((0, "mxfp8"), (23, "bf16")), "student": {"gain": "bf16"}},
    NO_NORM,
    FP32 | {"student": {}},
    {"loss": "kl", "label_noise": 0.0},
    {"norm": {"kind": "mxnorm", "p": 1}},
    {"model__activation": "swiglu", "model__swiglu_multiple": 1, "precision__pad_blocks": True},
    {"train__batch_size": 48, "precision__pad_blocks": True},
    {"precision__scale_rule": "code_bump", "student": {"gain": "mx", "norm_ops": "code_skipped"}},
    {"precision__schedule": schedule((0, "mxfp8_bf16_weight"))},  # the gain is in the format of X
]


@each(("dotted", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_it_is_refused(dotted: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        student_teacher.STUDY.check(configured(**dotted))
    assert words in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


@each("dotted", ACCEPTED, ids=str)
def test_it_is_not_refused(dotted: dict[str, Any]) -> None:
    student_teacher.STUDY.check(configured(**dotted))


def test_what_was_not_watched_cannot_be_had_by_going_on() -> None:
    newly_on = student_teacher.STUDY.newly_on
    coupled = configured(probe={"gradient_bias": {"every_steps": 5, "coupled": True}})
    same = configured(probe={"gradient_bias": {"every_steps": 5}})
    assert newly_on(configured(), coupled) == [
        "probe.gradient_bias",
        "probe.gradient_bias.coupled",
    ]
    assert newly_on(same, coupled) == ["probe.gradient_bias.coupled"]
    assert newly_on(coupled, same) == newly_on(coupled, configured()) == []
    student_teacher.STUDY.check_watched(coupled)
    with pytest.raises(ConfigError, match=r"^probe\.gradient_bias\.coupled: has no effect while"):
        student_teacher.STUDY.check_watched(configured(probe={"gradient_bias": {"coupled": True}}))


@each(
    ("values", "last"),
    [
        ({}, "norms: gains in mx, operations in bf16; other vector operations: in bf16; teacher: not quantised"),
        (
            {"student": {"gain": "bf16", "norm_ops": "code"}, "teacher": {"quantized": True}},
            "norms: gains in bf16, operations in code; other vector operations: in fp32; teacher: as the students",
        ),
        (NO_NORM, "other vector operations: in bf16; teacher: not quantised"),
    ],
)
def test_a_dry_run_has_the_precision_plan(values: dict[str, Any], last: str) -> None:
    """Every row of the schedule as applied, and what else is rounded."""
    both = {"precision__schedule": schedule((0, "mxfp8"), (9, "mxfp6_e2m3"))}
    first, mxfp8, _, second, mxfp6, _, rest = student_teacher.STUDY.precision_plan(configured(**both, **values))
    assert (first, second) == ("from step 0:", "from step 9:")
    assert mxfp8.startswith("4 linears in mxfp8: forward E4M3")
    assert mxfp6.startswith("4 linears in mxfp6_e2m3: forward E2M3")
    assert rest == last

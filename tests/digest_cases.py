"""Define what `tests/digests.py` trains, by name: every precision with every norm, and all else that changes the bits.

A config is plain data, as `mxstudy.config.read_run` takes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

Values = dict[str, Any]
STEPS = 6
BACKENDS = ("auto", "modules")  # the backend that a run chooses, and module by module

# The rows of PRECISIONS as they were when the first digests were recorded.
PRECISIONS = (
    *("fp32", "bf16", "mxfp8", "mxfp8_e5m2_grad", "mx_mix", "mxfp8_forward_only", "mxfp8_e5m2_forward_only"),
    *("mxfp8_backward_only", "mxfp8_bf16_act_fwd", "mxfp8_bf16_act", "mxfp8_e5m2_bf16_act", "mxfp6_e2m3_bf16_act"),
    *("mxfp8_bf16_weight", "mxfp8_bf16_weight_fwd", "mxfp8_act_only", "mxfp8_e5m2", "mxfp8_e5m2_weight"),
    *("mxfp8_e5m2_act", "mxfp8_e5m2_act_grad", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "fp8_tensor"),
    "nvfp4_forward_only",
)
NORMS: dict[str, Values | None] = {
    "rmsnorm": {"kind": "rmsnorm"},
    "mxnorm_p2": {"kind": "mxnorm", "p": 2.0},
    "rmsnorm_folded": {"kind": "rmsnorm", "fold_gain": True},
    "mxnorm_p1": {"kind": "mxnorm", "p": 1.0},
    "mxnorm_postround": {"kind": "mxnorm_postround"},
    "layernorm": {"kind": "layernorm"},
    "layernorm_bias": {"kind": "layernorm", "bias": True},
    "none": None,
}
OF_DECODERS = ("rmsnorm", "mxnorm_p2", "rmsnorm_folded", "mxnorm_p1", "mxnorm_postround", "layernorm")
BOTH_BACKENDS = ("rmsnorm", "mxnorm_p2")  # on CPU too, where a test holds that both are the same
OF_STUDENTS = ("layernorm_bias", "rmsnorm", "mxnorm_p2", "none")
ROWS_OF_STUDENTS = ("mxfp8", "mx_mix", "mxfp8_bf16_act", "mxfp6_e2m3", "mxfp4", "bf16", "fp32", "fp8_tensor")

# Dotted keys with values, by name. Some of the padded blocks must be partly full.
DECODER_OPTIONS: dict[str, Values] = {
    "gelu": {"model.mlp": "gelu"},
    "relu2": {"model.mlp": "relu2"},
    "floor": {"precision.scale_rule": "floor"},
    "ceil": {"precision.scale_rule": "ceil"},
    "even": {"precision.scale_rule": "even"},
    "code_bump": {"precision.scale_rule": "code_bump"},
    "away": {"precision.rounding": "away"},
    "pre_round": {"precision.operand_pre_round": True},
    "pad_blocks": {"precision.pad_blocks": True, "model.ffn_size": 56},
    "blocks_of_16": {"precision.block_size": 16},
    "blocks_of_64": {"precision.block_size": 64, "model.hidden_size": 128},
    "qk_norm": {"model.qk_norm": True},
    "head": {"precision.head": True},
    "layers": {"model.num_layers": 3, "precision.skip_blocks": 1},
    "two_layers": {"model.num_layers": 2},
}
SIZES_ON_GPU: dict[str, Values] = {
    "pad_blocks": {"precision.pad_blocks": True, "model.ffn_size": 376},
    "blocks_of_64": {"precision.block_size": 64},
}
READS = {"mxfp8_e5m2": "E5M2", "mxfp6_e2m3": "E2M3", "mxfp6_e3m2": "E3M2", "mxfp4": "E2M1"}  # of mxnorm_postround
CASTS_OF_THE_CODE: Values = {
    "precision.scale_rule": "floor",
    "precision.rounding": "away",
    "precision.operand_pre_round": True,
}
PUBLIC_CODE: Values = CASTS_OF_THE_CODE | {
    "precision.pad_blocks": True,
    "student.gain": "bf16",
    "student.vector_ops": "code",
    "teacher.quantized": True,
    "model.activation": "swiglu",
    "model.swiglu_multiple": 1,
}
STUDENT_OPTIONS: dict[str, Values] = {
    "relu": {"model.activation": "relu"},
    "gelu_tanh": {"model.activation": "gelu_tanh"},
    "swiglu": {"model.activation": "swiglu"},
    "attention": {"model.attention_heads": 2, "model.sequence_length": 32},
    "code_bump": {"precision.scale_rule": "code_bump"},
    "code_skipped": {"student.norm_ops": "code_skipped"},
    "frozen_bias": {"student.freeze_norm_bias": True},
    "momentum": {"optimizer": {"kind": "sgd", "momentum": 0.9}, "lrs": [0.1]},
    "casts_of_the_code": CASTS_OF_THE_CODE,
    "public_code": PUBLIC_CODE,
}

# A few of each kind are compiled, which takes half a minute per case.
COMPILED = (
    *(f"decoder/auto/{row}/{norm}" for row in ("mxfp8", "mx_mix", "mxfp4", "bf16") for norm in BOTH_BACKENDS),
    *(f"decoder/auto/{row}/rmsnorm" for row in ("mxfp8_bf16_act", "mxfp6_e2m3", "fp8_tensor", "nvfp4_forward_only")),
    *(f"decoder/auto/mxfp8/{norm}" for norm in OF_DECODERS[2:]),
    *(f"decoder/modules/mxfp8/{norm}" for norm in BOTH_BACKENDS),
    *(f"decoder/auto/mxfp8/mxnorm_p2/{option}" for option in ("gelu", "away", "pre_round", "two_layers")),
    *("student/mxfp8/layernorm_bias", "student/mxfp8/mxnorm_p2", "student/mxfp8/layernorm_bias/public_code"),
)
# Cases that take a few seconds of one core: every precision with two norms.
QUICK = (
    *(f"decoder/auto/{row}/{norm}" for row in PRECISIONS for norm in BOTH_BACKENDS),
    *("student/mxfp8/layernorm_bias", "student/mx_mix/mxnorm_p2", "student/mxfp8/layernorm_bias/public_code"),
)


def decoder(row: str, norm: str, options: Values, device: str = "cpu") -> Values:
    """Return the config of a pre-training of one block, on a GPU in sizes that kernels are made for."""
    values = {
        "study": "pretrain",
        "model": {"num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 64, "init_std": 0.1}
        | ({"hidden_size": 64, "ffn_size": 64} if device == "cpu" else {"hidden_size": 256, "ffn_size": 384}),
        "norm": NORMS[norm] and dict(NORMS[norm]),
        "precision": precision(row),
        "data": {"kind": "pysource"},
        "tokenizer": {"kind": "bytes"},
        "optimizer": {"lr": 3e-3},
        "schedule": {"kind": "constant"},
        "train": {"steps": STEPS, "batch_size": 1 if device == "cpu" else 4, "sequence_length": 64}
        | {"compute": compute(row), "deterministic": True},
    }
    return changed(values, options)


def student(row: str, norm: str, options: Values, device: str = "cpu") -> Values:
    """Return the config of a stack of two students."""
    values = {
        "study": "student_teacher",
        "seeds": [3, 5],
        "model": {"kind": "residual_mlp", "hidden_size": 64 if device == "cpu" else 128, "num_layers": 1},
        "norm": NORMS[norm] and dict(NORMS[norm]),
        "precision": precision(row),
        "optimizer": {"kind": "adam"},
        "schedule": {"kind": "constant", "warmup_fraction": 0.0},
        "train": {"steps": STEPS, "batch_size": 64 if device == "cpu" else 256, "compute": compute(row)},
        "student": {},
        "teacher": {},
    }
    return changed(values, options)


def compute(row: str) -> str:
    return "fp32" if row == "fp32" else "bf16"


def precision(row: str) -> Values:
    return {"schedule": [{"plan": {"layers.*": row}}], "block_size": 16 if row.startswith("nvfp4") else 32}


def changed(values: Values, options: Values) -> Values:
    """Return the values, changed by the options, which have dotted keys."""
    for key, value in options.items():
        *parents, last = key.split(".")
        inner = values
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    return values


def cases(device: str = "cpu") -> dict[str, tuple[Values, str]]:
    """Return {name: (config, backend)}. A stack of students knows one backend."""
    return dict(itertools.chain(decoders(device), students(device)))


def decoders(device: str) -> Iterator[tuple[str, tuple[Values, str]]]:
    plain = [(row, norm, "", {}) for norm in OF_DECODERS for row in PRECISIONS]
    reads = [(row, "mxnorm_postround", f"reads_{fmt}", {"norm.format": fmt}) for row, fmt in READS.items()]
    small = itertools.product(("mxfp8", "mxfp4"), BOTH_BACKENDS, DECODER_OPTIONS.items())
    own = {} if device == "cpu" else SIZES_ON_GPU
    varied = [(row, norm, name, own.get(name, options)) for row, norm, (name, options) in small]
    for (row, norm, name, options), backend in itertools.product([*plain, *reads, *varied], BACKENDS):
        if backend == "auto" or device != "cpu" or (norm in BOTH_BACKENDS and row != "mxfp4"):
            named = "/".join(filter(None, ("decoder", backend, row, norm, name)))
            yield named, (decoder(row, norm, options, device), backend)


def students(device: str) -> Iterator[tuple[str, tuple[Values, str]]]:
    plain = [(row, norm, "", {}) for norm in OF_STUDENTS for row in ROWS_OF_STUDENTS]
    rounded = [
        (row, norm, f"gain_{gain}_ops_{ops}", {"student.gain": gain, "student.vector_ops": ops})
        for row, norm in (("mxfp8", "layernorm_bias"), ("mx_mix", "layernorm_bias"), ("mxfp8", "mxnorm_p2"))
        for gain, ops in itertools.product(("fp32", "bf16", "mx"), ("fp32", "bf16", "code"))
        if (gain, ops) != ("fp32", "fp32")
    ]
    small = [("mxfp8", norm, *option) for norm in ("layernorm_bias", "mxnorm_p2") for option in STUDENT_OPTIONS.items()]
    for row, norm, name, options in [*plain, *rounded, *small]:
        yield "/".join(filter(None, ("student", row, norm, name))), (student(row, norm, options, device), "auto")


def chosen(patterns: list[str], device: str, compile: bool) -> list[str]:
    """Return the names of the cases that match a pattern.

    Without patterns, return all names, or with `compile` those that are worth compiling.
    """
    asked = patterns or (list(COMPILED) if compile else ["*"])
    return [name for name in cases(device) if any(fnmatchcase(name, pattern) for pattern in asked)]

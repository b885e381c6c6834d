"""The student's self-attention agrees with float64: its reach, its initial weights, and its refusals.

Quantised, in stacks and compiled, it is tested in test_residual_mlp.py and test_student_stacks.py.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from each import each
from small_students import (
    ATTENTION,
    BF16,
    CAST,
    EPS,
    FP32,
    LAYER_NORM,
    LAYERS,
    SIZE,
    TOKENS,
    run,
    samples,
    small,
    student,
)
from torch import Tensor

from mxstudy import config
from mxstudy.model.describe_precision import describe
from mxstudy.model.precision import apply_precision
from mxstudy.reader import ConfigError
from mxstudy.students.model import ResidualMLP

HEADS, LENGTH = ATTENTION["attention_heads"], ATTENTION["sequence_length"]
NORMS = {"none": None, "layernorm": LAYER_NORM}


def written_out(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Compute Eq. 11 for one replica: samples, heads and sequences one by one."""

    def normed(name: str, a: Tensor) -> Tensor:
        gain, bias = p.get(f"{name}.norm.weight"), p.get(f"{name}.norm.bias")
        return a if gain is None else F.layer_norm(a, (SIZE,), gain.flatten(), bias.flatten(), EPS)

    a = x
    for k in range(LAYERS):
        name, size = f"layers.{k}.attention", SIZE // HEADS
        query, key, value = p[f"{name}.qkv.weight"].split(SIZE)
        rows = normed(f"{name}.qkv", a)
        mixed = []
        for t in range(len(x)):
            others = rows[t // LENGTH * LENGTH : (t // LENGTH + 1) * LENGTH]
            heads = []
            for h in range(0, SIZE, size):
                q, keys = query[h : h + size] @ rows[t], others @ key[h : h + size].T
                weights = (keys @ q / size**0.5).exp()
                heads.append(weights / weights.sum() @ (others @ value[h : h + size].T))
            mixed.append(torch.cat(heads))
        z = a + torch.stack(mixed) @ p[f"{name}.out.weight"].T
        h = F.gelu(normed(f"layers.{k}.up", z) @ p[f"layers.{k}.up.weight"].T)
        a = z + h @ p[f"layers.{k}.down.weight"].T + p[f"layers.{k}.bias"].flatten()
    return a


@pytest.mark.integration
@pytest.mark.parametrize("norm", NORMS)
def test_it_is_equation_11(norm: str) -> None:
    mlp, x, dy = student(small(**ATTENTION), NORMS[norm], [3, 1]), samples(TOKENS, SIZE), samples(2, TOKENS, SIZE)
    got = run(mlp, x, dy)
    for r in range(2):
        p = {name: parameter[r].detach().double().requires_grad_() for name, parameter in mlp.named_parameters()}
        y = written_out(p, x.double())
        y.backward(dy[r].double())
        for name, want in {"y": y.detach(), **{name: parameter.grad for name, parameter in p.items()}}.items():
            assert (got[name][r] - want).norm() < 2e-6 * want.norm(), name


def test_tokens_see_their_sequence_whatever_its_order_and_no_other() -> None:
    mlp, x = student(small(**ATTENTION), LAYER_NORM, [1], "mxfp8", BF16), samples(TOKENS, SIZE)
    other = x.clone()
    other[LENGTH] *= -1
    changed = (mlp(other) != mlp(x))[0].any(-1)
    assert changed.tolist() == [LENGTH <= t < 2 * LENGTH for t in range(TOKENS)]
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    exact = student(small(**ATTENTION), LAYER_NORM, [1])
    torch.testing.assert_close(exact(x[:LENGTH][order])[0], exact(x[:LENGTH])[0][order], rtol=0, atol=1e-5)


def test_replicas_may_have_sequences_of_their_own() -> None:
    mlp, x = student(small(**ATTENTION), LAYER_NORM, [1, 2], "mxfp8", BF16), samples(2, TOKENS, SIZE)
    for r in range(2):
        assert torch.equal(mlp(x)[r], mlp(x[r])[r])


@pytest.mark.parametrize("init", ["torch", "xavier"])
def test_initial_weights(init: str) -> None:
    """The MLP has those of a student without attention. Q, K and V start as three linears of their own."""
    built = {}
    for name, options in {"without": {}, "with": ATTENTION}.items():
        built[name] = ResidualMLP(small(init=init, **options), LAYER_NORM, CAST, FP32)
        built[name].init_weights([5])
    weights = built["with"].state_dict()
    for name, weight in built["without"].state_dict().items():
        assert torch.equal(weights[name], weight)
    std = {"torch": (3 * SIZE) ** -0.5, "xavier": 0.5 * SIZE**-0.5}[init]
    for k in range(LAYERS):
        names = f"layers.{k}.attention.qkv.weight", f"layers.{k}.attention.out.weight"
        for part in [*weights[names[0]].split(SIZE), weights[names[1]]]:
            assert part.shape == (SIZE, SIZE)
            assert part.std() == pytest.approx(std, rel=0.05)
        assert weights[f"layers.{k}.attention.qkv.norm.weight"].equal(torch.ones(SIZE))


def test_its_linears_and_its_norm_follow_the_plan_and_the_options() -> None:
    mlp = student(
        small(**ATTENTION), LAYER_NORM, [1], compute=BF16, gain="mx", vector_ops="bf16", freeze_norm_bias=True
    )
    precision = config.Precision(schedule=(config.PrecisionRow(plan={"layers.*": "mxfp8", "*.1.attention.*": "bf16"}),))
    rows = apply_precision(mlp, precision, 0, "bf16", torch.device("cpu"))
    names = [f"layers.{k}.{name}" for k in (0, 1) for name in ("attention.qkv", "attention.out", "up", "down")]
    assert rows == {name: "bf16" if ".1.attention" in name else "mxfp8" for name in names}
    qkv = mlp.layers[0].attention.qkv
    assert (qkv.gain, qkv.norm.output, qkv.norm.bias.requires_grad) == ("mx", "rounded", False)


@each(
    ("options", "message"),
    [
        ({"attention_heads": 5, "sequence_length": 8}, "attention_heads: hidden_size 64 does not divide into 5 heads"),
        ({"attention_heads": -4, "sequence_length": 8}, "attention_heads: must not be negative, not -4"),
        ({"attention_heads": 4}, "sequence_length: 4 attention_heads need sequences; give a length"),
        ({"sequence_length": 8}, "sequence_length: 8 needs attention_heads; set it to 0, or give heads"),
        ({**ATTENTION, "residual": False}, "attention_heads: attention needs residual: true"),
    ],
)
def test_what_cannot_attend_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(**options)


def test_a_batch_is_a_whole_number_of_sequences() -> None:
    values: dict[str, Any] = {
        "study": "student_teacher",
        "model": {"kind": "residual_mlp", "hidden_size": SIZE, "num_layers": 1, "attention_heads": 4},
        "norm": None,
        "precision": {"schedule": [{"plan": {"layers.*": "mxfp8"}}]},
        "optimizer": {"kind": "adam"},
        "schedule": {"kind": "constant"},
        "train": {"steps": 1, "batch_size": 96},
    }
    values["model"]["sequence_length"] = 32
    assert config.read_run(values).model.sequence_length == 32
    values["model"]["sequence_length"] = 64
    message = re.escape("train.batch_size: 96 samples do not divide into sequences of 64 (model.sequence_length)")
    with pytest.raises(ConfigError, match=message):
        config.read_run(values)


@pytest.mark.parametrize(("attention", "note"), [(True, " (the MLP; attention runs by the reference)"), (False, "")])
def test_the_plan_says_that_attention_is_not_fused(attention: bool, note: str) -> None:
    model = student(small(**(ATTENTION if attention else {})), LAYER_NORM, [0, 1], "mxfp8", BF16)
    precision = config.Precision(schedule=(config.PrecisionRow(plan={"layers.*": "mxfp8"}),))
    rows = apply_precision(model, precision, 0, "bf16", torch.device("cuda"), (0, 1))
    assert describe(model, rows).splitlines()[-1] == f"{LAYERS} blocks: fused{note}"

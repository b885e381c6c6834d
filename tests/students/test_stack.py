"""In a stack's step each replica is as if alone, losses and optimizers are PyTorch's, and replicas may die."""

from __future__ import annotations

import sys
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from each import each
from torch.utils._python_dispatch import TorchDispatchMode

from mxstudy import config
from mxstudy.config import read_run
from mxstudy.students.stack import LOSSES, Stack
from mxstudy.train.runtime import configure_torch

pytestmark = pytest.mark.integration
CPU = torch.device("cpu")
ROWS = 20  # of a small record, which is soon full
MODEL = {"kind": "residual_mlp", "hidden_size": 32, "num_layers": 2}
FP32 = {"precision": {"schedule": [{"plan": {"layers.*": "fp32"}}]}}


def stack(seeds: list[int], size: int = 32, batch_size: int = 64, **options: Any) -> Stack:
    values = {
        "study": "student_teacher",
        "seeds": seeds,
        "model": MODEL | {"hidden_size": size},
        "norm": {"kind": "layernorm", "bias": True},
        "precision": {"schedule": [{"plan": {"layers.*": "mxfp8"}}]},
        "optimizer": {"kind": "adam"},
        "schedule": {"kind": "constant", "warmup_fraction": 0.0},
        "train": {"steps": 20, "batch_size": batch_size, "compile": False, "device": "cpu"},
    }
    configure_torch()
    run = cast(config.StudentTeacher, read_run(values | options))
    return Stack(run, CPU)


def reported(one: Stack, replica: int = 0) -> list[float]:
    return [float(one.losses[replica]), float(one.grad_norms[replica])]


@pytest.mark.parametrize("attention", [{}, {"attention_heads": 4, "sequence_length": 32}])
def test_a_replica_is_the_run_alone(attention: dict[str, int]) -> None:
    """At sizes where threads share a sum, losses, gradient norms and weights have equal bits."""
    model = {"kind": "residual_mlp", "hidden_size": 256, "num_layers": 2} | attention
    together = stack([4, 7, 1, 0, 9], batch_size=512, model=model)
    alone = {replica: stack([seed], batch_size=512, model=model) for replica, seed in ((0, 4), (3, 0))}
    for _ in range(2):
        together.train_step()
        for replica, one in alone.items():
            one.train_step()
            assert reported(together, replica) == reported(one)
    for replica, one in alone.items():
        for of_all, own in zip(together.state()[1:], one.state()[1:], strict=True):
            assert torch.equal(of_all[replica], own[0])


# ---------------------------------------------------------------------------------------------- losses and optimizers


def test_losses() -> None:
    y, target = torch.randn(3, 8, 16), torch.randn(8, 16)
    for loss, reference in {
        "mse": lambda one: F.mse_loss(one, target),
        "kl": lambda one: F.kl_div(one.log_softmax(-1), target.softmax(-1), reduction="batchmean"),
    }.items():
        torch.testing.assert_close(LOSSES[loss](y, target), torch.stack([reference(one) for one in y]))


OPTIMIZERS = {
    "adam": ({"kind": "adam"}, lambda p, lr: torch.optim.Adam(p, lr)),
    "adam, betas": (
        {"kind": "adam", "betas": [0.5, 0.9], "eps": 1e-3},
        lambda p, lr: torch.optim.Adam(p, lr, (0.5, 0.9), 1e-3),
    ),
    "sgd": ({"kind": "sgd"}, lambda p, lr: torch.optim.SGD(p, lr)),
    "momentum": ({"kind": "sgd", "momentum": 0.9}, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_those_of_torch(name: str) -> None:
    """The optimizers take the stack's own gradients.

    There are a cosine schedule, two learning rates, and replicas at steps of their own.
    """
    values, build = OPTIMIZERS[name]
    options = FP32 | {"optimizer": values, "lrs": [1e-3, 1e-2]}
    cosine = {"kind": "cosine", "warmup_fraction": 0.0, "final_ratio": 0.01}
    ours = stack(
        [0], **options, schedule=cosine, train={"steps": 20, "batch_size": 64, "compile": False, "compute": "fp32"}
    )
    for replica, lr in enumerate((1e-3, 1e-2)):
        copies = [p.detach()[replica].clone().requires_grad_() for p in ours.parameters]
        theirs = build(copies, lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, T_max=19, eta_min=lr * 0.01)
        begin = [tensor.detach().clone() for tensor in ours.state()]
        for _ in range(20):
            x_STD, target_STD = ours.batch()
            gradients = torch.autograd.grad(ours.loss(ours.model(x_STD), target_STD).sum(), ours.parameters)
            for copy, gradient in zip(copies, gradients, strict=True):
                copy.grad = gradient[replica]
            ours.train_step()
            theirs.step()
            schedule.step()
        for p, copy in zip(ours.parameters, copies, strict=True):
            torch.testing.assert_close(p[replica], copy, rtol=2e-5, atol=2e-6)
        with torch.no_grad():
            for tensor, before in zip(ours.state(), begin, strict=True):
                tensor.copy_(before)


# -------------------------------------------------------------------------------------------------------- one graph


class Read(TorchDispatchMode):
    """Notes whether the host reads a tensor, because then a CUDA graph cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.by_host = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.by_host |= func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


READING = {
    "plain": {},
    "public code": {
        "teacher": {"kind": "code", "quantized": True},
        "student": {"gain": "bf16", "vector_ops": "code", "freeze_norm_bias": True},
    },
    "fp8_tensor": {"precision": {"schedule": [{"plan": {"layers.*": "fp8_tensor"}}]}},
    "mxnorm": {"norm": {"kind": "mxnorm", "p": 2.0}},
    "attention": {
        "model": {
            "kind": "residual_mlp",
            "hidden_size": 32,
            "num_layers": 1,
            "attention_heads": 1,
            "sequence_length": 8,
        }
    },
    "kl, momentum": {"loss": "kl", "label_noise": 0.0, "optimizer": {"kind": "sgd", "momentum": 0.9}},
}


@each("name", READING)
def test_the_host_reads_nothing_of_a_step(name: str) -> None:
    one = stack([0, 1], **READING[name])
    with Read() as read:
        one.train_step()
    assert not read.by_host
    with read:
        _ = one.lr_ratios[one.step]  # an index that is a tensor
    assert read.by_host


# ------------------------------------------------------------------------------------------------------------- death


def test_what_is_not_finite_ends_a_replica_and_no_other() -> None:
    """It keeps the weights of its last finite step, and stays dead even if they would do on the next batch."""
    ill, well = stack([0, 1, 2]), stack([0, 1, 2])
    healthy = ill.loss
    for step in range(8):
        if step == 3:  # a target that overflows, once and for one replica
            ill.loss = lambda x, target: healthy(x, target) * torch.tensor([1.0, torch.inf, 1.0])
        ill.train_step()
        well.train_step()
        if step == 3:
            ill.loss = healthy
        if step == 2:
            last = [tensor.detach()[1].clone() for tensor in ill.state()[2:]]
    record = ill.record[:8]
    assert torch.equal(record[:, :, [0, 2]], well.record[:8, :, [0, 2]])
    assert torch.equal(record[:3, :, 1], well.record[:3, :, 1])
    assert record[3, 0, 1] == torch.inf
    assert record[4:, :, 1].isnan().all()
    assert ill.alive.tolist() == [True, False, True]
    for tensor, before in zip(ill.state()[2:], last, strict=True):
        assert torch.equal(tensor[1], before)


def test_the_record_has_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[Stack.__module__], "ROWS", ROWS)
    one = stack([0], train={"steps": ROWS + 3, "batch_size": 32, "compile": False})
    seen = []
    for _ in range(ROWS + 3):
        one.train_step()
        seen.append(reported(one))
    want = torch.tensor([*seen[ROWS:], *seen[3:ROWS]])
    assert torch.equal(one.record[:, :, 0], want)


@pytest.mark.parametrize("norm", [{"kind": "layernorm", "bias": True}, {"kind": "mxnorm", "p": 2.0}])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_weights_by_their_operands(norm: dict[str, Any], optimizer: str) -> None:
    """A cast operand's gradient is the weight's, and the stored operand is what every step would cast."""
    options = {
        "norm": norm,
        "optimizer": {"kind": optimizer},
        "precision": {"schedule": [{"plan": {"layers.*": "mxfp8"}}]},
    }
    casts, holds = (stack([0, 1], **options) for _ in range(2))
    for one in (casts, holds):
        one.model.use_kernels()
    holds.use_kernels()
    assert any(leaf.dtype == torch.bfloat16 for leaf in holds.leaves) == (norm["kind"] == "layernorm")
    for _ in range(5):
        casts.train_step()
        holds.train_step()
    for one, other in zip(casts.state(), holds.state(), strict=True):
        assert torch.equal(one, other)

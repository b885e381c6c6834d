"""A fork changes its parent's config, targets and optimizer as it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mxstudy.config import Intervention, StudentTeacher, read_run
from mxstudy.model.linear import MXLinear, NormLinear
from mxstudy.reader import ConfigError
from mxstudy.students.fork.points import ForkPoint, changed, forked, state_of
from mxstudy.students.inputs import gaussian_samples
from mxstudy.students.stack import Stack

pytestmark = pytest.mark.integration
CPU = torch.device("cpu")
STEP, LR = 7, 1e-3


def parent(**options: Any) -> StudentTeacher:
    values = {
        "study": "student_teacher",
        "lrs": [LR],
        "model": {"kind": "residual_mlp", "hidden_size": 32, "num_layers": 2},
        "norm": {"kind": "layernorm", "bias": True},
        "precision": {"schedule": [{"plan": {"layers.*": "mxfp8"}}], "scale_rule": "floor"},
        "student": {"gain": "bf16", "vector_ops": "code", "freeze_norm_bias": True},
        "teacher": {"kind": "paper", "quantized": True},
        "own_noise": True,
        "optimizer": {"kind": "adam"},
        "schedule": {"kind": "constant", "warmup_fraction": 0.0},
        "train": {"steps": 20, "batch_size": 256, "compile": False, "device": "cpu"},
    }
    run = read_run(values | options)
    assert isinstance(run, StudentTeacher)
    return run


def fork_of(run: StudentTeacher, **intervention: Any) -> Stack:
    """Return its changed replica after STEP steps."""
    stack, change = Stack(run, CPU), Intervention(**intervention)
    for _ in range(STEP):
        stack.train_step()
    point = ForkPoint(0, STEP, "", None)
    return forked(changed(run, change), run, [point], [state_of(stack, 0)], change.new_optimizer)


def targets_and_inputs(stack: Stack) -> tuple[Tensor, Tensor]:
    x, target = stack.batch()
    return target.view(256, 32), x.view(256, 32)


def paper(stack: Stack, x: Tensor) -> Tensor:
    """Compute the text's teacher in FP32 from the stack's weights."""
    weights = stack.teacher.mlp.state_dict()
    for k in range(2):
        h = F.gelu(x @ weights[f"layers.{k}.up.weight"].T)
        x = x + h @ weights[f"layers.{k}.down.weight"].T + weights[f"layers.{k}.bias"]
    return x


# ------------------------------------------------------------------------------------------------------------ targets


def test_from_disk_come_the_fp32_teachers_targets_with_noise_twice() -> None:
    control, stack = fork_of(parent()), fork_of(parent(), targets="disk")
    target, x = targets_and_inputs(stack)
    noise = target - paper(stack, x)
    draws = [0.005 * gaussian_samples(0, stream, STEP, (256, 32)) for stream in ("own_noise", "disk_noise")]
    torch.testing.assert_close(noise, draws[0] + draws[1], rtol=0, atol=1e-6)
    assert noise.std().item() == pytest.approx(2**0.5 * 0.005, rel=0.03)
    quantized = targets_and_inputs(control)[0] - draws[0]
    exact = paper(control, x)
    assert 0.005 < (quantized - exact).norm() / exact.norm() < 0.1  # what the parent learns from


def test_redrawn_it_is_another_teacher_quantised_as_the_parents() -> None:
    control, stack = fork_of(parent()), fork_of(parent(), targets="redrawn")
    for name, weight in control.teacher.mlp.named_parameters():
        other = stack.teacher.mlp.get_parameter(name)
        correlation = torch.corrcoef(torch.stack((weight.flatten(), other.flatten())))[0, 1]
        assert abs(correlation) < 5 / weight.numel() ** 0.5
        assert weight.abs().max().item() == pytest.approx(other.abs().max().item(), rel=0.15)
    for one, other in zip(control.teacher.modules(), stack.teacher.modules(), strict=True):
        assert not isinstance(one, MXLinear) or (one.gemms, one.cast) == (other.gemms, other.cast)


def test_noise_of_its_own_is_as_large_and_other() -> None:
    own, shared = (Stack(parent(own_noise=one, teacher={"kind": "paper"}), CPU) for one in (True, False))
    noises = [target - paper(stack, x) for stack in (own, shared) for target, x in [targets_and_inputs(stack)]]
    assert [noise.std().item() for noise in noises] == pytest.approx([0.005] * 2, rel=0.03)
    assert abs(torch.corrcoef(torch.stack([noise.flatten() for noise in noises]))[0, 1]) < 0.05


# ---------------------------------------------------------------------------------------------------------- optimizer


def first_moves(stack: Stack) -> dict[str, tuple[Tensor, Tensor]]:
    """Return by parameter how a step moved it, and its gradient."""
    named = {name: p for name, p in stack.model.named_parameters() if p.requires_grad}
    before = [p.detach().clone() for p in named.values()]
    x_STD, target_STD = stack.batch()
    gradients = torch.autograd.grad(stack.loss(stack.model(x_STD), target_STD).sum(), list(named.values()))
    stack.train_step()
    moves = [p.detach() - old for p, old in zip(named.values(), before, strict=True)]
    return dict(zip(named, zip(moves, gradients, strict=True), strict=True))


def is_adams_first(move: Tensor, gradient: Tensor) -> bool:
    """Return whether the move is lr g / (|g| + eps)."""
    return torch.allclose(move, -LR * gradient / (gradient.abs() + 1e-8), rtol=1e-3, atol=1e-7)


def test_a_new_optimizer_is_at_its_first_step() -> None:
    assert not any(is_adams_first(*both) for both in first_moves(fork_of(parent())).values())
    assert all(is_adams_first(*both) for both in first_moves(fork_of(parent(), new_optimizer=True)).values())


def test_a_bias_that_is_trained_from_the_fork_on() -> None:
    """As when the public code leaves MX, its optimizer is new, and the others' continues."""
    moves = first_moves(fork_of(parent(), freeze_norm_bias=False))
    for name, both in moves.items():
        assert is_adams_first(*both) == name.endswith("norm.bias"), name
    assert sum(name.endswith("norm.bias") for name in moves) == 2
    assert not any(name.endswith("norm.bias") for name in first_moves(fork_of(parent())))


# ------------------------------------------------------------------------------------------------------------- config


def norm_of(stack: Stack) -> tuple[str, str | None]:
    linear = next(module for module in stack.model.modules() if isinstance(module, NormLinear))
    return linear.norm.output, linear.gain


def test_the_norm_apart_and_with_the_rest() -> None:
    apart = {"norm_ops": "code_skipped", "gain": "fp32"}
    assert norm_of(fork_of(parent(), **apart)) == ("op_by_op_skipped", "fp32")
    assert norm_of(fork_of(parent(), norm_ops="fp32", gain="fp32")) == ("fused", "fp32")
    of_skipped = parent(student={"gain": "fp32", "vector_ops": "code", "norm_ops": "code_skipped"})
    assert norm_of(fork_of(of_skipped)) == ("op_by_op_skipped", "fp32")
    assert norm_of(fork_of(of_skipped, vector_ops="bf16")) == ("rounded", "fp32")
    assert fork_of(of_skipped, norm_ops="fp32").model.ops.residual == torch.float32


def test_a_bumped_fork() -> None:
    stack = fork_of(parent(), scale_rule="code_bump")
    casts = {module.cast.scale_rule for module in stack.model.modules() if isinstance(module, MXLinear)}
    taught = {module.cast.scale_rule for module in stack.teacher.modules() if isinstance(module, MXLinear)}
    assert (casts, taught) == ({"code_bump"}, {"floor"})
    assert first_moves(stack)


def test_what_cannot_be_changed() -> None:
    quiet = parent(label_noise=0.0)
    with pytest.raises(ConfigError, match=r"teacher\.from_disk: stored targets have label noise, and label_noise is 0"):
        changed(quiet, Intervention(targets="disk"))
    with pytest.raises(ConfigError, match="from_disk: stored targets were computed in FP32"):
        parent(teacher={"kind": "code", "quantized": True, "from_disk": True})
    redrawn = parent(teacher={"kind": "code", "redrawn": True})
    with pytest.raises(ConfigError, match="targets: the parent's are redrawn already"):
        changed(redrawn, Intervention(targets="redrawn"))


OWN = {"plan": {"layers.*": "mine"}}
OWN_RECIPE = {"mine": {"forward_x": {"format": "E4M3"}, "forward_w": {"format": "E4M3"}}}


def test_another_plan_leaves_out_the_recipes_that_it_does_not_use() -> None:
    run = parent(precision={"schedule": [OWN], "scale_rule": "floor", "recipes": OWN_RECIPE})
    fork = changed(run, Intervention(plan={"layers.*": "mxfp8"}))
    assert (fork.precision.recipes, fork.precision.scale_rule) == ({}, "floor")
    assert changed(run, Intervention(plan={"layers.*": "mxfp8", "layers.0.*": "mine"})).precision.recipes.keys() == {
        "mine"
    }


def test_an_intervention_that_changes_nothing_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"intervention: changes nothing, because the parent has the same .*scale_rule"
    ):
        changed(parent(), Intervention(gain="bf16", scale_rule="floor"))
    assert changed(parent(), Intervention()) == parent()  # the control
    assert changed(parent(), Intervention(gain="bf16", new_optimizer=True)) == parent()

"""A stack's probes write the right rows at the right steps, and the training does not notice."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from each import each

from mxstudy import config
from mxstudy.reader import ConfigError, plain
from mxstudy.students.probes.sharpness import hessian, largest_eigenvalue
from mxstudy.students.stack import LOSSES, Stack
from mxstudy.students.stack_probes import StackProbes, fp32_twin
from mxstudy.train.runtime import configure_torch

pytestmark = pytest.mark.integration

CPU = torch.device("cpu")
SEEDS = (3, 0, 7)
ALL = config.StudentProbes(
    last_bin=config.LastBin(every_steps=1),
    gradient_bias=config.StudentGradientBias(every_steps=2, coupled=True),
    sharpness=config.Sharpness(every_steps=3, iterations=4),
)
NAMES = {"last_bin", "gradient_bias", "coupled_gradient_bias", "sharpness"}


def settings(**changes: Any) -> config.StudentTeacher:
    values = {
        "study": "student_teacher",
        "seeds": list(SEEDS),
        "model": {"kind": "residual_mlp", "hidden_size": 32, "num_layers": 2},
        "norm": {"kind": "layernorm", "bias": True},
        "precision": {"schedule": [{"from_step": 0, "plan": {"layers.*": "mxfp8"}}]},
        "student": {"gain": "bf16", "vector_ops": "bf16"},
        "optimizer": {"kind": "adam"},
        "schedule": {"kind": "constant", "warmup_fraction": 0.0},
        "train": {"steps": 8, "batch_size": 64, "compile": False, "device": "cpu"},
        "probe": plain(ALL),
    }
    run = config.read_run(values | changes)
    assert isinstance(run, config.StudentTeacher)
    return run


def trained(
    run: config.StudentTeacher, probed: bool = True, steps: int = 8
) -> tuple[list[torch.Tensor], list[dict[str, Any]], StackProbes]:
    configure_torch(run.train.compile)
    stack = Stack(run, CPU)
    twin = Stack(fp32_twin(run), CPU) if run.probe.gradient_bias.coupled else None
    probes = StackProbes(run.probe, stack, twin)
    seen, rows = [], []
    for step in range(steps):
        if probed:
            rows += probes.measure(step)
        for one in (stack, twin):
            if one is not None:
                one.train_step()
        seen += [stack.losses.clone(), stack.grad_norms.clone()]
    return [*seen, *(t.detach() for t in stack.state())], rows, probes


def quietly(run: config.StudentTeacher) -> config.StudentTeacher:
    return replace(run, probe=config.StudentProbes())


@pytest.mark.parametrize("optimizer", [{"kind": "adam"}, {"kind": "sgd", "momentum": 0.9}], ids=lambda o: o["kind"])
def test_the_training_does_not_notice(optimizer: dict[str, Any]) -> None:
    run = settings(optimizer=optimizer)
    generator = torch.random.get_rng_state()
    watched, rows, probes = trained(run)
    assert torch.equal(torch.random.get_rng_state(), generator)
    plain_run, none, _ = trained(quietly(run))
    assert rows
    assert not none
    assert all(torch.equal(a, b) for a, b in zip(watched, plain_run, strict=True))
    assert all(p.grad is None for p in probes.stack.model.parameters())


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_nor_does_compiled_training() -> None:
    run = settings(
        train={"steps": 8, "batch_size": 64, "compile": True, "device": "cpu"},
        model={"kind": "residual_mlp", "hidden_size": 32, "num_layers": 1},
    )
    watched, plain_run = trained(run, steps=4)[0], trained(quietly(run), steps=4)[0]
    assert all(torch.equal(a, b) for a, b in zip(watched, plain_run, strict=True))


def test_rows_come_when_they_are_due_with_a_number_for_each_replica() -> None:
    _, rows, _ = trained(settings())
    every = {"last_bin": 1, "gradient_bias": 2, "coupled_gradient_bias": 2, "sharpness": 3}
    for name, k in every.items():
        assert [row["step"] for row in rows if row["probe"] == name] == list(range(0, 8, k))
    for row in rows:
        assert json.loads(json.dumps(row)) == row
        assert {len(values) for values in row["values"].values()} == {len(SEEDS)}


def test_nothing_is_measured_unless_asked_for() -> None:
    run = quietly(settings())
    stack = Stack(run, CPU)
    stack.draw = stack.model.forward = None  # type: ignore[assignment, method-assign]
    assert StackProbes(run.probe, stack).measure(0) == []


def test_coupled_trajectories_begin_at_the_same_weights_and_part() -> None:
    _, rows, _ = trained(settings(lrs=[0.01]))
    first, last = (
        {row["probe"]: row["values"]["model/ratio"] for row in rows if row["step"] == step and "bias" in row["probe"]}
        for step in (0, 6)
    )
    assert first["gradient_bias"] == first["coupled_gradient_bias"]
    assert all(a < b for a, b in zip(last["gradient_bias"], last["coupled_gradient_bias"], strict=True))


def test_a_run_in_fp32_is_its_own_twin() -> None:
    student = {"gain": "fp32", "vector_ops": "fp32"}
    run = settings(precision={"schedule": [{"from_step": 0, "plan": {"layers.*": "fp32"}}]}, student=student)
    run = replace(run, train=replace(run.train, compute="fp32"))
    assert replace(fp32_twin(run), probe=run.probe) == run
    _, rows, _ = trained(run)
    ratios = [row["values"]["model/ratio"] for row in rows if row["probe"] == "coupled_gradient_bias"]
    assert ratios == [[0.0] * 3] * 4


def test_a_twin_has_the_noise_of_the_runs_without_their_own() -> None:
    """As in an FP32 run of the public code, its noise is not that of the MX run, and nothing comes from disk."""
    run = settings(own_noise=True, teacher={"kind": "code", "quantized": True})
    assert (run.noise_streams, fp32_twin(run).noise_streams) == (("own_noise",), ("noise",))
    skipped = settings(student={"vector_ops": "code", "norm_ops": "code_skipped"}, teacher={"from_disk": True})
    assert skipped.noise_streams == ("noise", "disk_noise")
    assert (fp32_twin(skipped).student.norm_ops, fp32_twin(skipped).noise_streams) == (None, ("noise",))


def test_a_twin_is_needed_where_one_is_asked_for() -> None:
    run = settings()
    with pytest.raises(ConfigError, match=r"coupled: needs a twin"):
        StackProbes(run.probe, Stack(run, CPU))


@pytest.mark.slow
def test_sharpness_with_adam_and_without() -> None:
    """It is preconditioned by what Adam divided the last update by, from the first update on, but not with SGD."""
    run = settings()
    _, rows, _ = trained(run)
    first, later = (row["values"] for row in rows if row["probe"] == "sharpness" and row["step"] in (0, 3))
    assert {name.split("/")[0] for name in first} == {"lr", "zeta", "hessian"}
    assert later.keys() - first.keys() == {f"preconditioned/{q}" for q in ("eigenvalue", "residual", "stability")}
    for operator in ("hessian", "preconditioned"):
        columns = (later[f"{operator}/eigenvalue"], later["lr"], later["zeta"], later[f"{operator}/stability"])
        for value, lr, zeta, left in zip(*columns, strict=True):
            assert left == pytest.approx(abs(1 - lr * value) + lr * zeta * value, rel=1e-12)
    assert later["lr"] == pytest.approx([6e-4] * 3)
    _, rows, _ = trained(settings(optimizer={"kind": "sgd"}))
    assert not any("preconditioned" in name for row in rows for name in row["values"])


def test_adams_diagonal_is_what_divided_the_update() -> None:
    """Adam has no momentum, so its step is lr * g / diagonal."""
    run = settings(optimizer={"kind": "adam", "betas": [0.0, 0.9], "eps": 1e-3})
    stack = Stack(run, CPU)
    probes = StackProbes(quietly(run).probe, stack)
    for step in range(4):
        x_STD, target_STD = stack.batch()
        gradients = torch.autograd.grad(stack.loss(stack.model(x_STD), target_STD).sum(), stack.parameters)
        before = [p.detach().clone() for p in stack.parameters]
        stack.train_step()
        diagonal = probes.adam_diagonal(step + 1)
        assert diagonal is not None
        for p, old, g, d in zip(stack.parameters, before, gradients, diagonal, strict=True):
            torch.testing.assert_close(p.detach(), old - stack.lrs.view(-1, 1, 1) * g / d, rtol=0, atol=1e-7)


def test_measurements_are_at_the_weights_and_on_the_batch_of_their_step() -> None:
    run = settings()
    _, rows, _ = trained(run)
    stack = Stack(run, CPU)
    for _ in range(3):
        stack.train_step()
    product = hessian(stack.model, LOSSES["mse"], *stack.batch())
    cold = largest_eigenvalue(product, stack.model, 200).value
    (row,) = [row for row in rows if row["probe"] == "sharpness" and row["step"] == 3]
    for found, residual, want in zip(
        row["values"]["hessian/eigenvalue"], row["values"]["hessian/residual"], cold.tolist(), strict=True
    ):
        assert found == pytest.approx(want, rel=max(2 * residual, 1e-3))


def test_a_broken_replica_leaves_its_neighbours_bits() -> None:
    def measured(broken: bool) -> list[dict[str, Any]]:
        run = settings()
        stack, twin = Stack(run, CPU), Stack(fp32_twin(run), CPU)
        if broken:
            with torch.no_grad():
                stack.model.layers[1].up.weight[1, 0, 0] = torch.nan
        probes = StackProbes(run.probe, stack, twin)
        stack.train_step()
        twin.train_step()
        return [row for step in (0, 6) for row in probes.measure(step)]

    for sound, broken in zip(measured(False), measured(True), strict=True):
        assert sound["values"].keys() == broken["values"].keys()
        for name, values in sound["values"].items():
            assert [values[0], values[2]] == [broken["values"][name][0], broken["values"][name][2]], name


@each(
    ("probe", "says"),
    [
        ({"last_bin": {"every_steps": -1}}, "probe.last_bin.every_steps: must not be negative"),
        ({"sharpness": {"every_steps": 1, "iterations": 0}}, "probe.sharpness.iterations: must be positive"),
        ({"weights": {"every_steps": 1}}, "probe.weights: no such key"),
    ],
)
def test_what_makes_no_sense_is_refused(probe: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        settings(probe=probe)


def test_blocks_must_divide_what_is_seen_in_them() -> None:
    model = {"kind": "residual_mlp", "hidden_size": 48, "num_layers": 2}
    with pytest.raises(ConfigError, match=r"probe.last_bin: blocks of 32 do not divide model.hidden_size 48"):
        settings(model=model)
    settings(model=model, probe={})


def test_probes_do_not_change_the_fingerprint() -> None:
    run = settings()
    assert config.fingerprint(run, "cpu", {}) == config.fingerprint(quietly(run), "cpu", {})


STOCHASTIC = {"schedule": [{"plan": {"layers.*": "mxfp4"}}], "rounding": "stochastic"}


def test_a_probe_draws_the_random_bits_of_the_coming_step_before_and_after_a_resume() -> None:
    """So its values are the same, and its own gradient is the one that the training takes."""
    run = settings(
        precision=STOCHASTIC, probe=plain(config.StudentProbes(gradient_bias=config.StudentGradientBias(every_steps=2)))
    )
    stack = Stack(run, CPU)
    probes = StackProbes(run.probe, stack, None)
    for _ in range(4):
        stack.train_step()
    resumed = Stack(run, CPU)
    for there, here in zip(resumed.state(), stack.state(), strict=True):
        there.detach().copy_(here.detach())
    assert StackProbes(run.probe, resumed, None).measure(4) == probes.measure(4) != []


def test_the_twin_of_a_run_with_its_own_recipe_has_none() -> None:
    mine = {"mine": {"forward_x": {"format": "E4M3"}}}
    run = settings(precision={"schedule": [{"plan": {"layers.*": "mine"}}], "recipes": mine})
    assert fp32_twin(run).precision.recipes == {}

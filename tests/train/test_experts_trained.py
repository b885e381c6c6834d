"""Training a mixture of experts is the same when it recomputes, compiles, stops and resumes."""

from dataclasses import replace

import pytest
import tiny
import torch

from mxstudy import config
from mxstudy.model.moe import mixtures_of
from mxstudy.reader import ConfigError
from mxstudy.studies.pretrain.check import check
from mxstudy.train.checkpoint import Checkpoints, load_weights, state_tensors
from mxstudy.train.loop import train, train_step, validate
from mxstudy.train.optimizer import materialize_state
from mxstudy.train.signals import Leave

MOE = replace(
    tiny.CONFIG,
    model=replace(tiny.MODEL, mlp="moe", moe=config.MoE(num_experts=6, num_shared=1)),
    probe=config.Probes(routing=config.Routing(every_steps=1)),
    train=replace(tiny.CONFIG.train, steps=5),
)
WITH_LOSS = replace(MOE, model=replace(MOE.model, moe=config.MoE(balance="loss", gate="softmax")))


def biases(run) -> list[torch.Tensor]:
    return [mixture.router.bias.clone() for mixture in mixtures_of(run.model).values()]


def trained(settings=MOE, **changes):
    run, memory = tiny.build(settings, **changes)
    assert train(run, 0, Leave()) == "finished"
    return run, memory


@pytest.fixture(scope="module")
def plain():
    return trained()


@pytest.mark.integration
def test_recomputing_blocks_counts_no_token_twice(plain):
    run, memory = trained(activation_checkpointing="full")
    assert memory.losses == plain[1].losses
    assert all(torch.equal(a, b) for a, b in zip(biases(run), biases(plain[0]), strict=True))


@pytest.mark.integration
def test_biases_have_moved_once_a_step_whatever_is_evaluated(plain):
    run, _ = tiny.build(MOE)
    for step in range(5):
        validate(run)
        train_step(run, step)
    assert all(torch.equal(a, b) for a, b in zip(biases(run), biases(plain[0]), strict=True))
    assert 0 < max(bias.abs().max().item() for bias in biases(run)) <= 5 * 1.001e-3


@pytest.mark.slow
def test_a_compiled_mixture_trains_the_same(traced):
    """The graphs run as they are. The code that Inductor makes of them is tested on a GPU."""
    small = replace(MOE, model=replace(MOE.model, num_layers=1))
    eager, compiled = (trained(small, compile=flag, steps=3)[1].losses for flag in (False, True))
    assert compiled == pytest.approx(eager, abs=1e-4)


@pytest.mark.integration
def test_the_journal_has_the_auxiliary_loss_beside_the_loss():
    """The loss is cross-entropy alone. At step 0 it is that of the same model without an auxiliary loss."""
    without = replace(WITH_LOSS, model=replace(WITH_LOSS.model, moe=config.MoE(balance="none", gate="softmax")))
    (_, with_loss), (_, other) = trained(WITH_LOSS, steps=2), trained(without, steps=2)
    first, others = ([row for row in memory.rows if "loss" in row] for memory in (with_loss, other))
    assert first[0]["loss"] == others[0]["loss"]
    assert first[1]["loss"] != others[1]["loss"]
    assert first[0]["balance_loss"] == pytest.approx(2 * 1e-2, rel=0.05)  # two blocks, near balance
    assert not any("balance_loss" in row for row in others)


@pytest.mark.integration
def test_a_checkpoint_has_the_biases_and_training_goes_on_with_the_same_bits(tmp_path):
    checkpoints = Checkpoints(tmp_path, "f" * 64, {"study": "pretrain"}, keep_last=2)
    run, fresh = tiny.build(MOE)[0], tiny.build(replace(MOE, seed=1))[0]
    for step in range(3):
        train_step(run, step)
    path = checkpoints.save(3, state_tensors(run.model, run.optimizer))
    materialize_state(fresh.optimizer)
    assert checkpoints.load(path, state_tensors(fresh.model, fresh.optimizer)) == 3
    assert all(bias.any() for bias in biases(fresh))
    assert [train_step(fresh, step).loss for step in (3, 4)] == [train_step(run, step).loss for step in (3, 4)]
    assert all(torch.equal(a, b) for a, b in zip(biases(run), biases(fresh), strict=True))
    evaluated = tiny.build(replace(MOE, seed=2))[0]
    load_weights(path, evaluated.model)
    assert all(bias.any() for bias in biases(evaluated))


def test_a_step_that_diverges_moves_no_bias():
    run, _ = tiny.build(MOE)
    with torch.no_grad():
        run.model.output.weight[0, 0] = torch.inf
    assert not train_step(run, 0).is_finite()
    assert not any(bias.any() for bias in biases(run))


@pytest.mark.integration
def test_the_probe_says_what_the_routers_did(plain):
    rows = [row["values"] for row in plain[1].rows if row.get("probe") == "routing"]
    assert len(rows) == 5
    values = {key.removeprefix("layers.1.feed_forward/"): value for key, value in rows[0].items() if "layers.1" in key}
    assert sum(values["loads"]) == pytest.approx(1.0)
    assert values["busiest"] == pytest.approx(max(values["loads"]) * 4 * 64 * 2)
    assert values["idle"] == 0
    assert values["entropy"] == pytest.approx(1.79, abs=0.01)  # log 6: nothing is learnt yet
    assert values["padding"] == pytest.approx(6 * 32 / (4 * 64 * 2 + 6 * 32))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            replace(tiny.CONFIG, probe=config.Probes(routing=config.Routing(every_steps=1))),
            r"probe\.routing\.every_steps: model\.mlp=swiglu has no router; set it to 0",
        ),
        (
            replace(
                MOE,
                precision=replace(tiny.precision((0, "mxfp8")), backend="reference"),
                train=replace(MOE.train, compile=True),
            ),
            r"train\.compile: layers\.0 computes its experts one after the other",
        ),
    ],
    ids=["probe of routers", "compiled loop"],
)
def test_what_a_run_cannot_have_is_refused_before_it_begins(settings, says):
    with pytest.raises(ConfigError, match=says):
        check(settings)

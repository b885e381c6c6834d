"""One process, several, and accumulation do the same, on gloo ranks, with real collectives."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import tiny
import torch
import torch.distributed as dist
from each import each
from gang import together
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from traced import run_graphs_as_they_are

from mxstudy import config
from mxstudy.data.batches import rows_of_rank
from mxstudy.distributed import whole, world_size
from mxstudy.kernels import activation
from mxstudy.model.backends import backends_of
from mxstudy.model.decoder import Decoder
from mxstudy.model.precision import DTYPES
from mxstudy.probes.base import values_of
from mxstudy.probes.build import build_probes
from mxstudy.reader import ConfigError
from mxstudy.train.loop import TrainingRun, set_precision, train, train_step, validate
from mxstudy.train.optimizer import build_optimizer
from mxstudy.train.parallel import mesh_of_ranks, parallelize
from mxstudy.train.runtime import configure_torch
from mxstudy.train.signals import Leave

pytestmark = pytest.mark.integration

CPU = torch.device("cpu")
PROBES = config.Probes(
    norm_output_rms=config.NormOutputRMS(every_steps=1),
    activation_histograms=config.ActivationHistograms(every_steps=1),
    outlier_features=config.OutlierFeatures(every_steps=1, ring_steps=8),
    weights=config.Weights(every_steps=1),
    routing=config.Routing(every_steps=1),
    spikes=config.Spikes(every_steps=1),
)
STOCHASTIC = config.Cast(format="E4M3", rounding="stochastic")
RANDOM = config.Gemms(
    forward_x=config.Cast(format="E4M3"),
    forward_w=STOCHASTIC,
    dgrad_dh=STOCHASTIC,
    dgrad_w=config.Cast(format="E4M3", block_size=16, two_dimensional=True),
    wgrad_dh=STOCHASTIC,
    wgrad_x=STOCHASTIC,
    wgrad_transform=config.Hadamard(size=16, signs="step"),
)
# There are scales along rows, along columns and over a whole weight, norms that fold their gain and others, and numbers
# drawn by a row's place in the whole batch.
ARMS = {
    "fp32": (tiny.MXNORM, "fp32", "fp32"),
    "bf16": (tiny.MXNORM, "bf16", "bf16"),
    "mxfp8 mxnorm": (tiny.MXNORM, "mxfp8", "bf16"),
    "mxfp8 rmsnorm": (tiny.RMSNORM, "mxfp8_e5m2_grad", "bf16"),
    "layernorm with a bias": (config.LayerNorm(bias=True), "mxfp4", "bf16"),
    "one scale a tensor": (tiny.RMSNORM, "fp8_tensor", "bf16"),
    "nvfp4": (config.RMSNorm(fold_gain=True), "nvfp4_forward_only", "bf16"),
    "random": (tiny.RMSNORM, "random", "bf16"),
    "dropout": (tiny.RMSNORM, "random", "bf16"),
    "recomputed": (tiny.RMSNORM, "mxfp8", "bf16"),
    "experts": (tiny.MXNORM, "mxfp8", "bf16"),
    "experts, random, with an auxiliary loss": (tiny.RMSNORM, "random", "bf16"),
}
EXPERTS = {
    "experts": config.MoE(num_experts=5, num_shared=1),  # which two ranks cannot share evenly
    "experts, random, with an auxiliary loss": config.MoE(balance="loss"),
}
# Arms in which more ranks could make a difference: scales over whole weights, random numbers by row, uneven experts.
AT_FOUR_RANKS = ("fp32", "one scale a tensor", "random", "dropout", *EXPERTS)
# The arms whose blocks run fused on a CPU, with a block's passes in a micro-batch: a forward, a backward, and in one
# arm the forward again.
FUSED = dict.fromkeys(ARMS.keys() - {"fp32", "nvfp4", "dropout", *EXPERTS}, 2) | {"recomputed": 3}


def settings(arm: str, **train_changes: Any) -> config.Pretrain:
    norm, row, compute = ARMS[arm]
    size = 16 if row.startswith("nvfp4") else 32
    precision = replace(tiny.precision((0, row)), block_size=size, recipes={row: RANDOM} if row == "random" else {})
    kept = "full" if arm == "recomputed" else "none"
    changed = replace(tiny.CONFIG.train, **{"compute": compute, "activation_checkpointing": kept, **train_changes})
    model = replace(tiny.MODEL, mlp="moe", moe=EXPERTS[arm]) if arm in EXPERTS else tiny.MODEL
    model = replace(model, dropout=0.2) if arm == "dropout" else model
    return replace(tiny.CONFIG, model=model, norm=norm, precision=precision, train=changed, probe=PROBES)


def sharded(settings: config.Pretrain, is_alone: bool = False) -> tuple[TrainingRun, tiny.Memory]:
    """Build a run as a study does.

    `is_alone` shards it over the only rank, where a study would not shard.
    """
    configure_torch(settings.train.compile)
    compute = settings.train.compute
    with torch.device("meta"):
        model = Decoder(settings.model, settings.norm, settings.precision.settings, DTYPES[compute])
    parallelize(model, settings.train, init_device_mesh("cpu", (1,)) if is_alone else mesh_of_ranks(CPU))
    model.to_empty(device=CPU).init_weights(settings.seed)
    set_precision(model, settings, 0, CPU)
    memory, optimizer = tiny.Memory(), build_optimizer(model, settings.optimizer)
    return TrainingRun(settings, model, optimizer, tiny.Copies(), CPU, memory, build_probes(settings.probe)), memory


def of_all(steps: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each arm with the step of each of its ranks."""
    return ((arm, step) for arm, of_ranks in steps.items() for step in of_ranks)


@contextmanager
def group() -> Iterator[None]:
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


# -------------------------------------------------------------------------------------------------- in each rank


def first_step(arms: list[config.Pretrain]) -> list[dict[str, Any]]:
    """Return loss, norm and gradients of step 0, the weights before it, and what the probes saw."""
    with group():
        return [step_of(sharded(arm)) for arm in arms]


def step_of(built: tuple[TrainingRun, tiny.Memory]) -> dict[str, Any]:
    run, _ = built
    before = {name: whole(weight.detach()).clone() for name, weight in run.model.named_parameters()}
    run.model.watchers = tuple(probe.watch for probe in run.probes)
    with fused_passes() as fused:
        view = train_step(run, 0)
    run.model.watchers = ()
    return {
        "backends": backends_of(run.model),
        "fused_passes": fused.call_count,
        "loss": view.loss,
        "grad_norm": view.grad_norm,
        "before": before,
        "gradients": {name: whole(weight.grad).clone() for name, weight in run.model.named_parameters()},
        "after": {name: whole(weight.detach()).clone() for name, weight in run.model.named_parameters()},
        "held": sum(weight.to_local().numel() for weight in run.model.parameters()) if world_size() > 1 else 0,
        "probes": {probe.name: values_of(probe.measure(view)) for probe in run.probes},
        "ring": run.probes[-1].tensors(),
        "validation": validate(run),
        "state": {name: tensor.clone() for name, tensor in run.model.named_buffers()},
        "balance_loss": None if view.routing is None else view.routing.balance_loss,
    }


def fused_passes() -> Any:
    """Count the passes of blocks that run fused, eager or compiled: the CPU code of the MLP calls `both` in each."""
    return patch.object(activation, "both", wraps=activation.both)


def whole_run(arms: list[config.Pretrain]) -> list[list[float]]:
    with group():
        return [losses_of(sharded(arm)) for arm in arms]


def compiled_run(arm: config.Pretrain, fused: bool) -> tuple[list[float], dict[str, str], int]:
    """Return the losses, the backends that the plan chose, and the passes of blocks that ran fused."""
    with group(), fused_passes() as counted:
        run, memory = sharded(arm)
        backends = backends_of(run.model)
        for block in run.model.layers:
            block.set_fused(fused)
        return losses_of((run, memory)), backends, counted.call_count


def traced_run(arm: config.Pretrain) -> tuple[list[float], dict[str, str], int]:
    """Return the same with graphs that run as they are, as with the fixture `traced`; no block runs fused."""
    with pytest.MonkeyPatch.context() as patch:
        run_graphs_as_they_are(patch)
        return compiled_run(arm, fused=False)


def alone(arms: list[config.Pretrain]) -> list[list[float]]:
    with group():
        return [losses_of(sharded(arm, is_alone=True)) for arm in arms]


def losses_of(built: tuple[TrainingRun, tiny.Memory]) -> list[float]:
    assert train(built[0], 0, Leave()) == "finished"
    return built[1].losses


# ------------------------------------------------------------------------------------------------------ the tests


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def steps(ranks: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return step 0 of every arm, by rank."""
    arms = [*ARMS] if ranks == 2 else AT_FOUR_RANKS
    by_rank = together(tmp_path_factory.mktemp("steps"), ranks, first_step, [settings(arm) for arm in arms])
    return dict(zip(arms, zip(*by_rank, strict=True), strict=True))


@pytest.fixture(scope="module")
def accumulated(ranks: int, steps: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the same from this process, in as many micro-batches as there are ranks."""
    return {arm: step_of(sharded(settings(arm, micro_batch_size=4 // ranks))) for arm in steps}


def test_initial_weights_do_not_depend_on_the_ranks(steps, accumulated):
    for arm, step in of_all(steps):
        weights = accumulated[arm]["before"]
        assert all(torch.equal(step["before"][name], weight) for name, weight in weights.items()), arm


def test_ranks_run_the_backends_that_they_say_and_those_of_one_process(ranks, steps, accumulated):
    """FSDP changes the class of a block and puts hooks on it, which must not keep the block from its kernels."""
    for arm, step in of_all(steps):
        one, passes = accumulated[arm], tiny.MODEL.num_layers * FUSED.get(arm, 0)
        assert set(one["backends"].values()) == {"fused" if arm in FUSED else "reference"}, arm
        assert one["fused_passes"] == ranks * passes, arm  # there is a micro-batch for each rank
        assert step["backends"] == one["backends"], arm
        assert step["fused_passes"] == passes, arm


def test_ranks_and_accumulation_have_the_same_loss_and_gradients(steps, accumulated):
    """Micro-batches are the same and casts see whole weights, so only the order of FP32 sums differs."""
    for arm, step in of_all(steps):
        one = accumulated[arm]
        assert step["loss"] == pytest.approx(one["loss"], rel=1e-6), arm
        assert step["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5), arm
        assert step["validation"] == pytest.approx(one["validation"], rel=1e-6), arm
        if one["balance_loss"] is not None:
            assert step["balance_loss"].item() == pytest.approx(one["balance_loss"].item(), rel=1e-6), arm
        for name, gradient in one["gradients"].items():
            told = f"{arm}: {name}"
            torch.testing.assert_close(step["gradients"][name], gradient, rtol=1e-5, atol=1e-7, msg=told)


def test_biases_of_routers_are_the_same_on_all_ranks_and_after_a_validation(steps, accumulated):
    """Biases follow the loads of all tokens of the step, and of these alone.

    Each bias moves by bias_rate or not at all.
    """
    biases = accumulated["experts"]["state"]
    assert len(biases) == 2
    for step in steps["experts"]:
        assert all(torch.equal(step["state"][name], bias) for name, bias in biases.items())
    assert {round(abs(value), 6) for bias in biases.values() for value in bias.tolist()} <= {0.0, 1e-3}
    assert any(bias.any() for bias in biases.values())


def test_one_process_agrees_at_step_1_in_fp32(steps):
    one = step_of(sharded(settings("fp32")))
    for step in steps["fp32"]:
        assert step["loss"] == pytest.approx(one["loss"], rel=1e-6)
        for name, weight in one["after"].items():
            torch.testing.assert_close(step["after"][name], weight, rtol=1e-6, atol=1e-6, msg=name)


@each("arm", ["random", "dropout"])
def test_micro_batches_draw_what_one_batch_does(arm):
    """In FP32, gradients of micro-batches are not rounded before they are summed. Recomputed forwards draw the same."""
    accumulation = [{"micro_batch_size": size, "activation_checkpointing": c} for size, c in ((4, "none"), (2, "full"))]
    one, two = (step_of(sharded(settings(arm, **changes, compute="fp32"))) for changes in accumulation)
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-6)
    for name, gradient in one["gradients"].items():
        torch.testing.assert_close(two["gradients"][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_each_rank_holds_its_part_alone(ranks, steps):
    for arm, of_ranks in steps.items():
        parameters = sum(weight.numel() for weight in of_ranks[0]["before"].values())
        assert sum(step["held"] for step in of_ranks) == parameters, arm
        experts = EXPERTS[arm].num_experts if arm in EXPERTS else ranks  # a rank has whole experts
        uneven = -(-experts // ranks) * ranks / experts
        assert max(step["held"] for step in of_ranks) < 1.1 * uneven * parameters / ranks, arm


def test_probes_see_all_ranks(steps, accumulated):
    for arm, step in of_all(steps):
        for name, expected in accumulated[arm]["probes"].items():
            assert step["probes"][name].keys() == expected.keys(), arm
            for key, value in expected.items():
                told = f"{arm}: {name}/{key}"
                assert step["probes"][name][key] == pytest.approx(value, rel=1e-4, abs=1e-6), told
        for norm, absmax in accumulated[arm]["ring"].items():
            assert torch.equal(step["ring"][norm], absmax), f"{arm}: {norm}"


@pytest.mark.slow
def test_bf16_stays_near_one_process_for_20_steps(tmp_path):
    """Contract: 2e-3 nats."""
    arm = settings("mxfp8 mxnorm")
    first, second = together(tmp_path, 2, whole_run, [arm])
    assert first == second
    (found,), one = first, losses_of(sharded(arm))
    assert len(found) == 20
    assert abs(found[-1] - one[-1]) < 2e-3


def test_a_model_sharded_over_one_rank_has_the_bits_of_one_that_is_not(tmp_path):
    arms = [settings("mxfp8 mxnorm", micro_batch_size=2, steps=6), settings("fp32", steps=6)]
    (found,) = together(tmp_path, 1, alone, arms)
    assert found == [losses_of(sharded(arm)) for arm in arms]


def test_recomputed_mlps_change_no_bit_of_two_ranks(tmp_path):
    """The backward multiplies with the weights that it has gathered anew."""
    asked = [(arm, blocks) for arm in ("mxfp8 mxnorm", "bf16") for blocks in (0, 2)]
    arms = [settings(arm, steps=4, recompute_mlp=blocks) for arm, blocks in asked]
    for mxfp8, mxfp8_again, bf16, bf16_again in together(tmp_path, 2, whole_run, arms):
        assert (mxfp8_again, bf16_again) == (mxfp8, bf16)


def test_a_hook_of_a_sharded_head_gets_logits_or_an_error():
    """FSDP's own hooks want no logits."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        run, _ = sharded(settings("bf16"), is_alone=True)
        (tokens, targets), seen = next(run.micro_batches(0)), []
        run.model(tokens, targets).backward()
        run.model.output.register_forward_hook(lambda head, inputs, logits: seen.append(logits.shape))
        run.model(tokens)
        assert seen == [(4, 64, tiny.MODEL.vocab_size)]
        with pytest.raises(ConfigError, match="a hook of the head would get the loss for logits"):
            run.model(tokens, targets)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("fused", "kept"), [(False, "none"), (True, "none"), (True, "full")])
def test_compiled_blocks_are_sharded_too(fused, kept, tmp_path):
    """Contract: 1e-4 nats from eager ones, here of one process with the same micro-batches, which run fused.

    On CPU compiled blocks run module by module. On a GPU they run fused; here they are set to do so. The learning rate
    is that of test_loop.py; at 1e-3 the loss rises, and one sum rounded otherwise grows to 2e-4 nats in 20 steps.
    """
    arm = settings("mxfp8 mxnorm", compile=True, activation_checkpointing=kept)
    compiled = replace(arm, model=tiny.ONE_BLOCK.model, optimizer=config.AdamW(lr=3e-4))
    eager = replace(compiled, train=replace(compiled.train, compile=False, micro_batch_size=2))
    first, second = together(tmp_path, 2, *((compiled_run, compiled, True) if fused else (traced_run, compiled)))
    losses, backends, passes = first
    assert first == second
    assert backends == {"layers.0": "reference"}
    assert passes == ((3 if kept == "full" else 2) * 20 + 1 if fused else 0)  # the last is a validation
    assert losses == pytest.approx(losses_of(sharded(eager)), abs=1e-4)


@pytest.mark.slow
def test_a_compiled_mixture_is_sharded_too(tmp_path):
    """Its router is FP32 beside weights in bf16."""
    arm = settings("experts", compile=True, steps=4)
    arm = replace(arm, model=replace(arm.model, num_layers=1))
    first, second = together(tmp_path, 2, traced_run, arm)
    eager = replace(arm, train=replace(arm.train, compile=False))
    losses, backends, _ = first
    assert first == second
    assert backends == {"layers.0": "grouped"}
    assert losses == pytest.approx(losses_of(sharded(eager)), abs=2e-3)


# ------------------------------------------------------------------------------------------------- large models


def peak_of_building(settings: config.Pretrain) -> int:
    """Return the most bytes by which the process grows until the model has its weights."""
    with group():
        sharded(replace(settings, model=replace(settings.model, num_layers=1)))  # what a process needs anyway
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sharded(settings)
        return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


@pytest.mark.slow
def test_no_rank_holds_a_model_whole_while_it_is_built(tmp_path):
    model = replace(tiny.MODEL, hidden_size=512, ffn_size=1536, num_layers=24)
    peaks = together(tmp_path, 4, peak_of_building, replace(settings("fp32"), model=model))
    whole_bytes = 4 * 24 * (3 * 512 * 1536 + 3 * 512 * 512)
    assert max(peaks) < whole_bytes / 2


@pytest.mark.parametrize(
    ("changes", "ranks", "says"),
    [
        ({"batch_size": 6}, 4, "train.batch_size: 6 sequences do not divide over 4 ranks"),
        ({"batch_size": 8, "micro_batch_size": 4}, 4, "the 2 sequences of each of 4 ranks do not divide into micro"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused(changes, ranks, says):
    with pytest.raises(ConfigError, match=says):
        rows_of_rank(replace(tiny.CONFIG.train, **changes), 0, ranks)

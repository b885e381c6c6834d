"""Ranks gather weights as MX codes and scales, with the same bits in half the bytes, or refuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from each import each
from gang import together
from test_parallel import PROBES, group, losses_of, sharded, step_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from mxstudy import config
from mxstudy.config.fingerprint import fingerprint
from mxstudy.distributed import is_part
from mxstudy.model import all_gather
from mxstudy.model.all_gather import check_all_gather, gather_in_mx
from mxstudy.model.decoder import Decoder
from mxstudy.numerics.cast import quantize_as
from mxstudy.numerics.gathered_weight import Coding, GatheredWeight
from mxstudy.reader import ConfigError
from mxstudy.studies.pretrain.check import check
from mxstudy.train.loop import TrainingRun, set_precision
from mxstudy.train.parallel import parallelize

RANKS = 2
CPU = torch.device("cpu")
MODEL = replace(tiny.MODEL, ffn_size=128)  # its rows are blocks on two ranks
ARMS = {  # {arm: norm, recipe, backend, changes of precision and of train}
    "gain folded": (tiny.MXNORM, "mxfp8", "auto", {}, {}),
    "gain folded, by the reference": (tiny.MXNORM, "mxfp8", "reference", {}, {}),
    "gain kept, other codes for dgrad": (tiny.RMSNORM, "mx_mix", "auto", {}, {"micro_batch_size": 1}),
    "gain kept, by the reference": (config.RMSNorm(fold_gain=True), "mxfp8_e5m2_grad", "reference", {}, {}),
    "half bytes": (config.LayerNorm(bias=True), "mxfp4", "auto", {"block_size": 16}, {}),
    "in FP32": (tiny.MXNORM, "mxfp8", "reference", {}, {"compute": "fp32"}),
}
SWITCH = tiny.precision((0, "mxfp8"), (2, "mx_mix"))  # other formats from a step on


def settings(arm: str = "gain folded", gather: str = "mx", **train: Any) -> config.Pretrain:
    norm, row, backend, of_precision, of_train = ARMS[arm]
    precision = replace(tiny.precision((0, row)), backend=backend, **of_precision)
    changed = replace(tiny.CONFIG.train, **{"all_gather": gather, **of_train, **train})
    return replace(tiny.CONFIG, model=MODEL, norm=norm, precision=precision, train=changed, probe=PROBES)


# -------------------------------------------------------------------------------------------------- in two processes


def built(arm: config.Pretrain) -> tuple[TrainingRun, tiny.Memory]:
    run, memory = sharded(arm)
    if arm.train.all_gather == "mx":
        check_all_gather(run.model, RANKS)
        gather_in_mx(run.model)
    return run, memory


def steps_and_losses(arms: list[config.Pretrain], runs: list[config.Pretrain]) -> tuple[Any, ...]:
    """Return the steps and losses, and the axes along which weights were coded."""
    encode, axes = Coding.encode, Counter[int]()

    def counted(self: Coding, shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        axes[self.axis] += 1
        return encode(self, shard)

    Coding.encode = counted  # type: ignore[method-assign]
    with group():
        return [step_of(built(arm)) for arm in arms], [losses_of(built(arm)) for arm in runs], axes


@pytest.mark.slow
def test_two_ranks_have_the_same_bits_as_without(tmp_path: Path) -> None:
    """They agree in loss, gradients, weights, probes and validation of a step, and in a run that changes formats."""
    pairs = [settings(arm, gather) for arm in ARMS for gather in ("compute", "mx")]
    runs = [replace(settings(gather=gather, steps=4), precision=SWITCH) for gather in ("compute", "mx")]
    for steps, losses, axes in together(tmp_path, RANKS, steps_and_losses, pairs, runs):
        for arm, without, gathered in zip(ARMS, steps[::2], steps[1::2], strict=True):
            for what in ("loss", "grad_norm", "validation", "probes", "held", "backends", "fused_passes"):
                assert without[what] == gathered[what], (arm, what)
            for what in ("before", "gradients", "after", "ring"):
                assert without[what].keys() == gathered[what].keys()
                assert all(torch.equal(gathered[what][k], v) for k, v in without[what].items()), (arm, what)
        assert losses[0] == losses[1]
        assert len(losses[0]) == 4
        backwards = len(ARMS) + 1 + 4  # one arm has two micro-batches
        assert axes[-2] == backwards * MODEL.num_layers * 4
        assert axes[-1] > axes[-2]  # validations have no backward


# ----------------------------------------------------------------------------------- the first of two ranks, alone


@pytest.fixture
def first() -> Iterator[None]:
    """Make this process rank 0 of two. The other rank does not exist, and nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("first")
def test_a_rank_sends_codes_of_its_rows_for_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank sends 1.03 bytes per parameter.

    The gain, gathered whole before, is in the forward's codes and not in dgrad's.
    """
    arm = settings("gain folded")
    with torch.device("meta"):
        model = Decoder(arm.model, arm.norm, arm.precision.settings, torch.bfloat16)
    parallelize(model, arm.train, init_device_mesh("cpu", (RANKS,)))
    model.to_empty(device=CPU)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data._local_tensor, generator=generator)
    set_precision(model, arm, 0, CPU)
    gather_in_mx(model)
    linear, gain = model.layers[0].attention.wqkv, torch.randn(64, generator=generator).bfloat16()
    monkeypatch.setattr(all_gather, "gather_over_ranks", lambda x: torch.cat([x, x]))
    (gather_gains, *_) = model._forward_pre_hooks.values()
    gather_gains(model, ())
    half = linear.norm.weight._local_tensor.bfloat16()
    gain = torch.cat([half, half])
    shard = linear.weight._local_tensor
    assert (shard.shape, is_part(linear.weight)) == ((64, 64), True)
    rounded, cast = shard.bfloat16().float(), linear.gemms.forward_w
    for backward, source, axis in ((False, rounded * gain.float(), -1), (True, rounded, -2)):
        monkeypatch.setattr(all_gather, "is_gathered_for_backward", lambda _, answer=backward: answer)
        policy = MixedPrecisionPolicy(torch.bfloat16)
        sent, coding = shard.fsdp_pre_all_gather(None, linear.weight.shape, (64, 1), linear, policy)
        want = quantize_as(source, cast, axis)
        assert torch.equal(sent[0], want.codes)
        assert torch.equal(sent[1], want.scales)
        assert sum(part.nbytes for part in sent) == shard.numel() * (1 + 1 / 32)
        whole, freed = shard.fsdp_post_all_gather(
            tuple(map(torch.cat, zip(sent, sent, strict=True))), coding, torch.bfloat16
        )
        assert (type(whole), whole.shape, freed) == (GatheredWeight, linear.weight.shape, ())
        assert torch.equal(whole.decoded(axis, torch.float32)[64:], want.dequantize())


# ------------------------------------------------------------------------------------------------- what is refused

SQUARE = config.Gemms(forward_w=config.Cast(format="E4M3"), dgrad_w=config.Cast(format="E4M3", two_dimensional=True))
RANDOM = config.Gemms(forward_w=config.Cast(format="E4M3", rounding="stochastic"), dgrad_w=config.Cast(format="E4M3"))
UNEVEN = config.Gemms(forward_w=config.Cast(format="E4M3"), dgrad_w=config.Cast(format="E4M3", block_size=16))
TURNED = config.Gemms(
    forward_w=config.Cast(format="E4M3"),
    dgrad_w=config.Cast(format="E4M3"),
    dgrad_transform=config.Hadamard(size=16),
)
AGAIN = config.Gemms(forward_w=config.Cast(format="E4M3"), dgrad_w=config.Cast(format="E4M3", source="forward"))
REFUSED = {  # {case: changes of the config, ranks, and the refusal}
    "bf16": ({"precision": tiny.precision((0, "bf16"))}, 1, "cannot gather layers.0.attention.wqkv: forward_w is not"),
    "some linears are bf16": (
        {"precision": tiny.precision((0, "mxfp8"), pattern="*.wqkv")},
        1,
        "cannot gather layers.0.attention.wo: forward_w is not quantised",
    ),
    "one direction in bf16": ({"precision": tiny.precision((0, "mxfp8_forward_only"))}, 1, "dgrad_w is not quantised"),
    "a scale of the whole tensor": (
        {"precision": tiny.precision((0, "fp8_tensor"))},
        1,
        "do not support forward_w.scale=none, only E8M0",
    ),
    "square blocks": (SQUARE, 1, "gathered shards do not support dgrad_w.two_dimensional=true, only false"),
    "random": (RANDOM, 1, "do not support forward_w.rounding=stochastic, only even or away"),
    "transformed": (TURNED, 1, "gathered shards do not support dgrad_transform;"),
    "cast twice": (AGAIN, 1, "do not support dgrad_w.source=forward, only high_precision"),
    "blocks of two sizes": (UNEVEN, 1, "codes of 8 bits in blocks of 32, and of 8 in blocks of 16"),
    "formats of other widths": (
        {"precision": tiny.precision((0, "mxfp8"), (2, "mxfp4"))},
        1,
        "the row of precision.schedule from step 2 on has another",
    ),
    "experts": ({"model": replace(MODEL, mlp="moe", moe=config.MoE())}, 1, "model.mlp=moe has stacks"),
    "fused rows that are no blocks": (
        {"model": replace(MODEL, num_kv_heads=1)},
        2,
        "cuts the 96 rows of layers.0.attention.wqkv into 48 for each of 2 ranks, and no block of 32 may be cut",
    ),
    "rows that ranks cannot share": ({}, 3, "the 128 rows of layers.0.attention.wqkv into 42.6667 for each of 3 ranks"),
}


@each("name", REFUSED)
def test_what_shards_cannot_serve_is_refused(name: str) -> None:
    changes, ranks, says = REFUSED[name]
    if isinstance(changes, config.Gemms):
        row = replace(tiny.precision((0, "own")), recipes={"own": changes})
        changes = {"precision": row}
    if "precision" not in changes:
        changes = changes | {"precision": tiny.precision((0, "mxfp8"))}
    asked = replace(settings(), norm=tiny.RMSNORM, probe=config.Probes(), **changes)
    asked = replace(asked, model=replace(asked.model, vocab_size=257))
    asked = replace(asked, train=replace(asked.train, batch_size=12))
    check(replace(asked, train=replace(asked.train, all_gather="compute")), ranks)
    with pytest.raises(ConfigError) as error:
        check(asked, ranks)
    message = str(error.value)
    assert message.startswith("train.all_gather: mx ")
    assert says in message
    assert message.endswith("take train.all_gather=compute")
    assert "\n" not in message


@each(("changes", "says"), [({"compile": True}, "compile=false"), ({"activation_checkpointing": "full"}, "recomputed")])
def test_what_no_recipe_can_have_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"^all_gather: .*{says}"):
        replace(tiny.CONFIG.train, all_gather="mx", **changes)


def test_it_is_not_in_the_fingerprint() -> None:
    """So a run can be resumed with it or without it, on any number of ranks."""
    assert fingerprint(settings(), "cpu", {}) == fingerprint(settings(gather="compute"), "cpu", {})

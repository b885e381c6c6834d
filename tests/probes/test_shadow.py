"""The second pass sees what the GEMMs multiply, and leaves no trace, not even after an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from each import each

from mxstudy import config
from mxstudy.config import Gemms
from mxstudy.model.decoder import Decoder
from mxstudy.model.linear import MXLinear
from mxstudy.model.modules import modules_of
from mxstudy.model.norm import Norm
from mxstudy.numerics import gemms as matmul
from mxstudy.probes import shadow
from mxstudy.probes.base import Probe
from mxstudy.probes.gradient_bias import GradientBias
from mxstudy.probes.operand_bias import of_each_operand
from mxstudy.probes.saturation import Saturation, quantized_operands
from mxstudy.probes.shadow import capture_linears, shadow_gradients, whole_blocks
from mxstudy.reader import ConfigError
from mxstudy.train.loop import TrainingRun, train, train_step
from mxstudy.train.signals import Leave

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=ON_GPU)]


def both_probes(every_steps: int) -> list[Probe]:
    return [
        Saturation(config.Saturation(every_steps=every_steps)),
        GradientBias(config.GradientBias(every_steps=every_steps, by_operand=True)),
    ]


def losses(settings: config.Pretrain, probes: list[Probe], device: str = "cpu", **train_changes: Any) -> list[float]:
    run, memory = tiny.build(settings, **train_changes)
    run.model.to(device)
    run.device, run.probes, run.diverged = torch.device(device), probes, run.diverged.to(device)
    assert train(run, 0, Leave()) == "finished"
    return memory.losses


def trained(settings: config.Pretrain = tiny.CONFIG, steps: int = 2, **changes: Any) -> TrainingRun:
    """Return a run after some steps, with the gradients of the last step still there."""
    run, _ = tiny.build(settings, **changes)
    for step in range(steps):
        train_step(run, step)
    return run


def arm(row: str, norm: config.Norm, **precision: Any) -> config.Pretrain:
    return replace(tiny.CONFIG, norm=norm, precision=replace(tiny.precision((0, row)), **precision))


# --------------------------------------------------------------------------------------------- nothing in the training


@pytest.mark.integration
@pytest.mark.parametrize("norm", [tiny.MXNORM, config.LayerNorm(bias=True)])
def test_losses_have_the_same_bits_with_the_probes_on(norm: config.Norm) -> None:
    settings = replace(tiny.CONFIG, norm=norm, precision=tiny.precision((0, "mxfp8"), (4, "mxfp8_e5m2_grad")))
    assert losses(settings, both_probes(2), steps=7) == losses(settings, [], steps=7)


def losses_and_graphs(probes: list[Probe], device: str, checkpointing: str) -> tuple[list[float], int]:
    """Return compiled, deterministic losses, and the number of compiled graphs."""
    from torch._dynamo.utils import counters

    counters.clear()
    changes = {"compile": True, "deterministic": True, "activation_checkpointing": checkpointing}
    try:
        curve = losses(tiny.ONE_BLOCK, probes, device, steps=5, **changes)
    finally:
        torch.use_deterministic_algorithms(False)
    return curve, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("device", "checkpointing"),
    [  # test_build has cpu without checkpointing
        pytest.param("cpu", "full", marks=pytest.mark.slow),
        pytest.param("cuda", "none", marks=ON_GPU),
        pytest.param("cuda", "full", marks=ON_GPU),
    ],
)
def test_compiled_losses_have_the_same_bits_and_no_graph_is_compiled_anew(
    device: str, checkpointing: str, request: pytest.FixtureRequest
) -> None:
    if device == "cpu":
        request.getfixturevalue("traced")
    plain = losses_and_graphs([], device, checkpointing)
    assert plain[1] > 0
    assert losses_and_graphs(both_probes(1), device, checkpointing) == plain


def state_of(model: Decoder) -> list[Any]:
    parts: list[Any] = [model.watchers, model.compute, model.training, torch.get_rng_state().tolist()]
    parts += [torch._dynamo.eval_frame._stance.stance, torch.is_grad_enabled()]
    for linear in modules_of(model, MXLinear).values():
        parts += [id(linear.gemms), linear.gemms, linear.casts_by_kernel, linear.native, len(linear._forward_hooks)]
    for parameter in model.parameters():
        assert parameter.grad is not None
        parts += [parameter.tolist(), id(parameter.grad), parameter.grad.tolist(), parameter._version]
    return parts


def draw(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
    torch.rand(1)


PASSES: dict[str, Callable[[Decoder, Any], Any]] = {
    "capture": lambda model, sequence: capture_linears(model, sequence, 64),
    "gradients": lambda model, sequence: shadow_gradients(model, sequence, Gemms(), torch.float32),
    "operands": lambda model, sequence: of_each_operand(model, sequence, lambda own, true: None),
}


@pytest.mark.parametrize("run_pass", PASSES.values(), ids=list(PASSES))
def test_the_model_is_as_it_was(run_pass: Callable[[Decoder, Any], Any]) -> None:
    run = trained()
    run.model.norm.register_forward_hook(draw)
    run.model.watchers = (lambda *_: pytest.fail("watched"),)
    before = state_of(run.model)
    run_pass(run.model, run.first_sequence(0))
    assert state_of(run.model) == before


@pytest.mark.integration
@pytest.mark.parametrize("run_pass", PASSES.values(), ids=list(PASSES))
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_error_too(
    run_pass: Callable[[Decoder, Any], Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle")

    run = trained()
    if where == "forward":
        run.model.layers[1].feed_forward.w2.register_forward_pre_hook(fail)
    else:
        monkeypatch.setattr(matmul, "wgrad_gemm", fail)
    run.model.norm.register_forward_hook(draw)
    before = state_of(run.model)
    with pytest.raises(RuntimeError, match="in the middle"):
        run_pass(run.model, run.first_sequence(0))
    assert state_of(run.model) == before


# ------------------------------------------------------------------------------------------------- it sees what runs

ARMS = {
    "folded": arm("mxfp8_e5m2_grad", tiny.MXNORM),
    "unfolded": arm("mx_mix", tiny.RMSNORM, scale_rule="floor", rounding="away", operand_pre_round=True),
    "centered": arm("mxfp8", config.LayerNorm(bias=True)),
    "postround": arm("mxfp8_bf16_weight", config.PostRoundMXNorm()),
    "bare": arm("mxfp6_e3m2", config.LayerNorm(affine=False)),
    "tensor scale": arm("fp8_tensor", tiny.RMSNORM),
    "gains in mx": arm("mxfp8_e5m2", config.LayerNorm(bias=True), scale_rule="floor", gain="mx"),
    "op by op": arm("mxfp8", config.LayerNorm(bias=True), vector_ops="bf16", gain="bf16"),
    "row scales": arm("nvfp4_forward_only", tiny.MXNORM, block_size=16),
    "row scales, biased": arm("nvfp4_forward_only", config.LayerNorm(bias=True), block_size=16),
}


def spied(monkeypatch: pytest.MonkeyPatch, model: Decoder, sequence: Any) -> dict[str, matmul.Operand]:
    """Return every operand that a plain forward and backward multiplies: six per linear, the backward's in reverse.

    It runs module by module: a block of two functions hands out no operands, but has the same bits.
    """
    for block in model.layers:
        block.fused = None
    multiplied: list[matmul.Operand] = []
    make = matmul.operand

    def spy(*inputs: Any) -> matmul.Operand:
        multiplied.append(make(*inputs))
        return multiplied[-1]

    monkeypatch.setattr(matmul, "operand", spy)
    loss = shadow.sum_loss(model, sequence) / sequence[0].numel()
    torch.autograd.grad(loss, list(model.parameters()))
    monkeypatch.undo()
    names = list(modules_of(model, MXLinear))
    order = [f"{name}/{o}" for name in names for o in ("forward_x", "forward_w")]
    order += [f"{name}/{o}" for name in reversed(names) for o in ("dgrad_dh", "dgrad_w", "wgrad_dh", "wgrad_x")]
    return dict(zip(order, multiplied, strict=True))


def captured_operands(model: Decoder, sequence: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """Yield operands with their values and the scale that is left to the accumulator."""
    for name, captured in capture_linears(model, sequence, sequence[0].numel()).items():
        for operand, quantized, _ in quantized_operands(captured.sources(), captured.dh_TO):
            scale = quantized.tensor_scale
            own = quantized if scale is None else quantized.without_tensor_scale()
            yield f"{name}/{operand}", own.dequantize(), scale


@pytest.mark.integration
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("settings", ARMS.values(), ids=list(ARMS))
def test_captured_operands_are_those_that_the_gemms_multiply(
    settings: config.Pretrain, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(settings, steps=1)
    model = run.model.to(device)
    with torch.no_grad():  # training has not moved them far from 1 and 0
        for norm in (module for module in model.modules() if isinstance(module, Norm)):
            for parameter in norm.parameters():
                parameter.uniform_(-0.5, 1.5)
    tokens, targets = run.first_sequence(0)
    sequence = tokens.to(device), targets.to(device)
    expected = spied(monkeypatch, model, sequence)
    names = set()
    for name, values, scale in captured_operands(model, sequence):
        assert torch.equal(values.to(expected[name].values.dtype), expected[name].values), name
        assert (scale is None) == (expected[name].scale is None)
        assert scale is None or torch.equal(scale, expected[name].scale), name
        names.add(name)
    gemms = {name: linear.gemms for name, linear in modules_of(model, MXLinear).items()}
    assert names == {key for key in expected if getattr(gemms[key.split("/")[0]], key.split("/")[1]) is not None}
    assert names


def test_checkpointing_changes_nothing_that_is_captured() -> None:
    plain, recomputed = (trained(activation_checkpointing=c) for c in ("none", "full"))
    sequence = plain.first_sequence(0)
    expected = {name: values for name, values, _ in captured_operands(plain.model, sequence)}
    for name, values, _ in captured_operands(recomputed.model, sequence):
        assert torch.equal(values, expected.pop(name))
    assert not expected


def test_the_gradients_are_those_of_a_training_step() -> None:
    run = trained(steps=0, batch_size=1)
    loss, gradients = shadow_gradients(run.model, run.first_sequence(0))
    run.config = replace(run.config, optimizer=replace(run.config.optimizer, max_grad_norm=1e9))
    view = train_step(run, 0)
    assert loss.item() == pytest.approx(view.loss, rel=1e-6)
    for name, parameter in run.model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-6, atol=0)


def test_other_formats_and_another_compute_dtype_are_those_of_a_model_that_has_them() -> None:
    run = trained()
    plain, _ = tiny.build(replace(tiny.CONFIG, precision=tiny.precision((0, "fp32"))), compute="fp32")
    plain.model.load_state_dict(run.model.state_dict())
    loss, gradients = shadow_gradients(run.model, run.first_sequence(0), Gemms(), torch.float32)
    own_loss, own_gradients = shadow_gradients(plain.model, run.first_sequence(0))
    assert loss == own_loss != shadow_gradients(run.model, run.first_sequence(0))[0]
    assert all(torch.equal(gradients[name], own_gradients[name]) for name in gradients)


def test_without_a_quantised_linear_there_is_nothing_to_capture() -> None:
    run = trained(replace(tiny.CONFIG, precision=tiny.precision((0, "bf16"))), steps=0)
    assert capture_linears(run.model, run.first_sequence(0), 1) == {}


# ------------------------------------------------------------------------------------------- blocks along the tokens


def cut(row: str, length: int) -> int:
    model = trained(replace(tiny.CONFIG, precision=tiny.precision((0, row))), steps=0).model
    tokens = torch.arange(length)[None]
    kept, targets = whole_blocks(model, (tokens, tokens + 1))
    assert torch.equal(kept[0], tokens[0, : kept.shape[1]])
    assert torch.equal(targets, kept + 1)
    return kept.shape[1]


@each(
    ("row", "length", "kept"),
    [("mxfp8", 64, 64), ("mxfp8", 63, 32), ("mxfp8_forward_only", 63, 63), ("fp8_tensor", 5, 5), ("bf16", 5, 5)],
)
def test_a_sequence_ends_with_its_last_whole_block(row: str, length: int, kept: int) -> None:
    assert cut(row, length) == kept


def test_a_sequence_shorter_than_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="31 tokens are fewer than the 32 of one block"):
        cut("mxfp8", 31)

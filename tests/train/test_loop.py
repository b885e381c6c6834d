from collections.abc import Callable
from dataclasses import replace

import pytest
import tiny
import torch
from each import slow_but

from mxstudy import config
from mxstudy.config import fingerprint
from mxstudy.model.decoder import Decoder
from mxstudy.train.loop import CORPORA, TrainingRun, not_measured, set_precision, train, train_step
from mxstudy.train.signals import Leave

PROBES = config.Probes(
    norm_output_rms=config.NormOutputRMS(every_steps=2),
    activation_histograms=config.ActivationHistograms(every_steps=3),
    saturation=config.Saturation(every_steps=4),
    gradient_bias=config.GradientBias(every_steps=6),
)
FEW = 8  # steps, in which each probe is due twice


@pytest.mark.integration
@pytest.mark.parametrize("row", slow_but(["mxfp8"], ["bf16", "mxfp8", "mxfp8_e5m2_grad"]))
def test_it_learns(row):
    curve = tiny.losses(replace(tiny.CONFIG, precision=tiny.precision((0, row)), optimizer=config.AdamW(lr=3e-3)))
    assert curve[-1] < curve[0] - 0.3


@pytest.mark.integration
def test_the_same_config_gives_the_same_bits():
    assert tiny.losses(steps=FEW) == tiny.losses(steps=FEW)


@pytest.mark.integration
@pytest.mark.parametrize("norm", [tiny.MXNORM, tiny.RMSNORM])
def test_probes_do_not_touch(norm):
    plain = replace(tiny.CONFIG, norm=norm)
    assert tiny.losses(replace(plain, probe=PROBES), steps=FEW) == tiny.losses(plain, steps=FEW)


@pytest.mark.integration
def test_probes_are_recorded_on_their_steps():
    run, memory = tiny.build(replace(tiny.CONFIG, probe=PROBES), steps=7)
    train(run, 0, Leave())
    seen = [(row["probe"], row["step"]) for row in memory.rows if "probe" in row]
    assert sorted(seen) == sorted(
        [("norm_output_rms", step) for step in (0, 2, 4, 6)]
        + [("activation_histograms", step) for step in (0, 3, 6)]
        + [("saturation", step) for step in (0, 4)]
        + [("gradient_bias", step) for step in (0, 6)]
        + [(CORPORA, 6)]
    )


@pytest.mark.integration
def test_a_measurement_that_fails_after_the_last_step_does_not_lose_the_training():
    run, memory = tiny.build(steps=2)

    def fails() -> dict[str, float]:
        raise OSError("the disk is full")

    run.evaluate = fails
    with pytest.raises(OSError, match="the disk is full"):
        train(run, 0, Leave())
    assert memory.saved == [2]
    lacks = not_measured(memory.rows, step=1)
    assert lacks == {"evaluation", "sample"}
    run.evaluate = lambda: {"boolq": 0.5}
    assert train(run, 2, Leave(), lacks) == "finished"
    assert [row["probe"] for row in memory.rows if "probe" in row] == [CORPORA, "evaluation"]
    assert sum("validation_loss" in row for row in memory.rows) == 1


@pytest.mark.integration
def test_activation_checkpointing_changes_no_bit():
    assert tiny.losses(activation_checkpointing="full", steps=FEW) == tiny.losses(steps=FEW)


@pytest.mark.integration
def test_recomputed_mlps_change_no_bit():
    """Over steps, whose random streams move on, micro-batches and a plan that changes; nor does the fingerprint."""
    settings = replace(
        tiny.CONFIG, precision=replace(tiny.precision((0, "mxfp8"), (4, "bf16"), (6, "mxfp8")), rounding="stochastic")
    )
    kept, again = (tiny.losses(settings, steps=FEW, micro_batch_size=2, recompute_mlp=blocks) for blocks in (0, 2))
    assert again == kept
    one, other = (replace(settings, train=replace(settings.train, recompute_mlp=blocks)) for blocks in (0, 2))
    assert fingerprint(one, "cpu", {}) == fingerprint(other, "cpu", {})


def test_a_later_row_of_the_schedule_recomputes_mlps_too():
    settings = replace(tiny.CONFIG, precision=tiny.precision((0, "mxfp8"), (2, "bf16")))
    run, _ = tiny.build(settings, recompute_mlp=1)
    for step in (0, 2):
        set_precision(run.model, run.config, step, run.device)
        assert [block.fused.recomputes_up for block in run.model.layers] == [True, False]


def test_accumulation_equals_one_batch_in_fp32():
    """Contract: 1e-6 relative at step 1."""
    settings = replace(tiny.CONFIG, precision=tiny.precision((0, "fp32")))
    whole, parts = (tiny.losses(settings, compute="fp32", micro_batch_size=size, steps=2) for size in (4, 1))
    assert parts[0] == pytest.approx(whole[0], rel=1e-6)
    assert parts[1] == pytest.approx(whole[1], rel=1e-6)


@pytest.mark.slow
def test_accumulation_stays_near_one_batch_in_bf16():
    """Contract: 2e-3 nats after 20 steps. Blocks of the token axis do not cross micro-batches of 64 tokens."""
    whole, parts = (tiny.losses(micro_batch_size=size) for size in (4, 1))
    assert parts != whole
    assert abs(parts[-1] - whole[-1]) < 2e-3


def test_arms_start_from_the_same_weights():
    first, second = (tiny.build(replace(tiny.CONFIG, norm=norm))[0].model for norm in (tiny.MXNORM, tiny.RMSNORM))
    weights = dict(second.named_parameters())
    assert set(weights) == {name for name, _ in first.named_parameters()}
    assert all(torch.equal(weight, weights[name]) for name, weight in first.named_parameters())


def test_nothing_non_finite_reaches_the_weights_and_divergence_is_a_result():
    run, memory = tiny.build(tiny.REFERENCE)
    train_step(run, 0)
    before = {name: weight.clone() for name, weight in run.model.named_parameters()}
    run.model.layers[0].attention.wo.register_forward_hook(lambda module, inputs, h: h * float("nan"))
    assert train(run, 1, Leave()) == "diverged"
    assert all(torch.equal(weight, before[name]) for name, weight in run.model.named_parameters())
    assert [row["step"] for row in memory.rows if "loss" in row] == [1]
    assert memory.saved == [1]


@pytest.mark.parametrize("model", [tiny.MODEL, replace(tiny.MODEL, mlp="moe")], ids=["dense", "mixture"])
def test_a_host_that_is_a_step_ahead_records_the_same(model: config.Decoder, monkeypatch: pytest.MonkeyPatch):
    """Losses are the same, with everything else at its step. A step launched after a diverged one leaves nothing."""
    settings = replace(
        tiny.REFERENCE,
        model=model,
        precision=replace(tiny.precision((0, "mxfp8"), (4, "bf16")), backend="reference"),
        validation=config.Validation(sequences=4, every_steps=3),
        checkpoint=config.Checkpoint(every_steps=2),
        probe=config.Probes(
            norm_output_rms=config.NormOutputRMS(every_steps=1),
            routing=config.Routing(every_steps=2),
            weights=config.Weights(every_steps=3),
        ),
    )
    left = []
    for ahead in (0, 1):
        monkeypatch.setattr(TrainingRun, "ahead", ahead)
        run, memory = tiny.build(settings, steps=9)
        calls = 0

        def ill_in_the_seventh_step(module: object, inputs: object, h: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += torch.is_grad_enabled()
            return h * float("nan") if calls == 7 and torch.is_grad_enabled() else h

        run.model.layers[0].attention.wo.register_forward_hook(ill_in_the_seventh_step)
        assert train(run, 0, Leave()) == "diverged"
        assert calls == 7 + ahead
        rows = [{key: value for key, value in row.items() if key != "tokens_per_s"} for row in memory.rows]
        states = [state["step"].item() for state in run.optimizer.state.values()]
        left.append((repr(rows), memory.saved, states, [x.sum().item() for x in run.model.state_dict().values()]))
    assert left[0] == left[1]
    assert left[0][1] == [2, 4, 6, 6]


@pytest.mark.integration
def test_a_precision_schedule_changes_formats_at_its_step():
    run, memory = tiny.build(replace(tiny.CONFIG, precision=tiny.precision((0, "mxfp8"), (5, "bf16"))), steps=FEW)
    train(run, 0, Leave())
    (change,) = [row for row in memory.rows if "precision" in row]
    assert change["step"] == 5
    assert change["precision"]["layers.0.attention.wqkv"] == "bf16"
    mxfp8 = tiny.losses(steps=FEW)
    assert memory.losses[:5] == mxfp8[:5]
    assert memory.losses[5] != mxfp8[5]


def test_a_signal_ends_the_run_after_its_step():
    run, memory = tiny.build()
    leave = Leave()
    leave.signal = object()
    assert train(run, 3, leave) == "preempted"
    assert memory.saved == [4]


@pytest.mark.integration
def test_validation_and_checkpoints_are_due_when_asked():
    settings = replace(
        tiny.CONFIG,
        validation=config.Validation(sequences=4, every_steps=4),
        checkpoint=config.Checkpoint(every_steps=3),
    )
    run, memory = tiny.build(settings, steps=10)
    train(run, 0, Leave())
    assert [row["step"] for row in memory.rows if "validation_loss" in row] == [3, 7, 9]
    assert memory.saved == [3, 6, 9, 10]


def test_gradients_are_clipped_and_the_norm_before_clipping_is_reported():
    settings = replace(tiny.CONFIG, optimizer=config.AdamW(lr=1e-3, max_grad_norm=1e-3))
    run, _ = tiny.build(settings)
    view = train_step(run, 0)
    clipped = torch.stack([weight.grad.norm() for weight in run.model.parameters()]).norm()
    assert clipped == pytest.approx(1e-3, rel=1e-3)
    assert view.grad_norm > 0.1


@pytest.mark.slow
def test_compiled_is_eager_within_the_contract():
    """Contract: the loss within 1e-4 nats after 20 steps. probes/test_build checks that probes do not touch it."""
    settings = replace(tiny.ONE_BLOCK, norm=tiny.MXNORM, optimizer=config.AdamW(lr=3e-4))
    eager, compiled = tiny.losses(settings), tiny.losses(settings, compile=True)
    assert abs(eager[-1] - compiled[-1]) < 1e-4


@pytest.mark.slow
def test_activation_checkpointing_compiles(traced):
    compiled = tiny.losses(tiny.ONE_BLOCK, compile=True)
    recomputed = tiny.losses(tiny.ONE_BLOCK, compile=True, activation_checkpointing="full")
    assert max(abs(a - b) for a, b in zip(compiled, recomputed, strict=True)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_a_recomputed_block_keeps_its_inputs_alone(compiled):
    plain, recomputed = (kept_bytes(compiled, choice) for choice in ("none", "full"))
    assert recomputed < 0.05 * plain


def kept_bytes(compiled: bool, activation_checkpointing: str) -> int:
    """Return the bytes that a fused block keeps for its backward, weights and input aside."""
    changes = {"compile": compiled, "activation_checkpointing": activation_checkpointing}
    model = tiny.build(tiny.ONE_BLOCK, **changes)[0].model
    return kept_bytes_of(model, lambda x: model.layers[0](x, model.rope(64, x.device))[0])


def kept_bytes_of(model: Decoder, forward: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Return the bytes that the forward keeps for its backward, the model's weights and its input aside."""
    kept: dict[int, int] = {}
    x = torch.zeros(4, 64, 64, dtype=torch.bfloat16, requires_grad=True)
    known = {tensor.data_ptr() for tensor in (x, *model.parameters())}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.update({} if storage.data_ptr() in known else {storage.data_ptr(): storage.nbytes()})
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward(x).float().sum().backward()
    return sum(kept.values())


@pytest.mark.slow
def test_the_compiled_final_norm_keeps_no_copy_of_the_tokens_in_fp32():
    eager, compiled = (tiny.build(tiny.ONE_BLOCK, compile=flag)[0].model for flag in (False, True))
    tokens_in_fp32 = 4 * 64 * 64 * 4
    assert kept_bytes_of(eager, eager.norm) >= tokens_in_fp32
    assert kept_bytes_of(compiled, compiled.norm) < tokens_in_fp32 / 4


@pytest.mark.slow
def test_dropout_compiles_and_is_recomputed(traced):
    """The masks of a compiled and recomputed model are those of an eager one, and there are masks."""
    settings = replace(tiny.ONE_BLOCK, model=replace(tiny.ONE_BLOCK.model, dropout=0.2))
    eager, plain = tiny.losses(settings, steps=FEW), tiny.losses(tiny.ONE_BLOCK, steps=FEW)
    compiled = tiny.losses(settings, steps=FEW, compile=True, activation_checkpointing="full")
    assert max(abs(a - b) for a, b in zip(eager, compiled, strict=True)) < 1e-4
    assert abs(eager[0] - plain[0]) > 1e-3

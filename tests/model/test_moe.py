"""A mixture of experts is dense MLPs, each on the tokens that a router sends it; compared with those, bit by bit."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mxstudy import config
from mxstudy.config.casts import Gemms
from mxstudy.model.balance import RoutingOfStep, move_biases
from mxstudy.model.decoder import Decoder
from mxstudy.model.describe_precision import describe
from mxstudy.model.feed_forward import FeedForward
from mxstudy.model.fusable import linears_in
from mxstudy.model.moe import MixtureOfExperts, mixtures_of
from mxstudy.model.precision import DTYPES, apply_precision, check_tokens
from mxstudy.probes.shadow import borrowed, capture_linears
from mxstudy.reader import ConfigError, read

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DENSE = config.Decoder(hidden_size=64, ffn_size=96, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=128)
MOE = replace(DENSE, mlp="moe", moe=config.MoE(num_experts=6, top_k=2, num_shared=1))
ONE = replace(DENSE, mlp="moe", moe=config.MoE(num_experts=1, top_k=1, gate="softmax", balance="none"))
NORMS = {
    "rmsnorm": config.RMSNorm(),
    "mxnorm": config.MXNorm(p=2.0),
    "folded": config.RMSNorm(fold_gain=True),
    "layernorm": config.LayerNorm(bias=True),
}


def plan(row: str, backend: str = "auto", **changed: Any) -> config.Precision:
    return config.Precision(schedule=(config.PrecisionRow(plan={"layers.*": row}),), backend=backend, **changed)


def build(
    model: config.Decoder, norm: str, row: str, device: torch.device = CPU, compiled: bool = False, **changed: Any
) -> Decoder:
    precision, compute = plan(row, **changed), "fp32" if row == "fp32" else "bf16"
    decoder = Decoder(model, NORMS[norm], precision.settings, DTYPES[compute])
    decoder.init_weights(0)
    apply_precision(decoder, precision, 0, compute, device, compiled=compiled)
    for module in decoder.modules():
        if hasattr(module, "fold_gain") and getattr(module, "weight", None) is not None:
            with torch.no_grad():  # gains off 1, or a fold would do nothing
                module.weight += 0.1 * torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(1))
    return decoder


def tokens(rows: int = 2) -> Tensor:
    return torch.randint(0, 128, (rows, 64), generator=torch.Generator().manual_seed(3))


def gradients(model: Decoder) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(tokens())
    logits.float().square().sum().backward()
    return logits, {name: weight.grad.clone() for name, weight in model.named_parameters()}


def group(model: Decoder, is_grouped: bool) -> Decoder:
    for mixture in mixtures_of(model).values():
        mixture.is_grouped = is_grouped
    return model


# -------------------------------------------------------------------------------------------- one expert, and many


@pytest.mark.integration
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("row", ["fp32", "mxfp8", "fp8_tensor"])
def test_one_expert_is_a_dense_mlp(norm, row):
    """The router has no choice and its weight is 1, so outputs and all gradients are those of the dense decoder."""
    dense, mixture = build(DENSE, norm, row, backend="reference"), build(ONE, norm, row)
    theirs = dict(dense.named_parameters())
    with torch.no_grad():
        for name, weight in mixture.named_parameters():
            if name in theirs:
                weight.copy_(theirs[name].expand_as(weight))
    for is_grouped in (False, True) if row != "fp8_tensor" else (False,):
        want, got = gradients(dense), gradients(group(mixture, is_grouped))
        assert torch.equal(got[0], want[0])
        for name, gradient in want[1].items():
            assert torch.equal(got[1][name].view_as(gradient), gradient), name
        assert not any(got[1][name].any() for name in got[1].keys() - theirs.keys())  # the router's


def dense_experts(mixture: MixtureOfExperts, norm: str) -> list[FeedForward]:
    """Each expert as an MLP with a norm of its own."""
    found = []
    for e in range(mixture.moe.num_experts):
        own = FeedForward(DENSE, NORMS[norm], mixture.up.cast, 0.1)
        with torch.no_grad():
            own.up.weight.copy_(mixture.up.weight[e])
            own.w2.weight.copy_(mixture.w2.weight[e])
            own.up.norm.weight.copy_(mixture.up.norm.weight)
        own.up.gemms, own.w2.gemms = mixture.up.gemms, mixture.w2.gemms
        found.append(own)
    return found


@pytest.mark.integration
@pytest.mark.parametrize("norm", ["rmsnorm", "mxnorm"])
@pytest.mark.parametrize("row", ["bf16", "mxfp8", "fp8_tensor"])
def test_a_mixture_is_the_sum_of_its_experts(norm, row):
    """Each on its own tokens, filled up with rows of zeros; scores by the definition, in float64 and token by token."""
    model = replace(MOE, moe=replace(MOE.moe, num_shared=0))
    mixture = next(iter(mixtures_of(build(model, norm, row)).values()))
    x_BTD = torch.randn(1, 80, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    with torch.no_grad():
        mixture.router.bias.copy_(torch.tensor([0.0, 0.3, 0.0, -0.3, 0.0, -9.0]))  # the last has no token
    y_BTD, routed = mixture(x_BTD)
    dy_TD = torch.randn(80, 64, generator=torch.Generator().manual_seed(6))
    y_BTD.backward(dy_TD[None].bfloat16())
    read = mixture.up.normed(x_BTD[0])
    scores_TE = torch.sigmoid(read.unfolded.detach().double() @ mixture.router.weight.detach().double().T)
    ranked = [
        sorted(range(6), key=lambda e, t=t: (-(scores_TE[t, e] + mixture.router.bias[e]).item(), e))[:2]
        for t in range(80)
    ]
    outputs = torch.zeros(80, 2, 64)
    weights = torch.tensor(
        [[scores_TE[t, e] / sum(scores_TE[t, o] for o in own) for e in own] for t, own in enumerate(ranked)]
    )
    found = mixture.router(read.unfolded)
    assert found[0].tolist() == ranked
    torch.testing.assert_close(found[1], weights.float(), rtol=1e-5, atol=1e-6)
    for e, own in enumerate(dense_experts(mixture, norm)):
        places = [(t, chosen.index(e)) for t, chosen in enumerate(ranked) if e in chosen]
        assert routed.loads_E[e] == len(places)
        if not places:
            assert not mixture.up.weight.grad[e].any()
            assert not mixture.w2.weight.grad[e].any()
            continue
        t, j = map(list, zip(*places, strict=True))
        filled = -(-len(t) // mixture.align) * mixture.align
        rows = torch.zeros(filled, 64).bfloat16()
        rows[: len(t)] = x_BTD[0, t]
        out, _ = own(rows)
        outputs[t, j] = out[: len(t)].float()
        dout = torch.zeros(filled, 64)
        dout[: len(t)] = dy_TD[t].bfloat16().float() * found[1][t, j, None]
        out.backward(dout.bfloat16())
        assert torch.equal(mixture.up.weight.grad[e], own.up.weight.grad)
        assert torch.equal(mixture.w2.weight.grad[e], own.w2.weight.grad)
    y_TD = found[1][:, :1] * outputs[:, 0] + found[1][:, 1:] * outputs[:, 1]
    assert torch.equal(y_BTD[0], y_TD.bfloat16())


def test_shared_experts_see_every_token():
    with_shared, without = (build(replace(MOE, moe=replace(MOE.moe, num_shared=n)), "mxnorm", "mxfp8") for n in (2, 0))
    x_BTD = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    one, other = (next(iter(mixtures_of(model).values())) for model in (with_shared, without))
    shared = FeedForward(replace(DENSE, ffn_size=192), NORMS["mxnorm"], one.up.cast, 0.1)
    with torch.no_grad():
        shared.up.weight.copy_(one.shared.w13.weight)
        shared.w2.weight.copy_(one.shared.w2.weight)
        shared.up.norm.weight.copy_(one.up.norm.weight)
    shared.up.gemms, shared.w2.gemms = one.shared.w13.gemms, one.shared.w2.gemms
    dispatched, _ = other(x_BTD)  # rounded once more than below, before the sum
    torch.testing.assert_close(one(x_BTD)[0], dispatched + shared(x_BTD)[0], rtol=0.02, atol=2e-3)


@pytest.mark.integration
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("row", ["fp32", "bf16", "mxfp8", "mxfp4"])
def test_one_grouped_gemm_has_the_bits_of_the_loop(norm, row):
    model = build(MOE, norm, row)
    loop, grouped = (gradients(group(model, is_grouped)) for is_grouped in (False, True))
    assert torch.equal(loop[0], grouped[0])
    assert all(torch.equal(grouped[1][name], gradient) for name, gradient in loop[1].items())


# --------------------------------------------------------------------------------------------------------- router


def test_of_equal_scores_the_first_experts_are_chosen():
    router = next(iter(mixtures_of(build(MOE, "rmsnorm", "fp32")).values())).router
    with torch.no_grad():
        router.weight.zero_()
        router.weight[4] = 1.0
    experts_TK, weights_TK, _ = router(torch.ones(3, 64))
    assert experts_TK.tolist() == [[4, 0]] * 3
    experts_TK, weights_TK, _ = router(torch.zeros(3, 64))
    assert experts_TK.tolist() == [[0, 1]] * 3
    assert weights_TK.tolist() == [[0.5, 0.5]] * 3


def test_a_bias_counts_for_the_choice_alone():
    router = next(iter(mixtures_of(build(MOE, "rmsnorm", "fp32")).values())).router
    y_TD = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    scores_TE = torch.sigmoid(y_TD @ router.weight.T)
    router.bias += torch.tensor([0.0, 0.0, 5.0, 0.0, 4.0, 0.0])
    experts_TK, weights_TK, _ = router(y_TD)
    assert experts_TK.tolist() == [[2, 4]] * 9
    chosen = scores_TE[:, [2, 4]]
    torch.testing.assert_close(weights_TK, chosen / chosen.sum(-1, keepdim=True))


def test_one_expert_a_token_keeps_its_score_so_that_the_router_learns():
    moe = replace(MOE.moe, top_k=1, gate="softmax")
    router = next(iter(mixtures_of(build(replace(MOE, moe=moe), "rmsnorm", "fp32")).values())).router
    y_TD = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    _, weights_TK, probabilities_TE = router(y_TD)
    torch.testing.assert_close(weights_TK[:, 0], probabilities_TE.amax(-1), rtol=1e-6, atol=0)
    assert (weights_TK < 1).all()


def test_the_router_is_fp32_in_a_model_of_bf16():
    """It reads x / rms * gain unrounded: a difference below bf16 counts."""
    mixture = next(iter(mixtures_of(build(MOE, "mxnorm", "mxfp8")).values()))
    read = mixture.up.normed(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16())
    assert read.unfolded.dtype == mixture.router.weight.dtype == torch.float32
    assert not torch.equal(read.unfolded, read.unfolded.bfloat16().float())
    found = mixture.router(read.unfolded)
    assert {found[1].dtype, found[2].dtype} == {torch.float32}


# -------------------------------------------------------------------------------------------------------- balance


def test_biases_move_once_by_the_sign_of_what_is_missing_to_the_mean():
    model = build(replace(MOE, moe=replace(MOE.moe, bias_rate=0.25)), "rmsnorm", "fp32")
    routed = RoutingOfStep(model)
    for row in tokens():
        model(row[None])
        routed.with_loss(torch.zeros(()), 0.5)
    routing = routed.over_ranks()
    move_biases(model, routing)
    assert routing.loads_LE.sum(1).tolist() == [2 * 64 * 2] * 2
    for mixture, loads_E in zip(mixtures_of(model).values(), routing.loads_LE.tolist(), strict=True):
        mean = sum(loads_E) / 6
        expected = [0.25 * ((load < mean) - (load > mean)) for load in loads_E]
        assert mixture.router.bias.tolist() == expected
        assert any(expected)


def test_the_auxiliary_loss_is_that_of_switch():
    moe = replace(MOE.moe, balance="loss", gate="softmax", loss_coefficient=0.5)
    model = build(replace(MOE, moe=moe), "rmsnorm", "fp32")
    x_BTD = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(5))
    mixture = next(iter(mixtures_of(model).values()))
    _, routed = mixture(x_BTD)
    probabilities = (mixture.up.normed(x_BTD[0]).unfolded.double() @ mixture.router.weight.double().T).softmax(-1)
    shares = [load / (64 * 2) for load in routed.loads_E.tolist()]
    expected = 0.5 * 6 * sum(share * probabilities[:, e].mean().item() for e, share in enumerate(shares))
    assert routed.balance_loss.item() == pytest.approx(expected, rel=1e-5)
    entropies = [-sum(p * math.log(p) for p in row) for row in probabilities.tolist()]
    assert routed.entropy.item() == pytest.approx(sum(entropies) / 64, rel=1e-5)
    routed.balance_loss.backward()
    assert mixture.router.weight.grad.any()
    assert mixture.up.weight.grad is None


def test_only_what_the_training_asks_for_is_counted():
    model = build(MOE, "rmsnorm", "fp32")
    model(tokens())
    with torch.no_grad():
        model(tokens())
    routed = RoutingOfStep(model)
    assert routed.with_loss(torch.zeros(()), 1.0) == 0
    assert routed.over_ranks().loads_LE.sum() == 2 * 2 * 64 * 2
    assert model.routings == []  # and not a second time


# -------------------------------------------------------------------------------------------------------- numbers


def test_parameters_are_counted_in_total_and_as_a_token_uses_them():
    model = build(MOE, "rmsnorm", "bf16")
    expert, attention, router = 3 * 64 * 96, 64 * 64 * 2 + 2 * 64 * 32, 6 * 64
    embedding, head, gains = 128 * 64, 128 * 64, 64 * 5
    assert model.num_params() == embedding + head + gains + 2 * (attention + router + 7 * expert)
    assert model.num_active_params() == embedding + head + gains + 2 * (attention + router + 3 * expert)
    assert model.num_matmul_params() == head + 2 * (attention + router + 3 * expert)
    assert model.flops_per_token(64) == 6 * model.num_matmul_params() + 6 * 2 * 64 * 64


def test_parameters_of_another_attention_are_counted_beside_those_of_experts():
    model = build(replace(MOE, head_dim=32, qkv_bias=True), "rmsnorm", "bf16")
    wide, bias = 2 * (64 * 128 + 64 * 64), 128 + 2 * 64  # 4 heads and 2 of keys and values
    rest = 2 * (6 * 64 + 3 * 3 * 64 * 96)
    assert model.num_matmul_params() == 128 * 64 + 2 * wide + rest
    assert model.num_active_params() == model.num_matmul_params() + 128 * 64 + 64 * 5 + 2 * bias
    assert model.flops_per_token(64) == 6 * model.num_matmul_params() + 6 * 2 * 128 * 64


def test_a_loss_over_a_micro_batch_is_said_to_be_one():
    with_loss = build(replace(MOE, moe=config.MoE(balance="loss")), "rmsnorm", "bf16")
    rows = dict.fromkeys((name for name, m in with_loss.named_modules() if hasattr(m, "gemms")), "bf16")
    assert "model.moe.balance=loss: it is over a micro-batch" in describe(with_loss, rows)
    assert "balance" not in describe(build(MOE, "rmsnorm", "bf16"), rows)


def test_a_shadow_pass_computes_experts_by_the_loop_and_puts_the_grouped_gemm_back():
    model, sequence = group(build(MOE, "rmsnorm", "bf16"), True), (tokens(1), tokens(1))
    with borrowed(model, Gemms(), torch.float32):
        assert not any(mixture.is_grouped for mixture in mixtures_of(model).values())
    assert all(mixture.is_grouped for mixture in mixtures_of(model).values())
    captured = capture_linears(group(build(MOE, "mxnorm", "mxfp8"), True), sequence, 64)
    of = captured["layers.0.feed_forward.w13"].sources()
    assert of.x_TI.shape[0] == captured["layers.0.feed_forward.w13"].dh_TO.shape[0] == 2 * 64 + 6 * 32
    assert of.forward_weight.shape == (6, 192, 64)


def test_initial_weights_of_experts_differ_and_have_their_stds():
    model = build(replace(MOE, hidden_size=256, num_layers=1), "rmsnorm", "bf16")
    up = next(iter(mixtures_of(model).values())).up
    gate, other = up.weight.chunk(2, dim=1)
    assert gate.std().item() == pytest.approx(0.02, rel=0.03)
    assert other.std().item() == pytest.approx(0.02 / 2**0.5, rel=0.03)
    assert not torch.equal(up.weight[0], up.weight[1])


# ---------------------------------------------------------------------------------------- what runs, and what not


@pytest.mark.parametrize(
    ("row", "device", "compiled", "backend", "why"),
    [
        ("mxfp8", CPU, False, "reference", "on CPU its experts are computed one after the other"),
        ("mxfp8", CPU, True, "grouped", None),
        ("mxfp8", CUDA, True, "grouped", None),
        ("bf16", CUDA, False, "grouped", None),
        ("fp8_tensor", CUDA, False, "reference", "the grouped GEMM has no scale for its accumulator"),
        ("fp32", CUDA, False, "reference", "the grouped GEMM of its experts is in bf16"),
    ],
)
def test_a_backend_is_chosen_and_says_why(row, device, compiled, backend, why):
    model = build(MOE, "rmsnorm", row, device, compiled)
    for block in model.layers:
        assert block.backend.name == backend
        assert (why or "") in (block.backend.why or "")
        assert block.feed_forward.is_grouped == (backend == "grouped")


@pytest.mark.parametrize(
    ("row", "changed", "compiled", "says"),
    [
        ("mxfp8", {"backend": "fused"}, False, "precision.backend: fused cannot run layers.0: its MLP is a MixtureOfE"),
        ("mxfp8", {"backend": "native"}, False, "precision.backend: native cannot run layers.0: "),
        ("fp8_tensor", {}, True, "train.compile: layers.0 computes its experts one after the other"),
        ("mxfp8", {"backend": "reference"}, True, "train.compile: layers.0 computes its experts one after the other"),
    ],
)
def test_what_cannot_be_computed_is_refused(row, changed, compiled, says):
    with pytest.raises(ConfigError, match=says):
        build(MOE, "rmsnorm", row, CUDA, compiled, **changed)


def test_a_micro_batch_need_not_be_a_multiple_of_the_experts_blocks():
    """An expert's rows are filled up; attention's and the shared experts' are not."""
    experts = {"schedule": [{"plan": {"layers.*.feed_forward.w*": "mxfp8"}}]}
    model = Decoder(MOE, NORMS["rmsnorm"], plan("mxfp8").settings, torch.bfloat16)
    apply_precision(model, read(config.Precision, experts), 0, "bf16", CPU)
    check_tokens(model, "train.micro_batch_size: 80 tokens", 80)
    assert {mixture.align for mixture in mixtures_of(model).values()} == {32}
    apply_precision(model, plan("mxfp8"), 0, "bf16", CPU)
    with pytest.raises(ConfigError, match=r"train\.micro_batch_size: 80 tokens do not divide into blocks of 32"):
        check_tokens(model, "train.micro_batch_size: 80 tokens", 80)


def test_blocks_that_are_filled_up_elsewhere_do_not_lie_in_two_experts():
    model = build(MOE, "rmsnorm", "mxfp8", pad_blocks=True, block_size=64)
    assert {mixture.align for mixture in mixtures_of(model).values()} == {64}


def test_every_linear_of_a_mixture_is_in_the_plan():
    model = build(MOE, "rmsnorm", "mxfp8")
    block = model.layers[0]
    assert len(linears_in(block)) == 6
    assert all(any(linear.gemms.casts()) for linear in linears_in(block))


@pytest.mark.parametrize(
    ("moe", "says"),
    [
        ({"num_experts": 0}, "moe.num_experts: must lie in 1 .. 4,096, not 0"),
        ({"num_experts": 10**12}, "moe.num_experts: must lie in 1 .. 4,096, not 1000000000000"),
        ({"num_experts": 4, "top_k": 5}, r"moe.top_k: must lie in 1 .. num_experts \(4\), not 5"),
        ({"num_shared": -1}, "moe.num_shared: must lie in 0 .. 4,096, not -1"),
        ({"num_shared": 5000}, "moe.num_shared: must lie in 0 .. 4,096, not 5000"),
        ({"balance": "loss", "bias_rate": 0.1}, "moe.bias_rate: only for balance=bias, not for loss"),
        ({"balance": "none", "loss_coefficient": 0.1}, "moe.loss_coefficient: only for balance=loss, not for none"),
        ({"bias_rate": 0.0}, "moe.bias_rate: must be positive"),
    ],
)
def test_what_a_mixture_cannot_be_is_refused(moe, says):
    sizes = {"hidden_size": 64, "ffn_size": 96, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 128}
    with pytest.raises(ConfigError, match=says):
        read(config.Decoder, sizes | {"mlp": "moe", "moe": moe})


def test_experts_of_a_dense_mlp_are_refused():
    with pytest.raises(ConfigError, match="moe: swiglu has no experts; set mlp=moe"):
        replace(DENSE, moe=config.MoE(num_experts=4))


def test_shared_experts_are_refused_what_the_norm_that_they_read_cannot_have():
    """A gain that is folded into the forward's weight would be in its gradient twice."""
    casts = ("forward_x", "forward_w", "dgrad_dh", "dgrad_w", "wgrad_dh", "wgrad_x")
    recipe = {name: {"format": "E4M3"} for name in casts} | {"dgrad_w": {"format": "E4M3", "source": "forward"}}
    rows = {"layers.*": "mxfp8", "layers.*.shared.*": "mine"}
    mine = read(config.Precision, {"schedule": [{"plan": rows}], "recipes": {"mine": recipe}})
    decoder = Decoder(MOE, NORMS["mxnorm"], mine.settings, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"plan for layers\.0\.feed_forward\.shared\.w13: dgrad_w\.source: .* folded"):
        apply_precision(decoder, mine, 0, "bf16", CPU)

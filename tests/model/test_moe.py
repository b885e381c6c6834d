"""A mixture of experts has the bits of dense MLPs, each on the tokens that a router sends it."""

from dataclasses import replace

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from precision_files import of_file
from small_mixtures import (
    CPU,
    CUDA,
    DENSE,
    MOE,
    NORMS,
    ONE,
    OUTER_SCALES,
    build,
    gradients,
    group,
    outer_scaled,
    tokens,
)
from torch._dynamo.backends.common import aot_autograd

from mxstudy import config
from mxstudy.config.casts import Gemms
from mxstudy.model.decoder import Decoder
from mxstudy.model.describe_precision import describe
from mxstudy.model.feed_forward import FeedForward
from mxstudy.model.moe import MixtureOfExperts, mixtures_of
from mxstudy.model.precision import apply_precision
from mxstudy.probes.shadow import borrowed, capture_linears


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
    for is_grouped in (False, True):
        want, got = gradients(dense), gradients(group(mixture, is_grouped))
        assert torch.equal(got[0], want[0])
        for name, gradient in want[1].items():
            assert torch.equal(got[1][name].view_as(gradient), gradient), name
        assert not any(got[1][name].any() for name in got[1].keys() - theirs.keys())  # the router's gradients


def dense_experts(mixture: MixtureOfExperts, norm: str) -> list[FeedForward]:
    """Return each expert as an MLP with a norm of its own."""
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
    """Each expert gets its own tokens, filled up with rows of zeros.

    The reference computes scores by definition, in float64 and token by token.
    """
    model = replace(MOE, moe=replace(MOE.moe, num_shared=0))
    mixture = next(iter(mixtures_of(build(model, norm, row)).values()))
    x_BTD = torch.randn(1, 80, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    with torch.no_grad():
        mixture.router.bias.copy_(torch.tensor([0.0, 0.3, 0.0, -0.3, 0.0, -9.0]))  # the last expert has no token
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
@pytest.mark.parametrize("row", ["fp32", "bf16", "mxfp8", "mxfp4", "fp8_tensor", "nvfp4_forward_only"])
def test_one_grouped_gemm_has_the_bits_of_the_loop(norm, row):
    assert_bits_of_the_loop(build(MOE, norm, row, block_size=16 if row.startswith("nvfp4") else 32))


@pytest.mark.integration
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_four_over_six"])
def test_one_grouped_gemm_has_the_bits_of_the_loop_in_nvfp4(name):
    """Compare whole recipes: square blocks, stochastic rounding, a transform, a scale for each expert."""
    precision = of_file(name)
    model = Decoder(MOE, NORMS["rmsnorm"], precision.settings, torch.bfloat16)
    model.init_weights(0)
    apply_precision(model, precision, 0, "bf16", CPU)
    assert_bits_of_the_loop(model)


@pytest.mark.integration
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", OUTER_SCALES)
def test_one_grouped_gemm_has_the_bits_of_the_loop_under_a_bound_and_scales_of_rows(name, norm):
    precision = outer_scaled(name)
    model = Decoder(MOE, NORMS[norm], precision.settings, torch.bfloat16)
    model.init_weights(0)
    apply_precision(model, precision, 0, "bf16", CUDA, compiled=True)  # as on a GPU, where all is grouped
    assert all(mixture.is_grouped for mixture in mixtures_of(model).values())
    apply_precision(model, precision, 0, "bf16", CPU)
    assert_bits_of_the_loop(model)


def assert_bits_of_the_loop(model):
    loop, grouped = (gradients(group(model, is_grouped)) for is_grouped in (False, True))
    assert torch.equal(loop[0], grouped[0])
    assert all(torch.equal(grouped[1][name], gradient) for name, gradient in loop[1].items())


def test_parameters_are_counted_in_total_and_as_a_token_uses_them():
    model = build(MOE, "rmsnorm", "bf16")
    expert, attention, router = 3 * 64 * 96, 64 * 64 * 2 + 2 * 64 * 32, 6 * 64
    embedding, head, gains = 128 * 64, 128 * 64, 64 * 5
    assert model.num_params() == embedding + head + gains + 2 * (attention + router + 7 * expert)
    assert model.num_matmul_params() == head + 2 * (attention + router + 3 * expert)
    assert model.flops_per_token(64) == 6 * model.num_matmul_params() + 6 * 2 * 64 * 64


def test_parameters_of_another_attention_are_counted_beside_those_of_experts():
    model = build(replace(MOE, head_dim=32, qkv_bias=True), "rmsnorm", "bf16")
    wide, bias = 2 * (64 * 128 + 64 * 64), 128 + 2 * 64  # 4 heads and 2 of keys and values
    rest = 2 * (6 * 64 + 3 * 3 * 64 * 96)
    assert model.num_matmul_params() == 128 * 64 + 2 * wide + rest
    assert model.num_params() == model.num_matmul_params() + model.idle_params + 128 * 64 + 64 * 5 + 2 * bias
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


@pytest.mark.slow
def test_a_compiled_block_casts_its_norm_once_for_the_shared_experts_too():
    """Count the casts of [tokens, features] along the features: as many with shared experts as without."""
    casts = {}
    for shared in (0, 1):
        sizes = replace(MOE, num_layers=1, moe=replace(MOE.moe, num_shared=shared))
        model, graphs = build(sizes, "rmsnorm", "mxfp8", compiled=True), list[torch.fx.GraphModule]()

        def keep(graph: torch.fx.GraphModule, _: object, kept: list[torch.fx.GraphModule] = graphs) -> object:
            kept.append(graph)
            return graph.forward

        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
        model.layers[0].compile(backend=backend, fullgraph=True)
        model(tokens()).sum().backward()
        found = (node.args[0].meta["val"].shape for node in graphs[0].graph.nodes if "amax" in str(node.target))
        casts[shared] = list(found).count((tokens().numel(), MOE.hidden_size // 32, 32))
    assert casts[0] == casts[1] > 0

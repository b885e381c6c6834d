"""The router chooses experts and their weights, and balances their loads."""

import math
from dataclasses import replace

import pytest
import torch
from small_mixtures import MOE, build, tokens

from mxstudy.model.balance import RoutingOfStep, move_biases
from mxstudy.model.moe import mixtures_of
from mxstudy.probes.routing import by_mixture


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
    """It reads x / rms * gain unrounded, so a difference below bf16 counts."""
    mixture = next(iter(mixtures_of(build(MOE, "mxnorm", "mxfp8")).values()))
    read = mixture.up.normed(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16())
    assert read.unfolded.dtype == mixture.router.weight.dtype == torch.float32
    assert not torch.equal(read.unfolded, read.unfolded.bfloat16().float())
    found = mixture.router(read.unfolded)
    assert {found[1].dtype, found[2].dtype} == {torch.float32}


def test_biases_move_once_by_the_sign_of_what_is_missing_to_the_mean():
    model = build(replace(MOE, moe=replace(MOE.moe, bias_rate=0.25)), "rmsnorm", "fp32")
    routed = RoutingOfStep(model)
    for row in tokens():
        model(row[None])
        routed.with_balance_loss(torch.zeros(()), 0.5)
    routing = routed.over_ranks()
    move_biases(model, routing, torch.tensor(True))
    assert not any(
        mixture.router.bias.any() for mixture in mixtures_of(model).values()
    )  # a diverged step moves nothing
    move_biases(model, routing, torch.tensor(False))
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
    assert routed.with_balance_loss(torch.zeros(()), 1.0) == 0
    assert routed.over_ranks().loads_LE.sum() == 2 * 2 * 64 * 2
    assert model.routings == []  # and not a second time


def test_each_mixture_has_the_padding_of_its_own_precision():
    """Where a block is left in bf16, its experts' rows are padded to multiples of 8, in MXFP8 of 32."""
    model = build(MOE, "rmsnorm", "mxfp8", skip_blocks=(1, 0))
    routed = RoutingOfStep(model)
    for row in tokens():
        model(row[None])
        routed.with_balance_loss(torch.zeros(()), 0.5)
    routing = routed.over_ranks()
    padding = [6 * align / (64 * 2 + 6 * align) for align in (8, 32)]
    assert routing.paddings == pytest.approx(padding)
    values = by_mixture(routing.names, routing.loads_LE, routing.entropy_L, routing.paddings)
    assert [value for key, value in values.items() if key.endswith("/padding")] == pytest.approx(padding)

"""Every row of PRECISIONS and every norm trains, and evaluates sequences that no block divides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from each import slow_but
from tiny import CONFIG, MXNORM, RMSNORM, build, precision

from mxstudy import config
from mxstudy.model.precision import evaluated
from mxstudy.train.loop import train
from mxstudy.train.signals import Leave

NORMS = {"rmsnorm": RMSNORM, "mxnorm_p2": MXNORM, "mxnorm_postround": config.PostRoundMXNorm()}
IN_MAKE_TEST = [
    *((row, "rmsnorm") for row in ("mxfp8_backward_only", "fp8_tensor")),
    ("mxfp8", "mxnorm_postround"),
    ("nvfp4_forward_only", "mxnorm_p2"),
]
ROWS = [name for name in config.PRECISIONS if name != "fp32"]


def settings(row: str, norm: config.Norm) -> config.Pretrain:
    block_size = 16 if row.startswith("nvfp4") else 32
    plan = replace(precision((0, row)), block_size=block_size, operand_pre_round=row == "mxfp6_e2m3")
    return replace(CONFIG, norm=norm, precision=plan, optimizer=config.AdamW(lr=3e-3))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("row", "norm"),
    slow_but(IN_MAKE_TEST, [(row, "rmsnorm") for row in ROWS] + IN_MAKE_TEST[-2:]),
)
def test_it_learns_and_evaluates(row: str, norm: str) -> None:
    run, memory = build(settings(row, NORMS[norm]))
    assert train(run, 0, Leave()) == "finished"
    assert memory.losses[-1] < memory.losses[0] - 0.3
    tokens = torch.randint(0, 128, (1, 37), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = run.model(tokens)
        plain = build(settings("bf16", NORMS[norm]))[0].model
        plain.load_state_dict(run.model.state_dict())
        difference = (logits - plain(tokens)).norm() / logits.norm()
    assert logits.shape == (1, 37, 128)
    assert difference < 0.5
    assert (difference == 0) == (row in ("bf16", "mxfp8_backward_only"))


@pytest.mark.slow
@pytest.mark.parametrize("row", ["fp8_tensor", "mxfp8", "mxfp6_e2m3", "mxfp4", "nvfp4_forward_only"])
def test_a_mixture_of_experts_learns_and_evaluates(row: str) -> None:
    given = settings(row, MXNORM)
    run, memory = build(replace(given, model=replace(given.model, mlp="moe", moe=config.MoE(num_shared=1))))
    assert train(run, 0, Leave()) == "finished"
    assert memory.losses[-1] < memory.losses[0] - 0.3
    tokens = torch.randint(0, 128, (1, 37), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), evaluated(run.model):
        assert run.model(tokens).isfinite().all()


@pytest.mark.integration
def test_the_last_token_of_an_evaluation_depends_on_no_later_batch() -> None:
    """NVFP4 has a tensor scale a token, so a sequence has the same logits alone and beside a louder one."""
    run, _ = build(settings("nvfp4_forward_only", MXNORM))
    tokens = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(run.model(tokens)[:1], run.model(tokens[:1]), rtol=1e-2, atol=1e-2)

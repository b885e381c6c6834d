"""The table of optimizers has AdamW as it is configured, and takes another one as a row."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from mxstudy import config
from mxstudy.train.optimizer import OPTIMIZERS, build_optimizer, step_unless


@dataclass(frozen=True)
class Plain:
    lr: float = 0.5


def test_adamw_has_its_settings() -> None:
    asked = config.AdamW(lr=3e-4, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    (group,) = build_optimizer(nn.Linear(2, 2), asked).param_groups
    assert {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")} == {
        "lr": 3e-4,
        "betas": (0.8, 0.9),
        "eps": 1e-6,
        "weight_decay": 0.2,
    }
    assert len(group["params"]) == 2


def test_another_optimizer_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, Plain, lambda parameters, plain: torch.optim.SGD(parameters, lr=plain.lr))
    built = build_optimizer(nn.Linear(2, 2), Plain())  # type: ignore[arg-type]
    assert isinstance(built, torch.optim.SGD)
    assert built.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("fused", [True, False])
def test_no_step_is_done_once_the_run_has_diverged(fused: bool) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.5, fused=fused)
    weight.grad = torch.ones(3)
    step_unless(optimizer, torch.tensor(False))
    (state,) = optimizer.state.values()
    after, moments = weight.detach().clone(), state["exp_avg"].clone()
    assert (after < 1).all()
    weight.grad = torch.full((3,), torch.nan)
    step_unless(optimizer, torch.tensor(True))
    assert torch.equal(weight, after)
    assert torch.equal(state["exp_avg"], moments)
    assert state["step"] == 1

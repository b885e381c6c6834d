"""The table of optimizers: AdamW as it is configured, and another one by a row."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from mxstudy import config
from mxstudy.train.optimizer import OPTIMIZERS, build_optimizer, clip_gradients


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


@pytest.mark.parametrize("scale", [1e-3, 0.5, 1.0, 1.0001, 30.0, float("nan"), float("inf")])
def test_gradients_are_clipped_as_torch_clips_them(scale: float) -> None:
    """Every bit, and what is short enough is not written again."""
    model, other = nn.Linear(3, 5), nn.Linear(3, 5)
    numbers = torch.randn(20, generator=torch.Generator().manual_seed(0))
    for linear in (model, other):
        weight, bias = (numbers / numbers.norm() * scale).split([15, 5])
        linear.weight.grad, linear.bias.grad = weight.view(5, 3).clone(), bias.clone()
    norm, expected = clip_gradients(model, 1.0), nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    assert torch.equal(norm, expected) or (norm.isnan() and expected.isnan())
    for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter.grad.nan_to_num(7), twin.grad.nan_to_num(7))
        assert (parameter.grad._version > 0) == (not expected <= 1 - 1e-6)

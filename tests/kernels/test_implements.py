"""A new ingredient counts: a backend that does not name it says so, and the reference applies it."""

from __future__ import annotations

from dataclasses import make_dataclass

import pytest
import torch
from each import each

from mxstudy.config.casts import BlockCast, Cast, Gemms
from mxstudy.kernels.implements import Implements
from mxstudy.numerics.cast import check_format
from mxstudy.numerics.formats import FORMATS, ROUNDINGS, Rounding, any_random
from mxstudy.numerics.gemms import Linear
from mxstudy.numerics.random_bits import STREAMS, Random
from mxstudy.reader import ConfigError

E2M1 = Cast(format="E2M1")
BACKEND = Implements("kernels", cast={"format": ("E2M1",), "rounding": (None, "even")})


@each(
    ("cast", "reason"),
    [
        (Cast(format="E1M2"), "kernels do not support forward_x.format=E1M2, only E2M1"),
        (Cast(format="E2M1", rounding="down"), "kernels do not support forward_x.rounding=down, only null or even"),
        (Cast(format="E2M1", headroom=0.75), "kernels do not support forward_x.headroom=0.75, only 1.0"),
    ],
)
def test_what_is_not_named_is_a_reason(cast: Cast, reason: str) -> None:
    assert BACKEND.why_not(Gemms(forward_x=E2M1)) is None
    assert BACKEND.why_not(Gemms(forward_x=cast)) == reason


def test_a_field_that_is_added_to_a_recipe_is_a_reason() -> None:
    Own = make_dataclass("Own", [("hadamard", int, 0)], bases=(Gemms,), frozen=True, kw_only=True)
    assert BACKEND.why_not(Own(forward_x=E2M1)) is None
    assert BACKEND.why_not(Own(forward_x=E2M1, hadamard=32)) == "kernels do not support hadamard=32, only 0"


def test_a_rounding_that_is_added_draws_if_its_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROUNDINGS, "noisy", Rounding(lambda x, u: torch.floor(x + u), draws=True))
    monkeypatch.setitem(ROUNDINGS, "down", Rounding(torch.trunc))
    x, places = torch.linspace(-3, 3, 64).view(2, 32), torch.zeros((3, 2), dtype=torch.int64)
    keys = torch.arange(2 * len(STREAMS)).view(-1, 2)
    for rounding, is_drawn in (("noisy", True), ("down", False)):
        gemms = Gemms(forward_x=Cast(format="E2M1", rounding=rounding)).filled(BlockCast())
        assert any_random(gemms) is is_drawn
        values = [
            Linear(gemms, Random(k, places)).operand(x, "forward_x", -1, torch.float32).values for k in (keys, keys + 1)
        ]
        assert torch.equal(*values) is not is_drawn


def test_random_bits_that_nothing_draws_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROUNDINGS, "down", Rounding(torch.trunc))
    cast = Cast(format="E2M1", rounding="down", random_bits=8).filled(BlockCast())
    with pytest.raises(ConfigError, match="random_bits: down rounding draws none"):
        check_format(cast, FORMATS["E2M1"])

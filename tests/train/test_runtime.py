"""What is rounded in an experiment stays rounded when it is compiled."""

from __future__ import annotations

import pytest
import torch

from mxstudy.numerics.cast import BlockCast
from mxstudy.numerics.vector_ops import round_gain
from mxstudy.train.runtime import configure_torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUND_TRIPS = {
    "alone": lambda x: x.to(torch.bfloat16).to(torch.float32),
    "in between": lambda x: (x * 1.0001).to(torch.bfloat16).float() * 3,
    "a gain": lambda x: round_gain(x, "bf16", None, BlockCast()) + 1,
    "before a cast": lambda x: torch.nn.functional.gelu(x.to(torch.bfloat16)).float() * 2,
}


def test_no_pass_removes_conversions() -> None:
    from torch._inductor.fx_passes import joint_graph

    configure_torch(compile=True)
    entries = [entry for entries in joint_graph.patterns.patterns.values() for entry in entries]
    assert entries
    assert joint_graph.pointless_convert not in [getattr(entry, "handler", None) for entry in entries]


@pytest.mark.integration
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_round_trips_stay(name: str) -> None:
    configure_torch(compile=True)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    eager, compiled = ROUND_TRIPS[name](x), torch.compile(ROUND_TRIPS[name])(x)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-6)
    torch._dynamo.reset()

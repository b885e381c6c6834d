"""FSDP2's ignored warning has the words by which it is recognised, and FSDP2 asks for a weight's own all-gather."""

from __future__ import annotations

import inspect
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import _fully_shard, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from mxstudy.compat.torch_fsdp import (
    VIEW_RETURNED,
    allow_views,
    extend_all_gather,
    is_gathered_for_backward,
    stand_in,
)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="checked with torch 2.13")
def test_torch_warns_in_these_words() -> None:
    source = inspect.getsource(_fully_shard._fsdp_state)
    words = re.sub(r'"\s*f?"', "", source)
    assert re.search(VIEW_RETURNED, words), "torch warns otherwise now, or no more: change or delete allow_views"


def test_that_warning_alone_is_ignored() -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        allow_views()
        warnings.warn("FSDP2-wrapped module (Decoder) returned a view tensor.", stacklevel=1)
        warnings.warn("FSDP2-wrapped module (Decoder) is slow.", stacklevel=1)
    assert [str(one.message) for one in heard] == ["FSDP2-wrapped module (Decoder) is slow."]


class Told:
    """A weight that is gathered as it is, and keeps the questions that it was asked."""

    def __init__(self, block: nn.Module) -> None:
        self.block, self.asked = block, []

    def send(self, mesh, size, stride, module, policy):
        self.asked.append(("backward" if is_gathered_for_backward(self.block) else "forward", tuple(size)))
        return (self.block.weight._local_tensor,), "needed"

    def receive(self, gathered, needed, dtype, *, out=None):
        assert ([tuple(part.shape) for part in gathered], needed) == ([(4, 2)], "needed")
        self.asked.append("again" if out is not None else "first")
        return None if out is not None else (gathered[0], ())


def test_a_weight_is_gathered_as_its_shard_says_and_knows_for_which_direction() -> None:
    """A weight is gathered as its shard says, and knows for which direction.

    Memory comes after the sharding, and an optimizer's step changes nothing. The other rank does not exist.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 2, bias=False))
        mesh = init_device_mesh("cpu", (2,))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh).to_empty(device="cpu")
        told = Told(model[0])
        extend_all_gather(model[0].weight, told)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.zeros(1, 2, requires_grad=True)).sum().backward()
            optimizer.step()
        forward, backward = ("forward", (4, 2)), ("backward", (4, 2))
        assert told.asked == [forward, "first", backward, "again", forward, "again", backward, "again"]
    finally:
        dist.destroy_process_group()


class Hollow(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return cls


def test_a_tensor_without_memory_stands_for_a_weight() -> None:
    hollow = stand_in(Hollow, (3, 5), torch.bfloat16, torch.device("cpu"))
    assert (type(hollow), hollow.shape, hollow.dtype) == (Hollow, (3, 5), torch.bfloat16)

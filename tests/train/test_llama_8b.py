"""A model that is too large for one process is cut before it has memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.training import model_of
from mxstudy.model.decoder import Decoder
from mxstudy.train.parallel import parallelize

pytestmark = pytest.mark.integration

LLAMA_3_8B = 8_030_261_248  # parameters, as published
RANKS = 8


def test_llama_8b_is_cut_before_it_has_memory() -> None:
    """The other ranks of the group do not exist, and the weights are on the meta device."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        with torch.device("meta"):
            model = Decoder(model_of("llama_8b"), tiny.MXNORM, tiny.precision((0, "mxfp8")).settings, torch.bfloat16)
        parallelize(model, replace(tiny.CONFIG.train, compute="bf16"), init_device_mesh("cpu", (RANKS,)))
        assert model.num_params() == LLAMA_3_8B
        part = sum(weight.to_local().numel() for weight in model.parameters())
        assert part == pytest.approx(LLAMA_3_8B / RANKS, rel=1e-6)
    finally:
        dist.destroy_process_group()

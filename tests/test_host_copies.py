"""Tensors go to the GPU from pinned memory, so that the host does not wait for the kernels that it launched before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.training import RandomTokens, model_of
from mxstudy import config
from mxstudy.host_copies import to_device

TEXT = torch.arange(8 * 65537).reshape(8, 65537)
TOKENS = {"all": TEXT, "rows": TEXT[2:4], "a view": TEXT[:, :-1], "a column": TEXT[:, 3], "a number": TEXT[2, 5]}


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
def test_a_copy_to_the_gpu_is_from_pinned_memory(tokens: Tensor) -> None:
    device = torch.device("cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        copied = to_device(tokens, device)
        torch.cuda.synchronize()
    assert torch.equal(copied.cpu(), tokens)
    on_gpu = [one.name for one in profiled.events() or [] if one.device_type == DeviceType.CUDA]
    assert on_gpu == ["Memcpy HtoD (Pinned -> Device)"]


def test_a_benchmarks_tokens_are_contiguous_in_every_micro_batch() -> None:
    batches = RandomTokens(model_of("llama_23m"), config.Train(steps=1, batch_size=6, sequence_length=32))
    tokens, targets = batches.train(0, 2, 4)
    assert tokens.shape == targets.shape == (2, 32)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert tokens.is_contiguous()
    assert targets.is_contiguous()

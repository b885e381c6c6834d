"""FSDP2: the warning that mxstudy.compat.torch_fsdp ignores has the words that it is recognised by."""

from __future__ import annotations

import inspect
import re
import warnings

import pytest
import torch
from torch.distributed.fsdp import _fully_shard

from mxstudy.compat.torch_fsdp import VIEW_RETURNED, allow_views


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

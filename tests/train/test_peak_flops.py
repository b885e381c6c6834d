"""The MFU is over the data sheet of the very GPU, and is not recorded for a GPU or a part of one that has none."""

from __future__ import annotations

import pytest
import torch

from mxstudy.train.runtime import peak_flops


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA L40S", None),
    ],
)
def test_each_form_of_a_gpu_has_its_own_rate(name: str, flops: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == flops
    assert peak_flops(torch.device("cpu")) is None

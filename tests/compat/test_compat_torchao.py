"""torchao's MX tensor takes the arguments that mxstudy.compat.torchao gives it, and decodes to what they mean."""

from __future__ import annotations

import inspect

import pytest
import torch

from mxstudy.compat.torchao import mx_matrix

pytest.importorskip("torchao")


def test_the_class_takes_these_arguments_in_this_order() -> None:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    assert list(inspect.signature(MXTensor.__new__).parameters) == [
        *("cls", "qdata", "scale", "elem_dtype", "block_size", "orig_dtype"),
        *("kernel_preference", "act_quant_kwargs", "is_swizzled_scales"),
    ]


def test_a_matrix_decodes_to_its_codes_times_its_scales() -> None:
    codes = torch.arange(-32.0, 32.0).view(2, 32).to(torch.float8_e4m3fn)
    scales = torch.tensor([[128], [126]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    decoded = mx_matrix(codes, scales, 32, torch.float32, "EMULATED").dequantize(torch.float32)
    assert torch.equal(decoded, codes.float() * torch.tensor([[2.0], [0.5]]))

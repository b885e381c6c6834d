"""Decode codes and scales to bf16, as a GPU without MX GEMMs must before it multiplies, hidden from the compiler."""

from __future__ import annotations

import torch
from torch import Tensor, library

from mxstudy.numerics.formats import FORMATS
from mxstudy.numerics.quantized import Quantized

TILE = 4096


@library.custom_op("mxstudy_benchmarks::decode", mutates_args=())
def decode(codes: Tensor, scales: Tensor, fmt: str) -> Tensor:
    """Return bf16 [rows, columns] from uint8 codes [rows, bytes] and scales [rows, blocks], without a tensor scale."""
    block_size = codes.shape[-1] * 8 // FORMATS[fmt].bits // scales.shape[-1]
    is_nvfp4 = FORMATS[fmt].scale == "E4M3"
    scales, one = (scales.view(torch.float8_e4m3fn), torch.ones(())) if is_nvfp4 else (scales, None)
    return Quantized.from_codes(codes, scales, fmt, -1, block_size, one).dequantize(torch.bfloat16)


@decode.register_fake
def empty(codes: Tensor, scales: Tensor, fmt: str) -> Tensor:
    return codes.new_empty((codes.shape[0], codes.shape[1] * 8 // FORMATS[fmt].bits), dtype=torch.bfloat16)


@decode.register_kernel("cuda")
def run(codes: Tensor, scales: Tensor, fmt: str) -> Tensor:
    from benchmarks.decode_kernel import decode_kernel

    decoded = empty(codes, scales, fmt)
    options = {
        "BLOCK": decoded.numel() // scales.numel(),
        "IS_E4M3": fmt == "E4M3",
        "E4M3_SCALES": FORMATS[fmt].scale == "E4M3",
        "TILE": TILE,
    }
    decode_kernel[(-(-decoded.numel() // TILE),)](
        codes.contiguous(), scales.contiguous(), decoded, decoded.numel(), **options
    )
    return decoded

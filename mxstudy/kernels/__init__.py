"""Fused kernels: casts, alone or with the step that comes before, and the steps between casts.

A tensor that two GEMMs read is quantised twice, along its rows for one and along its columns for the other. The
operators that cast read their inputs once and write one operand or both, decoded to bf16, with the bits of
`block_cast(...).dequantize(torch.bfloat16)`. On a GPU an operator is a Triton kernel (`device/`), elsewhere the
numerics that the rest of the package uses. Those in compiled blocks are opaque custom operators to torch: there are no
graph breaks, and no compiler removes a rounding.
"""

from mxstudy.kernels.activation import activation_backward_cast_both, activation_cast_both
from mxstudy.kernels.adam import adam_
from mxstudy.kernels.cast_any import absmax_any, cast_any
from mxstudy.kernels.cast_any_both import cast_any_both
from mxstudy.kernels.cast_blocks import cast_blocks
from mxstudy.kernels.cast_both import cast_both
from mxstudy.kernels.cast_one import cast_one
from mxstudy.kernels.cross_entropy import cross_entropy_
from mxstudy.kernels.heads import heads_cast_both, rotate_heads_
from mxstudy.kernels.matmul_blocks import matmul_blocks
from mxstudy.kernels.matmul_fp32 import linear_fp32
from mxstudy.kernels.norm_backward import norm_backward_add
from mxstudy.kernels.norm_cast import NormCast, RowNorm, norm_cast_both
from mxstudy.kernels.norm_codes import NormCodes, norm_codes
from mxstudy.kernels.products import linear_gradients, product, scaled_product
from mxstudy.kernels.scaled_grouped_mm import scaled_grouped_mm

__all__ = [
    "NormCast",
    "NormCodes",
    "RowNorm",
    "absmax_any",
    "activation_backward_cast_both",
    "activation_cast_both",
    "adam_",
    "cast_any",
    "cast_any_both",
    "cast_blocks",
    "cast_both",
    "cast_one",
    "cross_entropy_",
    "heads_cast_both",
    "linear_fp32",
    "linear_gradients",
    "matmul_blocks",
    "norm_backward_add",
    "norm_cast_both",
    "norm_codes",
    "product",
    "rotate_heads_",
    "scaled_grouped_mm",
    "scaled_product",
]

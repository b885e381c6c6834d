"""The hardware's MX GEMM, through torchao's MXTensor: compute capability 10.0 (SM100, Blackwell) and later.

The cast is ours, so operands have the same bits as in emulation; only the GEMM differs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxstudy.compat.torchao import mx_matrix
from mxstudy.config.casts import Gemms
from mxstudy.kernels.implements import Implements
from mxstudy.numerics.quantized import CODE_DTYPES, Quantized
from mxstudy.reader import require

CAPABILITY = (10, 0)
KERNELS = "AUTO"  # or EMULATED, see `mx_matrix`
PAIRS = (("E4M3", "E4M3"), ("E2M1", "E2M1"))  # formats of the two operands that torchao's GEMM takes
IMPLEMENTS = Implements(
    "native GEMMs",
    cast={
        "format": ("E4M3", "E2M1"),
        "block_size": (32,),
        "scale_rule": ("floor", "ceil", "rceil", "even"),
        "rounding": ("even", "away", "stochastic"),
        "random_bits": (8, 24),
        "pre_round": (False, True),
        "two_dimensional": (False, True),
        "statistic": ("absmax", "std"),
        "source": ("high_precision", "forward"),
        "mask_clipped": (False, True),
        "pad": (False,),
    },
    transforms={  # the reference rotates and rounds before it hands over the operand
        "size": (16, 32, 64, 128, 256),
        "signs": ("none", "seed", "step", "call"),
        "signs_after": (False, True),
    },
)


def mx_tensor(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    """Return a quantised matrix as torchao's MXTensor, whose @ is the MX GEMM. `dtype`: what it decodes to.

    Blocks along the rows are stored transposed: torchao wants them along the last axis. Raises ConfigError for a stack.
    """
    require(quantized.values.ndim == 2, "backend: torchao's MX GEMM multiplies matrices, not stacks; take reference")
    is_rowwise = quantized.axis == 1
    codes, scales = (t if is_rowwise else t.t() for t in (quantized.codes, quantized.scales))
    codes, scales = codes.contiguous(), scales.contiguous().view(torch.float8_e8m0fnu)
    codes = codes if quantized.format.bits == 4 else codes.view(CODE_DTYPES[quantized.format.name])
    tensor = mx_matrix(codes, scales, quantized.block_size, dtype, KERNELS)
    return tensor if is_rowwise else tensor.t()


def why_not_native(gemms: Gemms, compute: torch.dtype, device: torch.device) -> str | None:
    """Return what keeps those GEMMs from the hardware's MX GEMM on that device, or None if nothing does."""
    if device.type != "cuda":
        return f"it needs CUDA with compute capability 10.0 (SM100) or later, and the device is {device.type}"
    if torch.cuda.is_available():  # else the job is planned here and runs elsewhere, where this is checked again
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < CAPABILITY:
            name = torch.cuda.get_device_name(device)
            return f"it needs compute capability 10.0 (SM100) or later, and {name} has {major}.{minor}"
    return why_not_torchao(gemms, compute)


def why_not_torchao(gemms: Gemms, compute: torch.dtype) -> str | None:
    """Return what torchao's MX GEMM does not compute on any device, or None if it computes all of it."""
    if any(cast.scale == "none" for _, cast in gemms.casts()):
        return "it multiplies operands with block scales, not with one a tensor"
    for gemm in (gemms.forward, gemms.dgrad, gemms.wgrad):
        a, b = (cast.format if cast else None for cast in (gemm.left, gemm.right))
        if (a, b) not in (*PAIRS, (None, None)):
            return f"it multiplies E4M3 x E4M3 and E2M1 x E2M1, not {a or '-'} x {b or '-'}"
    if reason := IMPLEMENTS.why_not(gemms):
        return reason
    if compute != torch.bfloat16:
        return f"it returns bf16, and the compute dtype is {compute}"
    return None

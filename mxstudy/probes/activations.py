"""Probes of the norms' activations: the RMS of their outputs, and signed histograms of inputs and outputs.

Outputs are recomputed from the norm's input, which is kept for the backward anyway, so the model's graph is the same
with and without probes, eager or compiled. An output is measured before its gain; if the gain is folded, it is the
GEMM's operand, quantised as the plan says. On a GPU this is a kernel that reads the input once, or, for a norm or a
cast that it does not compute, the same in PyTorch, compiled.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
import torch
from torch import Tensor, nn

from mxstudy import config
from mxstudy.blocks.plans import PLAIN, settings_of
from mxstudy.config.casts import BlockCast
from mxstudy.distributed import mean_over_ranks, sum_over_ranks
from mxstudy.host_copies import to_host
from mxstudy.kernels import RowNorm
from mxstudy.kernels.norm_outputs import Bins, norm_bins, norm_mean_squares
from mxstudy.kernels.operators import BLOCK_SIZES
from mxstudy.model.linear import NormLinear
from mxstudy.model.moe import ExpertNormLinear
from mxstudy.model.norm import Norm, Output, kernel_norm, why_no_kernel_norm
from mxstudy.numerics.grid import MAGNITUDE_MASK, MANTISSA_BITS, MANTISSA_MASK
from mxstudy.numerics.norm_linear import center, row_mean
from mxstudy.probes.base import Later, ScheduledProbe, StepView, Values
from mxstudy.probes.compiled import on_gpu_compiled
from mxstudy.probes.histogram_bins import BINS_PER_OCTAVE, FINITE_EDGES, SMALLEST_EXPONENT

EXPONENT_BIAS = 127  # of float32
# Mantissas where an octave's bins begin, except the first bin, which begins with the octave.
BIN_MANTISSAS = [
    int(np.float32(2 ** (k / BINS_PER_OCTAVE)).view(np.int32)) & MANTISSA_MASK for k in range(1, BINS_PER_OCTAVE)
]
BINS = Bins(SMALLEST_EXPONENT, BINS_PER_OCTAVE, FINITE_EDGES, tuple(BIN_MANTISSAS))


def bins_of(x: Tensor) -> Tensor:
    """Return the bin of every element, int32 of x's shape, by bit arithmetic on float32; NaN is in an outermost bin.

    A bin contains its lower edge but not its upper one; so on the negative side, its magnitudes begin one bit above the
    inner edge.
    """
    bits = x.float().view(torch.int32)
    is_negative = bits < 0
    magnitude = (bits & MAGNITUDE_MASK) - is_negative.int()
    octave = (magnitude >> MANTISSA_BITS) - EXPONENT_BIAS - SMALLEST_EXPONENT
    within = sum((magnitude & MANTISSA_MASK >= start).int() for start in BIN_MANTISSAS)
    from_middle = (BINS_PER_OCTAVE * octave + within + 1).clamp(0, FINITE_EDGES)
    return FINITE_EDGES + torch.where(is_negative, -from_middle, from_middle)


def count_bins(x: Tensor) -> Tensor:
    """Return the number of elements in each bin: int64 [bins]; counted per feature to avoid contention of atomics."""
    bins_TD = bins_of(x.flatten(0, -2)).long()
    counts = torch.zeros(2 * FINITE_EDGES + 1, x.shape[-1], dtype=torch.int32, device=x.device)
    return counts.scatter_add_(0, bins_TD, torch.ones_like(bins_TD, dtype=torch.int32)).sum(1)


def norm_of(module: nn.Module) -> Norm:
    norm = module.norm if isinstance(module, NormLinear) else module
    assert isinstance(norm, Norm)
    return norm


def norm_output(module: nn.Module, x: Tensor) -> Tensor:
    """Return the norm's output before its gain, float32; as the forward's GEMM reads it if the gain is folded."""
    if not isinstance(module, NormLinear):
        return norm_of(module).normalize(x)
    output = module.normalize(x)
    return module.read(output) if module.norm.fold_gain else output


def exact_mean_square(norm: Norm, x: Tensor) -> Tensor:
    """Return the mean square of the norm's output before its gain if it divided by the exact RMS, sqrt(s + eps).

    In each row this is s / (s + eps), where s is the mean square of the (centred) input; float32, 0-dim.
    """
    centered = center(x, row_mean(x) if norm.centers else None)
    square = centered.float().square().mean(-1)
    return (square / (square + norm.eps)).mean()


def mean_squares(module: nn.Module, x: Tensor) -> Tensor:
    """Return the mean squares of the norm's output and of the exact norm's output: float32 [2]."""
    return torch.stack([norm_output(module, x).square().mean(-1).mean(), exact_mean_square(norm_of(module), x)])


def input_and_output_counts(module: nn.Module, x: Tensor) -> Tensor:
    """Return the histograms of the norm's input and output: int64 [2, bins]."""
    return torch.stack((count_bins(x), count_bins(norm_output(module, x))))


KernelNorm = tuple[RowNorm, str | None, BlockCast]
KERNEL_LINEARS, READS = (NormLinear, ExpertNormLinear), {"normalize", "rms", "read"}


def kernel_norm_of(module: nn.Module) -> KernelNorm | None:
    """Return the norm, format and cast of the module's output as kernels take them, or None if they do not compute it.

    The output of a norm that does not fold its gain is not cast. A linear of another class, or with own methods, may
    read its norm in another way.
    """
    norm, fmt, settings = norm_of(module), None, BlockCast()
    if isinstance(module, NormLinear) and (type(module) not in KERNEL_LINEARS or READS & vars(module).keys()):
        return None
    if isinstance(module, NormLinear) and norm.fold_gain and module.gemms.forward_x is not None:
        cast = module.gemms.forward_x
        if module.gemms.forward_transform is not None or any(PLAIN.lacked_in(cast)):
            return None
        fmt, settings = cast.format, settings_of(cast)
    elif norm.estimates:
        if isinstance(module, NormLinear) and module.gemms.forward_transform is not None:
            return None  # its RMS is that of the rotated input
        settings = BlockCast(getattr(norm, "block_size", settings.block_size))
    has_kernel = settings.block_size in BLOCK_SIZES and not why_no_kernel_norm(
        norm, settings.block_size, get_args(Output)
    )
    return (kernel_norm(norm), fmt, settings) if has_kernel else None


def mean_squares_of(module: nn.Module, x: Tensor) -> Tensor:
    """Return `mean_squares`, by a kernel where there is one."""
    known = kernel_norm_of(module) if x.is_cuda else None
    return on_gpu_compiled(mean_squares, module, x) if known is None else norm_mean_squares(x, *known)


def counts_of(module: nn.Module, x: Tensor) -> Tensor:
    """Return `input_and_output_counts`, by a kernel where there is one."""
    known = kernel_norm_of(module) if x.is_cuda else None
    return on_gpu_compiled(input_and_output_counts, module, x) if known is None else norm_bins(x, *known, BINS)


class NormOutputRMS(ScheduledProbe):
    """RMS over tokens and features of each norm's output, beside that of the exact RMSNorm (MXNorm paper, figure 6)."""

    name = "norm_output_rms"

    def __init__(self, settings: config.NormOutputRMS) -> None:
        super().__init__(settings)
        self.mean_squares: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def watch(self, name: str, module: nn.Module, x: Tensor) -> None:
        self.mean_squares.setdefault(name, []).append(mean_squares_of(module, x))

    def measure(self, view: StepView) -> Later:
        squares = mean_over_ranks(torch.stack([torch.stack(parts).mean(0) for parts in self.mean_squares.values()]))
        rms = to_host(squares.sqrt().flatten())
        names = [f"{norm}/{quantity}" for norm in self.mean_squares for quantity in ("rms", "rms_true")]
        self.mean_squares = {}
        return lambda: dict(zip(names, rms().tolist(), strict=True))


class ActivationHistograms(ScheduledProbe):
    """Counts of every norm's input and output elements by `bin_edges` (MXNorm paper, figure 7), with its bound."""

    name = "activation_histograms"

    def __init__(self, settings: config.ActivationHistograms) -> None:
        super().__init__(settings)
        self.counts: dict[str, Tensor] = {}
        self.bounds: dict[str, float] = {}

    @torch.no_grad()
    def watch(self, name: str, module: nn.Module, x: Tensor) -> None:
        self.counts[name] = self.counts.get(name, 0) + counts_of(module, x)
        self.bounds[f"{name}/bound"] = module.bounds.plain if isinstance(module, NormLinear) else norm_of(module).bound

    def measure(self, view: StepView) -> Values:
        counts = sum_over_ranks(torch.stack(list(self.counts.values()))).flatten(0, 1).tolist()
        names = [f"{norm}/{side}" for norm in self.counts for side in ("input", "output")]
        values: Values = dict(zip(names, counts, strict=True)) | self.bounds
        self.counts, self.bounds = {}, {}
        return values

"""Cross-entropies of logits, and the logits' gradient in the logits' own memory, in one kernel.

loss = log sum_v exp(logit_v) - logit_target        dlogit_v = (exp(logit_v) / sum - [v = target]) scale
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxstudy.kernels.operators import Tile, ceil_power_of_two, launch
from mxstudy.reader import require

TILE = Tile(1, 16384, 32)


def cross_entropy_(logits_TV: Tensor, targets_T: Tensor, scale: float | None = None) -> Tensor:
    """Return each token's cross-entropy in nats, float32 [T], computed in FP32 from bf16 or fp32 logits.

    With a `scale`, the logits become the gradient of their sum times `scale`, rounded once to their dtype. No target is
    ignored: one that is no column of the logits is an error, on a GPU a NaN in the loss and in its row of the gradient.
    """
    if logits_TV.is_cuda:
        return launch_cuda(logits_TV, targets_T, scale)
    with torch.enable_grad():
        leaf_TV = logits_TV.detach().requires_grad_(scale is not None)
        log_p_TV = leaf_TV.to(torch.float32).log_softmax(-1)
        nats_T = -log_p_TV.gather(-1, targets_T[:, None]).squeeze(-1)
    if scale is not None:
        (gradient_TV,) = torch.autograd.grad(nats_T, leaf_TV, torch.full_like(nats_T, scale))
        logits_TV.copy_(gradient_TV)
    return nats_T.detach()


def launch_cuda(logits: Tensor, targets: Tensor, scale: float | None, tile: Tile | None = None) -> Tensor:
    """Launch the kernel. `tile`: how much of a row a program holds at once, if not the usual; its rows are one.

    Raises ConfigError for logits whose rows do not follow one another in memory: it would read and write other numbers.
    """
    strides = logits.stride()
    require(
        logits.is_contiguous(), f"logits: {list(logits.shape)} with strides {strides} is not contiguous; give a copy"
    )
    from mxstudy.kernels.device.cross_entropy import cross_entropy_kernel

    rows, columns = logits.shape
    tile = tile or Tile(1, min(TILE.columns, max(ceil_power_of_two(columns), 1024)), TILE.warps)
    nats = logits.new_empty(rows, dtype=torch.float32)
    launch(
        cross_entropy_kernel,
        (rows,),
        (logits, targets.contiguous(), nats, 0.0 if scale is None else scale),
        tile.warps,
        COLUMNS=columns,
        WIDTH=tile.columns,
        WITH_GRADIENT=scale is not None,
    )
    return nats

"""Adam's update in place, a parameter at a time."""

from __future__ import annotations

from torch import Tensor

from mxstudy.numerics.kernels.operands import launch

TILE, WARPS = 2048, 8


def adam_(
    p: Tensor,
    g: Tensor,
    state: tuple[Tensor, Tensor],
    lrs: Tensor,
    unbias: tuple[Tensor, Tensor],
    alive: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """p, g and the moments of `state` [S, ...] float32 on a GPU, contiguous; `lrs` float32 and `alive` bool [S].

    `unbias` [S], or [1] for all: 1 / (1 - beta1^t) and (1 - beta2^t)^-1/2, float32. A replica that is not alive stays.
    """
    from mxstudy.numerics.kernels.device.adam import adam_kernel

    size = p[0].numel()
    launch(
        adam_kernel,
        (-(-size // TILE), len(p)),
        (p, g.contiguous(), *state, lrs, *unbias, alive, size, int(len(unbias[0]) > 1)),
        WARPS,
        ONE_LESS_BETA1=1 - betas[0],
        BETA2=betas[1],
        ONE_LESS_BETA2=1 - betas[1],
        EPS=eps,
        TILE=TILE,
    )

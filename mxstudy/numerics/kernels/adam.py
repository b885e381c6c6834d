"""Adam's update in place, a parameter at a time, with both casts of the new weight."""

from __future__ import annotations

from torch import Tensor

from mxstudy.numerics.kernels.operands import Casts, Held, constants, launch, tile_of
from mxstudy.numerics.kernels.packing import pack

NO_CAST = pack(Casts(None, None, 1, "rceil", "even", False))


def adam_(
    p: Tensor,
    g: Tensor,
    state: tuple[Tensor, Tensor],
    lrs: Tensor,
    unbias: tuple[Tensor, Tensor],
    alive: Tensor,
    betas: tuple[float, float],
    eps: float,
    held: Held | None = None,
) -> None:
    """p and the moments of `state` [S, rows, columns] float32 on a GPU, g bf16 too; `lrs` float32 and `alive` bool [S].

    `unbias` [S], or [1] for all: 1 / (1 - beta1^t) and (1 - beta2^t)^-1/2, float32. A replica that is not alive stays.
    `held`: what becomes of the new p's casts.
    """
    from mxstudy.numerics.kernels.device.adam import adam_kernel

    rows, columns = p.shape[-2:]
    known = constants(held.casts if held else NO_CAST)
    tile = tile_of(rows, columns, known.block, elements=2048)
    tiles = rows * columns // (tile.rows * tile.columns)
    operands = (held.forward, held.dgrad) if held else (None, None)
    launch(
        adam_kernel,
        (len(p) * tiles,),
        (p, g.contiguous(), *state, *operands, lrs, *unbias, alive, int(len(unbias[0]) > 1)),
        tile.warps,
        ONE_LESS_BETA1=1 - betas[0],
        BETA2=betas[1],
        ONE_LESS_BETA2=1 - betas[1],
        EPS=eps,
        COLUMNS=columns,
        TILES=tiles,
        TILE=tile,
        CAST=known,
    )

"""Adam's update of one parameter in place, with both casts of the new weight."""

from __future__ import annotations

from torch import Tensor

from mxstudy.kernels.operators import Casts, Held, constants, launch, tile_of
from mxstudy.kernels.packing import pack

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
    """Update p and both moments of `state` in place on a GPU, all float32 [S, rows, columns]; g is float32 or bf16.

    `lrs`: float32 [S]. `unbias`: 1 / (1 - beta1^t) and (1 - beta2^t)^-1/2, float32 [S], or [1] for all replicas.
    `alive`: bool [S]; a replica that is not alive stays as it is. `held`: where the new p's casts are written.
    """
    from mxstudy.kernels.device.adam import adam_kernel

    rows, columns = p.shape[-2:]
    known = constants(held.casts if held else NO_CAST)
    tile = tile_of(rows, columns, known.block)
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

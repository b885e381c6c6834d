"""Give a model's linears the keys that they draw by, and say where in the training it is.

What is drawn is a function of (seed, step, module, operand, the element's place in the global tensor), see
`mxstudy.numerics.random_bits`. The place is a tensor that whoever trains moves on: nothing recompiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mxstudy.model.linear import MXLinear
from mxstudy.numerics.formats import any_random
from mxstudy.numerics.gemms import CALL, STEP, STREAMS, Random
from mxstudy.numerics.random_bits import stream_key


def give_streams(model: nn.Module, linears: Mapping[str, MXLinear], seeds: Sequence[int]) -> None:
    """Give every linear that draws its keys, by seed, module name and operand; of a stack one a replica."""
    places = places_of(model)
    for name, linear in linears.items():
        linear.random = None
        if not any_random(linear.gemms):
            continue
        device, replicas = linear.weight.device, linear.weight.ndim > 2
        if places is None or places.device != device:  # it was on meta before
            places = torch.zeros((3, len(seeds), 2) if replicas else (3, 2), dtype=torch.int64, device=device)
        keys = [[stream_key(seed, f"{name}.{stream}") for seed in seeds] for stream in STREAMS]
        of_all = torch.tensor(keys, dtype=torch.int64, device=device)
        linear.random = Random(of_all if replicas else of_all[:, 0], places)


def places_of(model: nn.Module) -> Tensor | None:
    """Return the places that the model's linears share; None where none of them draws."""
    linears = (module for module in model.modules() if isinstance(module, MXLinear))
    return next((linear.random.places for linear in linears if linear.random is not None), None)


def move_to(model: nn.Module, step: int | Tensor, first_row: int) -> None:
    """Say where the model is: the training step, of a stack [S], and the first row of the tokens that come next."""
    places = places_of(model)
    if places is not None:
        places[CALL, ..., 0] = step
        places[STEP, ..., 0] = step
        places[CALL, ..., 1] = first_row


def move_to_row(model: nn.Module, first_row: int) -> None:
    """Say which tokens come next, in the same step."""
    places = places_of(model)
    if places is not None:
        places[CALL, ..., 1] = first_row

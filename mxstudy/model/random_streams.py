"""Give a model's linears and dropouts their random streams, and set the streams' position during training.

A random number is a function of (seed, step, module, operand, the element's position in the global tensor), see
`mxstudy.numerics.random_bits`. The current step and first row are a tensor that the training loop updates in place, so
nothing recompiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mxstudy.model.dropout import Dropout, dropouts_of
from mxstudy.model.linear import MXLinear
from mxstudy.numerics.formats import any_random
from mxstudy.numerics.random_bits import CALL, STEP, STREAMS, Random, stream_key


def give_streams(model: nn.Module, linears: Mapping[str, MXLinear], seeds: Sequence[int]) -> None:
    """Give every linear that draws random numbers its keys, by seed, module name and operand; one per replica.

    A dropout has one key, by the first seed and its module name.
    """
    places = places_of(model)

    def places_on(device: torch.device, replicas: bool = False) -> Tensor:
        nonlocal places
        if places is None or places.device != device:  # the model was on the meta device before
            places = torch.zeros((3, len(seeds), 2) if replicas else (3, 2), dtype=torch.int64, device=device)
        return places

    for name, linear in linears.items():
        linear.random = None
        if not any_random(linear.gemms):
            continue
        device, replicas = linear.weight.device, linear.weight.ndim > 2 and not linear.is_of_experts
        keys = [[stream_key(seed, f"{name}.{stream}") for seed in seeds] for stream in STREAMS]
        all_keys = torch.tensor(keys, dtype=torch.int64, device=device)
        linear.random = Random(all_keys if replicas else all_keys[:, 0], places_on(device, replicas))
    for name, dropout in dropouts_of(model).items():
        device = next(model.parameters()).device
        key = torch.tensor(stream_key(seeds[0], name), dtype=torch.int64, device=device)
        dropout.random = Random(key, places_on(device))


def places_of(model: nn.Module) -> Tensor | None:
    """Return the tensor of places (see `Random`) that all streams share, or None if nothing draws random numbers."""
    randoms = (module.random for module in model.modules() if isinstance(module, MXLinear | Dropout))
    return next((random.places for random in randoms if random is not None), None)


def move_to(model: nn.Module, step: int | Tensor, first_row: int) -> None:
    """Set the training step (for a stack a tensor [S]) and the first row of the next tokens."""
    places = places_of(model)
    if places is not None:
        places[CALL, ..., 0] = step
        places[STEP, ..., 0] = step
        places[CALL, ..., 1] = first_row


def move_to_row(model: nn.Module, first_row: int) -> None:
    """Set the first row of the next tokens, within the same step."""
    places = places_of(model)
    if places is not None:
        places[CALL, ..., 1] = first_row

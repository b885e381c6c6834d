"""Compare the gradient with one operand of the GEMMs quantised, as the plan says, with the gradient with none.

All else is equal in both: weights, sequence, compute dtype, norms and transforms. An operand that is not quantised is
transformed as well, because a transform cancels only if both operands of the GEMM have it.

Why one operand and not all but one: a cast is a step function, so a small change of one operand flips roundings in all
casts after it. The gradients with six and with five casts then differ by the noise of the five as well, and this noise
hides a good operand's small error. With one cast the difference is that cast's alone. For the same reason the errors of
the operands are almost independent: not the differences but their squares add up, nearly, to that of the whole recipe.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias, TypeVar

from torch import Tensor

from mxstudy.config.casts import FORWARD_OF, OPERANDS, Gemms
from mxstudy.model.decoder import Decoder
from mxstudy.model.fusable import linears_in
from mxstudy.model.linear import MXLinear
from mxstudy.probes.base import TrainingSequence
from mxstudy.probes.shadow import shadow_gradients

Gradients: TypeAlias = dict[str, Tensor]
T = TypeVar("T")


def of_each_operand(
    model: Decoder, sequence: TrainingSequence, compare: Callable[[Gradients, Gradients], T]
) -> dict[str, T]:
    """Return {operand: `compare`'s result} of every operand that a linear quantises, in the order of OPERANDS.

    `compare` gets the gradient by parameter with that operand quantised in every linear whose recipe does so, and the
    gradient without. A backward operand that is made from the forward's quantised one (`source: forward`) cannot be
    quantised without that: this forward operand is then quantised in both gradients.
    """
    linears = [linear for linear in linears_in(model) if any(linear.gemms.casts())]
    plan = [linear.gemms for linear in linears]
    groups: dict[tuple[Gemms, ...], list[str]] = defaultdict(list)
    for operand in OPERANDS:
        if any(gemms.cast_of(operand) is not None for gemms in plan):
            groups[tuple(with_casts(gemms, read_by(gemms, operand)) for gemms in plan)].append(operand)
    found = {}
    for without, operands in groups.items():
        with recipes_set(linears, without):
            _, true = shadow_gradients(model, sequence)
        for operand in operands:
            alone = [with_casts(gemms, {operand} | read_by(gemms, operand)) for gemms in plan]
            with recipes_set(linears, alone):
                found[operand] = compare(shadow_gradients(model, sequence)[1], true)
    return {operand: found[operand] for operand in OPERANDS if operand in found}


def read_by(gemms: Gemms, operand: str) -> set[str]:
    """Return the forward operand that the operand is made from in this recipe, as a set of one name, or none."""
    cast = gemms.cast_of(operand)
    return {FORWARD_OF[operand]} if cast is not None and cast.source == "forward" else set()


def with_casts(gemms: Gemms, names: set[str]) -> Gemms:
    """Return the recipe with the casts of those operands alone, and with all its transforms."""
    return replace(gemms, **dict.fromkeys(set(OPERANDS) - names))


@contextmanager
def recipes_set(linears: Sequence[MXLinear], recipes: Sequence[Gemms]) -> Iterator[None]:
    """Give each linear its recipe inside the `with` block, then restore what it had.

    The hardware's MX GEMM takes two quantised operands, so it is off.
    """
    before = [(linear.gemms, linear.native) for linear in linears]
    try:
        for linear, recipe in zip(linears, recipes, strict=True):
            linear.gemms, linear.native = recipe, False
        yield
    finally:
        for linear, (recipe, native) in zip(linears, before, strict=True):
            linear.gemms, linear.native = recipe, native

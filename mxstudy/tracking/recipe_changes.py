"""Name the parts in which the recipes of a plan differ from those of a choice: 'wgrad_transform=null'."""

from __future__ import annotations

from typing import Any

from mxstudy.config.deciding import RECIPE_DEFAULTS, Value

Parts = dict[tuple[str, str], Any]  # of a canonical schedule: by row and pattern, and field of the recipe there


def changes(value: Value, given: Value) -> dict[str, Any]:
    """Return the fields of a schedule's recipes that differ from those of another schedule, which a choice gives.

    A missing operand or transform is null, a field that is not written has its default, and a sequence is one field.
    Returns {} where anything else differs: rows, patterns, or names of built-in recipes.
    """
    new, old = parts_of(value), parts_of(given)
    differing = sorted(part for part in {*new, *old} if new.get(part) != old.get(part))
    rows = {row for row, _ in new}
    if rows != {row for row, _ in old} or any(not field for _, field in differing):
        return {}
    found: dict[str, Any] = {}
    for row, field in differing:
        owner = field.partition(".")[0]
        is_gone = not any(one == row and other.startswith(f"{owner}.") for one, other in new)
        name, _, place = field.rpartition(".")
        if is_gone:
            name, said = owner, None
        elif place.isdigit():
            said = sequence(new, row, name)
        else:
            name, said = field, new.get((row, field), RECIPE_DEFAULTS.get(field))
        found[name if len({row for row, field in new if field}) == 1 else f"{row}.{name}"] = said
    return found


def sequence(parts: Parts, row: str, name: str) -> tuple[tuple[str, Any], ...]:
    """Return the values of a sequence in that row as (place, value) pairs."""
    of = RECIPE_DEFAULTS | {field: one for (at, field), one in parts.items() if at == row}
    pairs = [(field.removeprefix(f"{name}."), one) for field, one in of.items() if field.startswith(f"{name}.")]
    return tuple(sorted(pairs, key=lambda pair: int(pair[0])))


def parts_of(schedule: Value) -> Parts:
    """Return a schedule's scalars; the field of one that belongs to no recipe is ''."""
    rows = schedule if isinstance(schedule, tuple) else ()
    return {(row, field): one for row, of in rows for field, one in (of if isinstance(of, tuple) else [("", of)])}

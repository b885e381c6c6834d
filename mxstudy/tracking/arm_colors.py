"""Give each arm of a set a colour of its own, the same in tables, figures, reports and MLflow."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from itertools import chain, product

from mxstudy.config.deciding import PLAN, Value
from mxstudy.tracking.arm_names import number_text

# The palette of Okabe and Ito, made for colour-blind readers, with a wine red instead of its yellow, which is too faint
# for a line. These arms have the same colour in every set; others take the remaining ones.
KNOWN = {
    "bf16": "#000000",
    "fp32": "#666666",
    "mxnorm_p1": "#D55E00",
    "mxnorm_p2": "#009E73",
    "rmsnorm": "#0072B2",
}
OTHERS = ("#CC79A7", "#E69F00", "#56B4E9", "#882255")
SHADES = (1.0, 0.6, 1.45)  # of the palette, if it is not enough


def colors_of(arms: Mapping[str, Mapping[str, Value]], first: Collection[str] = ()) -> dict[str, str]:
    """Return the colour of each arm, by its key; `arms`: the values that part it from others, by key.

    Arms choose in turn, those of `first` before the others. An arm that KNOWN lists takes its colour there. Any other
    arm begins at a place in the palette that its words decide, and takes the first free colour. So an arm that is added
    at the end changes no other's colour, and a recipe has the same colour in every set where it is free.
    """
    found: dict[str, str] = {}
    for key in sorted(arms, key=lambda key: key not in first):
        words = words_of(arms[key])
        start = zlib.crc32(" ".join(words).encode()) % len(OTHERS)
        wished = [KNOWN[word] for word in words if word in KNOWN]
        others = OTHERS[start:] + OTHERS[:start]
        spare = product(SHADES, others), product(SHADES[1:], KNOWN.values())  # the colours of KNOWN stay free
        rest = [shaded(color, shade) for shade, color in chain(*spare)]
        free = [color for color in (*wished, *rest) if color not in found.values()]
        found[key] = free[0] if free else rest[len(found) % len(rest)]
    return found


def words_of(values: Mapping[str, Value]) -> list[str]:
    """Return the words by which KNOWN may list an arm: an MXNorm with its power, the plan's only recipe, the norm."""
    schedule = values.get("precision.schedule")
    plan = {str(name) for key, name in schedule if PLAN in f".{key}"} if isinstance(schedule, tuple) else set()
    norm, power = values.get("norm.kind"), values.get("norm.p")
    own = [f"{norm}_p{number_text(power)}"] if isinstance(power, float) else []
    return [*own, *(plan if len(plan) == 1 else ()), str(norm)]


def shaded(color: str, shade: float) -> str:
    """Return a colour darker (below 1) or lighter (above 1), each of red, green and blue at most 255."""
    parts = [int(color[place : place + 2], 16) for place in (1, 3, 5)]
    mixed = [part * shade if shade <= 1 else 255 - (255 - part) * (2 - shade) for part in parts]
    return "#" + "".join(f"{round(part):02X}" for part in mixed)

"""The arms of a sweep: what they are called, and on which backends their blocks run."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

SEEDS = ("seed=", "data_seed=")
NAMED = 3  # arms at most, of one backend, that are called by their names
THEN = " then from step {} "
REMEDY = "precision.backend=reference puts all on one"


def short(label: str) -> str:
    """Return 'precision=mxfp8 norm=rmsnorm' as 'mxfp8 rmsnorm': these choices say what they are."""
    return re.sub(r"(?<!\S)(norm|precision)=", "", label)


def arm_of(label: str) -> str:
    """Return what runs have in common that repeat each other with other seeds: the label, short, without them."""
    return short(" ".join(word for word in label.split() if not word.startswith(SEEDS))) or label


def all_backends(backends: Iterable[str | None]) -> str | None:
    """Return each backend that is named in any of these once: 'joined, reference'; None where none is known.

    Where all that is known is the same it is that, with the steps at which a schedule changes it.
    """
    known = {one for one in backends if one}
    if len(known) == 1:
        return known.pop()
    return ", ".join(sorted({name for one in known for name in re.split(rf", |{THEN.format(r'[0-9]+')}", one)})) or None


def backends_by_step(rows: Iterable[tuple[int, str | None]]) -> str | None:
    """Return the backends of a schedule's rows, by their first steps: 'reference then from step 500 joined'."""
    said, last = "", None
    for step, backends in rows:
        if backends and backends != last:
            said += (THEN.format(step) if said else "") + backends
            last = backends
    return said or None


def different_backends(runs: Iterable[tuple[str, str | None]], remedy: str = REMEDY) -> str | None:
    """Return a sentence that says which arms run on which backends, of runs by label; None where all run on the same.

    Of a run that does not say it (None) nothing is said. `remedy`: the option that puts all on one, if there is one.
    """
    of_arms: dict[str, list[str | None]] = defaultdict(list)
    for label, backend in runs:
        of_arms[arm_of(label)].append(backend)
    arms: dict[str, list[str]] = defaultdict(list)
    for arm, backends in of_arms.items():
        if found := all_backends(backends):
            arms[found].append(arm)
    if len(arms) < 2:
        return None
    *few, (most, others) = sorted(arms.items(), key=lambda group: len(group[1]))
    parts = [f"{', '.join(own) if len(own) <= NAMED else f'{len(own)} arms'}: {backend}" for backend, own in few]
    parts.append(f"{others[0] if len(others) == 1 else f'{len(others)} others'}: {most}")
    sentence = f"The arms run on different backends ({'; '.join(parts)}), which differ in the order of sums alone"
    return f"{sentence}; {remedy}." if remedy else f"{sentence}."

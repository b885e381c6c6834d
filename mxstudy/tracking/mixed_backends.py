"""The backends on which the blocks of runs are computed, and a sentence for arms that do not share one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from mxstudy.config.precision_plan import EARLIER_BACKENDS

NAMED = 3  # arms of one backend that are listed by name; more are only counted
THEN = " then from step {} "
REMEDY = "precision.backend=reference puts all on one"


def all_backends(backends: Iterable[str | None]) -> str | None:
    """Return each backend that any entry names, once: 'fused, reference', or None if none is known.

    If all known entries are equal, return that entry, with the steps at which a schedule changes the backend.
    """
    known = {backend for backend in backends if backend}
    if len(known) == 1:
        return known.pop()
    return ", ".join(sorted({name for one in known for name in re.split(rf", |{THEN.format(r'[0-9]+')}", one)})) or None


def backends_in(about: Mapping[str, Any]) -> str | None:
    """Return the backends that a run's blocks ran on, over all starts and resumes, or None if not recorded.

    `about`: the run's provenance.
    """
    found = (part.get("backend") for part in (about, *about.get("resumed", [])))
    return all_backends(with_names_of_now(name) if name else None for name in found)


def with_names_of_now(backends: str) -> str:
    """Return backends, such as 'joined, reference', with today's names in place of earlier ones."""
    for earlier, now in EARLIER_BACKENDS.items():
        backends = backends.replace(earlier, now)
    return backends


def backends_by_step(rows: Iterable[tuple[int, str | None]]) -> str | None:
    """Return a schedule's backends, from rows (first step, backends): 'reference then from step 500 fused'."""
    said, last = "", None
    for step, backends in rows:
        if backends and backends != last:
            said += (THEN.format(step) if said else "") + backends
            last = backends
    return said or None


def different_backends(runs: Iterable[tuple[str, str | None]], remedy: str = REMEDY) -> str | None:
    """Return a sentence that says which arms run on which backends, or None if all run on the same one.

    `runs`: the arm of each run, by name, and its backend; runs whose backend is None are ignored. `remedy`: the option
    that puts all arms on one backend; may be empty.
    """
    of_arms: dict[str, list[str | None]] = defaultdict(list)
    for arm, backend in runs:
        of_arms[arm].append(backend)
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

"""Find the folders of runs in runs/: all of them, or those of an experiment, a sweep or a fingerprint."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from mxstudy.tracking.folder import NAME_LENGTH, REHEARSALS, RunFolder, replaced


def find_runs(runs_dir: Path, pattern: str = f"*/{'[0-9a-f]' * NAME_LENGTH}") -> list[RunFolder]:
    """Return the runs whose folder matches `pattern`, by default all runs of all experiments, without replaced ones.

    A run that a killed rerun set aside counts, if the rerun did not make its own folder.
    """
    name = re.compile(f"[0-9a-f]{{{NAME_LENGTH}}}")
    there = [RunFolder(status.parent) for status in runs_dir.glob(f"{pattern.rstrip('*')}*/status.json")]
    found = {run.path: run.path for run in there if run.path == run.own_path}
    without = {run.own_path for run in there} - found.keys()
    found |= {place: earlier[-1] for place in without if (earlier := replaced(place))}
    return [RunFolder(found[place]) for place in sorted(found) if name.fullmatch(place.name)]


def none_but_rehearsals(runs_dir: Path) -> str:
    """Return where a folder's rehearsals are, for a message that it has no other runs, or "" if it has none either.

    Those of the experiment runs/NAME are in runs/rehearsals/NAME.
    """
    there = {runs_dir / REHEARSALS: "*/*", runs_dir.parent / REHEARSALS / runs_dir.name: "*"}
    return next((f" but rehearsals, in {path}/" for path, pattern in there.items() if find_runs(path, pattern)), "")


def figures_of(runs: Iterable[RunFolder]) -> Path:
    """Return the folder for figures of these runs, which is another one if a run is a rehearsal."""
    return Path("figures", REHEARSALS) if any(run.is_rehearsal for run in runs) else Path("figures")


def runs_of(runs: Iterable[RunFolder], name: str) -> list[RunFolder]:
    """Return the runs that the sweep or experiment of that name asked for, with its membership.

    If a sweep of that name has runs, those that only other sweeps of the experiment asked for are left out.
    """
    asked = [run for each in runs if (run := each.found_by(name))]
    is_sweep = any(run.membership().sweep == name for run in asked)
    return [run for run in asked if not is_sweep or run.membership().sweep in (name, None)]


def runs_by_fingerprint(runs_dir: Path) -> Callable[[str], list[RunFolder]]:
    """List the runs of all experiments once, and return a function that returns those of a fingerprint."""
    found: dict[str, list[RunFolder]] = defaultdict(list)
    for run in find_runs(runs_dir):
        found[run.own_path.name].append(run)
    return lambda fingerprint: found.get(fingerprint[:NAME_LENGTH], [])


def newest(runs: Iterable[RunFolder]) -> RunFolder | None:
    """Return the run that was started last, or None if there is no run."""
    return max(runs, key=lambda run: run.status().started_s, default=None)

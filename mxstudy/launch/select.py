"""The selection of runs for a command, by their group choices, config values and names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mxstudy.launch.ticket import ticket_of
from mxstudy.reader import ConfigError, flatten, require
from mxstudy.tracking.folder import NAME_LENGTH, RunFolder
from mxstudy.tracking.found_runs import find_runs, none_but_rehearsals
from mxstudy.tracking.named_runs import elsewhere, is_called


def select(arguments: Sequence[str], runs_dir: Path) -> list[RunFolder]:
    """Return the runs that match every argument: GROUP=CHOICE, KEY=VALUE, run=FOLDER or FINGERPRINT; A,B is either.

    Raises ConfigError with the argument that no run matches.
    """
    there = find_runs(runs_dir)
    require(bool(there), f"runs_dir: there are no runs in {runs_dir}/{none_but_rehearsals(runs_dir)}")
    runs = [run for run in there if is_readable(run)]
    require(bool(runs), f"runs_dir: no run in {runs_dir}/ can be read; the lines above say what to do")
    for argument in arguments:
        key, _, value = argument.removeprefix("+").partition("=")
        choices = [value] if value.startswith("[") else value.split(",")  # a list is one value
        if key == "run":
            for choice in choices:
                check_one(choice, [run for run in runs if matching(run, key, choice)])
        fitting = ([found for choice in choices if (found := matching(run, key, choice))] for run in runs)
        runs = [found[0] for found in fitting if found]
        if not runs:
            other = elsewhere(value, runs_dir) if key == "run" else None
            has_it = f"; runs_dir={other.path.parents[1]} has one" if other else ""
            raise ConfigError(f"{key}: no run in {runs_dir}/ has {key}={value}{has_it}")
    return runs


def is_readable(run: RunFolder) -> bool:
    """Return whether the files that describe a run can be read; if not, print which one cannot, and a remedy."""
    try:
        run.status(), run.config_values(), run.memberships(), ticket_of(run)
    except ConfigError as error:
        print(f"left out: {error}", flush=True)
        return False
    return True


def check_one(name: str, runs: Sequence[RunFolder]) -> None:
    """Raise ConfigError if the beginning of a fingerprint matches several of these runs."""
    found = sorted({run.status().fingerprint[:NAME_LENGTH] for run in runs})
    require(len(found) < 2, f"run: {name} matches each of {', '.join(found)}; give more digits")


def matching(run: RunFolder, key: str, value: str) -> RunFolder | None:
    """Return the run if it matches, with the membership that the key names, if it names one; else None."""
    if key == "run":
        return run if is_called(run, value) or run.path.absolute() == Path(value).absolute() else None
    if key in ("experiment", "sweep"):
        asked = [membership for membership in run.memberships() if getattr(membership, key) == value]
        return RunFolder(run.path, asked[-1]) if asked else None
    choices = [membership.choices for membership in run.memberships()]
    if any(key in chosen for chosen in choices):
        return run if any(chosen.get(key) == value for chosen in choices) else None
    return run if any(is_same(value, stored) for stored in values_of(run, key)) else None


def values_of(run: RunFolder, key: str) -> Iterator[Any]:
    """Yield the value of a dotted key in a run's config, if it has one."""
    values = flatten(run.config_values())
    if key in values:
        yield values[key]


def is_same(text: str, value: Any) -> bool:
    """Return whether the text means the value, as on the command line: 1e-3 is 0.001, true is True, null is None."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(text) == value
        except ValueError:
            return False
    if isinstance(value, list) and value and text.startswith("[") and text.endswith("]"):
        parts = text[1:-1].split(",")
        return len(parts) == len(value) and all(
            is_same(part.strip(), one) for part, one in zip(parts, value, strict=True)
        )
    return text == (value if isinstance(value, str) else json.dumps(value))

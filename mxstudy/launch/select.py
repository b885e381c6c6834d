"""The selection of runs for a command, by their group choices, config values and names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from mxstudy.reader import ConfigError, flatten, require
from mxstudy.tracking.folder import NAME_LENGTH, RunFolder, find_runs, is_called
from mxstudy.tracking.memberships import LOADER


def select(arguments: Sequence[str], runs_dir: Path) -> list[RunFolder]:
    """Return the runs that match every argument: GROUP=CHOICE, KEY=VALUE, run=FOLDER or FINGERPRINT; A,B is either.

    Raises ConfigError with the argument that no run matches.
    """
    runs = find_runs(runs_dir)
    require(bool(runs), f"runs_dir: there are no runs in {runs_dir}/")
    for argument in arguments:
        key, equals, value = argument.removeprefix("+").partition("=")
        require(bool(equals), f"{argument}: must be GROUP=CHOICE, KEY=VALUE or run=FINGERPRINT")
        choices = value.split(",")
        if key == "run":
            for choice in choices:
                check_one(choice, [run for run in runs if fit(run, key, choice)])
        fitting = ([found for choice in choices if (found := fit(run, key, choice))] for run in runs)
        runs = [found[0] for found in fitting if found]
        require(bool(runs), f"{key}: no run in {runs_dir}/ has {key}={value}")
    return runs


def check_one(name: str, runs: Sequence[RunFolder]) -> None:
    """Raise ConfigError if the beginning of a fingerprint matches several of these runs."""
    found = sorted({run.status().fingerprint[:NAME_LENGTH] for run in runs})
    require(len(found) < 2, f"run: {name} matches each of {', '.join(found)}; give more digits")


def fit(run: RunFolder, key: str, value: str) -> RunFolder | None:
    """Return the run if it fits, as that experiment or sweep has it if the key is one of them; else None."""
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
    try:
        values = flatten(yaml.load(run.config_path.read_text(), Loader=LOADER))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{run.config_path}: cannot be read ({error}); move the folder away") from None
    if key in values:
        yield values[key]


def is_same(text: str, value: Any) -> bool:
    """Return whether the text means the value, as on the command line: 1e-3 is 0.001, true is True, null is None."""
    if isinstance(value, float):
        try:
            return float(text) == value
        except ValueError:
            return False
    return text == (value if isinstance(value, str) else json.dumps(value))

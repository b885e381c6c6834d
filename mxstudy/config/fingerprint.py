"""The fingerprint that names a run: a hash of everything that decides its numbers, and of nothing else."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from mxstudy.config.precision_plan import EARLIER_BACKENDS, Precision
from mxstudy.config.run import Run
from mxstudy.reader import default_of

# Increase it when a default of the schema changes its meaning: defaults do not enter the fingerprint.
SCHEMA_VERSION = 1


def hashed(config: Any) -> Any:
    """Return the part of a config that enters its fingerprint: fields that are not cosmetic and not at their default.

    `kind` always enters, so that two classes with equal fields differ. A precision's recipes enter by their
    computation, not by their names.
    """
    if isinstance(config, Precision):
        return hashed_precision(config)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return hashed_fields(config)
    if isinstance(config, Mapping):
        return {key: hashed(value) for key, value in config.items()}
    if isinstance(config, tuple):
        return [hashed(value) for value in config]
    return config


def hashed_fields(config: Any) -> dict[str, Any]:
    cls: Any = type(config)
    values = {name: (hashed(getattr(config, name)), default) for name, default in hashed_defaults(cls).items()}
    return {name: value for name, (value, default) in values.items() if name == "kind" or value != default}


@functools.cache
def hashed_defaults(cls: type) -> dict[str, Any]:
    """Return the default of each field of a dataclass that is not cosmetic, as `hashed` returns it."""
    return {f.name: hashed(default_of(f)) for f in dataclasses.fields(cls) if not f.metadata.get("cosmetic")}


def hashed_precision(precision: Precision) -> dict[str, Any]:
    """Return a precision's hashed fields with values in place of recipe names, except for the names in NAMED."""
    values, canonical = hashed_fields(precision), precision.canonical()
    values.pop("recipes", None)
    if backend := values.get("backend"):  # earlier names enter the fingerprints of all runs
        values["backend"] = {now: earlier for earlier, now in EARLIER_BACKENDS.items()}.get(backend, backend)
    for row in values["schedule"]:
        if list(row["plan"]) != sorted(row["plan"]):  # the order counts: the last matching pattern wins
            row["order"] = list(row["plan"])
        row["plan"] = {pattern: hashed(canonical.get(name, name)) for pattern, name in row["plan"].items()}
    return values


def fingerprint(config: Run, device_type: str, corpus: Mapping[str, Any]) -> str:
    """Return the sha256 over what decides a run's numbers: config, device type, corpus identity, schema version."""
    identity = {"schema": SCHEMA_VERSION, "config": hashed(config), "device": device_type, "corpus": dict(corpus)}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

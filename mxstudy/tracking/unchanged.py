"""Parse a config.yaml, and notice one that was edited after its run: the numbers belong to another config.

provenance.json has a digest of the part of the config that decides numbers, the part that enters the fingerprint.
Folders of earlier versions have none, and are trusted. The other fields may change when a run is resumed.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mxstudy import config as schemas
from mxstudy.config import SCHEMA_VERSION, hashed
from mxstudy.reader import ConfigError, require
from mxstudy.small_files import parse_yaml

KEY = "config_digest"  # in provenance.json


def digest_of(config: schemas.Run) -> dict[str, Any]:
    """Return the digest of a config, with the version of the schema under which it was made."""
    text = json.dumps(hashed(config), sort_keys=True)
    return {"schema": SCHEMA_VERSION, "sha256": hashlib.sha256(text.encode()).hexdigest()}


class Stored(NamedTuple):
    """The content of a config.yaml. `config`: the error, if today's schema cannot read it. `digest`: the config's."""

    values: dict[str, Any]
    config: schemas.AnyRun | ConfigError
    digest: dict[str, Any] | None


@functools.lru_cache(1000)  # a figure asks for a run's config several times, and parsing takes milliseconds
def stored(text: str) -> Stored:
    """Return the content of a config.yaml, which callers must not change. Raises ConfigError if it is not a mapping."""
    values = parse_yaml(text)
    try:
        config = schemas.read_run(values)
    except ConfigError as error:
        return Stored(values, error, None)
    return Stored(values, config, digest_of(config))


def check_unchanged(path: Path, found: Stored, about: Mapping[str, Any]) -> None:
    """Raise ConfigError if a config.yaml does not hold the config that its run was made with.

    `about`: the run's provenance. A digest of an earlier version of the schema is not compared, nor are values that
    today's schema cannot read.
    """
    recorded = about.get(KEY)
    if recorded is None or recorded["schema"] != SCHEMA_VERSION or found.digest is None:
        return
    require(
        found.digest == recorded,
        f"{path}: is not the config that this run was made with (its digest is not that in provenance.json); restore "
        "it, or move the folder away to train this run again",
    )

"""Notice a config.yaml that somebody changed after its run was made: its numbers are those of another config.

provenance.json has a digest of the part of the config that decides numbers, as a fingerprint has it; folders of earlier
versions have none, and are believed. What decides no number may change when a run is resumed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxstudy import config as schemas
from mxstudy.config import SCHEMA_VERSION, hashed
from mxstudy.reader import ConfigError, require

KEY = "config_digest"  # in provenance.json


def digest_of(config: schemas.Run) -> dict[str, Any]:
    """Return the digest of a config, with the version of the schema under which it was made."""
    text = json.dumps(hashed(config), sort_keys=True)
    return {"schema": SCHEMA_VERSION, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def check_values(path: Path, values: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Raise the same as `check_unchanged` for a config's values, unless today's schema cannot read them."""
    try:
        config = schemas.read_run(values)
    except ConfigError:
        return
    check_unchanged(path, config, about)


def check_unchanged(path: Path, config: schemas.Run, about: Mapping[str, Any]) -> None:
    """Raise ConfigError if this config, read from a config.yaml, is not the one that its run was made with.

    `about`: the run's provenance. A digest of an earlier version of the schema is not compared.
    """
    recorded = about.get(KEY)
    if recorded is None or recorded["schema"] != SCHEMA_VERSION:
        return
    require(
        digest_of(config) == recorded,
        f"{path}: is not the config that this run was made with (its digest is not that in provenance.json); restore "
        "it, or move the folder away to train this run again",
    )

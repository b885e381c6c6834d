"""Keep the digests of the package's files beside its compiled files, because computing them takes most of a second.

Like a compiled file the cache is remade if a source changed, and is not written where Python writes no compiled files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from mxstudy.whole_files import replace_file

Digests = dict[str, str]  # {path below mxstudy/: digest}


def cached(sources: Mapping[str, str], compute: Callable[[Mapping[str, str]], Digests]) -> Digests:
    """Return `compute(sources)`, or what it returned for the same sources before.

    `sources`: all files of the package by their paths below it, so that the code which computes is among them.
    """
    path = Path(importlib.util.cache_from_source(__file__)).with_name("digests.json")
    key = hashed(sources)
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["sources"] == key and kept["sum"] == hashed(kept["digests"]):
            return dict(kept["digests"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # there is none, or it is torn
    digests = compute(sources)
    if not sys.dont_write_bytecode:
        write(path, {"sources": key, "sum": hashed(digests), "digests": digests})
    return digests


def write(path: Path, content: Mapping[str, object]) -> None:
    """Write the cache if the folder allows it."""
    try:
        path.parent.mkdir(exist_ok=True)
        replace_file(path, json.dumps(content))
    except OSError:
        pass  # a package that others installed, or a full disk


def hashed(texts: Mapping[str, str]) -> str:
    """Return the SHA-256 of texts and their names."""
    return hashlib.sha256(json.dumps(sorted(texts.items())).encode()).hexdigest()

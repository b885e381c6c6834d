from __future__ import annotations

import functools
import importlib
from pathlib import Path


@functools.cache
def pages() -> str:
    """Return the scripts of the installed MLflow's pages."""
    server = importlib.import_module("mlflow.server")
    scripts = sorted((Path(str(server.__file__)).parent / "js" / "build" / "static" / "js").glob("*.js"))
    assert scripts
    return "\n".join(script.read_text(errors="replace") for script in scripts)

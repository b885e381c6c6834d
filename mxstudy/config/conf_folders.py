"""The folders with the YAML of config groups and sweeps: in the package of a wheel, or in a checkout."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
ROOT = next(folder for folder in (PACKAGE, PACKAGE.parent) if (folder / "conf").is_dir())
CONF, SWEEPS = ROOT / "conf", ROOT / "sweeps"
STARTS = ("experiment", "sweep", "debug", "evaluation")  # groups without a default choice, which a command adds with +

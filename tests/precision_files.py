"""Load the files of conf/precision that have recipes of their own."""

from __future__ import annotations

from composing import compose_job

from mxstudy import config
from mxstudy.config.conf_folders import CONF
from mxstudy.reader import read

FILES = sorted(path.stem for path in (CONF / "precision").glob("*.yaml") if "\nrecipes:" in path.read_text())
NEEDS = {"fp8_blockwise": ["precision.pad_blocks=true"]}  # its blocks do not divide small sizes


def of_file(name: str, *words: str) -> config.Precision:
    """Return the precision of that file, with its overrides."""
    values = compose_job("+experiment=quickstart", f"precision={name}", *NEEDS.get(name, []), *words).values
    return read(config.Precision, values["precision"])

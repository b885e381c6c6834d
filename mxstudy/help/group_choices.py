"""The choices of every config group, and the comment at the top of each file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from mxstudy.config.conf_folders import CONF, SWEEPS

NO_SENTENCE = re.compile(r"@package|python -m ")


def folders() -> dict[str, Path]:
    """Return the folder of every group; experiments and sweeps come first."""
    own = {folder.name: folder for folder in sorted(CONF.iterdir()) if folder.is_dir() and folder.name != "hydra"}
    first = {"experiment": CONF / "experiment", "sweep": SWEEPS}
    return first | own | {"hydra/launcher": CONF / "hydra" / "launcher"}


def groups() -> dict[str, list[str]]:
    """Return every config group with its choices, without the bases, which a user does not choose."""
    return {group: visible(sorted(path.stem for path in folder.glob("*.yaml"))) for group, folder in folders().items()}


def visible(choices: Iterable[str]) -> list[str]:
    return [choice for choice in choices if not choice.startswith(("base_", "basic"))]


def said_of(group: str, choice: str) -> str:
    """Return the comment at the top of a choice's file, with a line for each paragraph, item, and row of a table."""
    said = [""]
    for line in (folders()[group] / f"{choice}.yaml").read_text().splitlines():
        if not line.startswith("#"):
            break
        text = line.removeprefix("#").removeprefix(" ")
        if NO_SENTENCE.match(text):
            continue
        is_row = text.startswith("  ") and not said[-1].startswith("- ")
        if is_row or not text or text.startswith("- ") or said[-1].startswith("  "):
            said.append(text)
        else:
            said[-1] = f"{said[-1]} {text.strip()}".lstrip()
    return "\n".join(filter(None, said))

"""Tab completion: `mxstudy completion SHELL` prints the script of a shell, which then asks for words one by one.

It asks `mxstudy completion -- WORD ...`, where the last word is what stands before the cursor. The words come from the
schema and the folders of conf/, so that neither Hydra nor torch is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mxstudy.completion.candidates import candidates
from mxstudy.reader import ConfigError, suggest

SCRIPTS = {path.suffix.removeprefix("."): path for path in sorted(Path(__file__).parent.glob("mxstudy.*"))}


def main(words: Sequence[str]) -> None:
    """Print the script of a shell, or each word that can stand at the end. Raises ConfigError for another shell."""
    match list(words):
        case ["--", *typed]:
            sys.stdout.writelines(f"{word}\n" for word in candidates(typed, SCRIPTS))
        case [shell] if shell in SCRIPTS:
            sys.stdout.write(SCRIPTS[shell].read_text())
        case _:
            raise ConfigError(f"completion {' '.join(words)}: no such shell; {suggest(' '.join(words), SCRIPTS)}")

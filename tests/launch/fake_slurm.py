"""Provide Slurm's commands as scripts on PATH, which answer what a test tells them and keep what they were asked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


class FakeSlurm:
    """A Slurm that starts with an empty queue, no accounting and no memory."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        for program in ("bash", "cat", "git"):
            (folder / program).symlink_to(str(shutil.which(program)))
        patch.setenv("PATH", str(folder))
        self.say("squeue", "")
        self.say("sacct", None)
        self.say("scontrol", None)
        self.say("scancel", "")

    def say(self, command: str, text: str | None) -> None:
        answer = "exit 1" if text is None else f"cat <<'END'\n{text}\nEND"
        path = self.folder / command
        path.write_text(f"#!{self.folder}/bash\necho {command} $* >> {self.folder}/asked\n{answer}\n")
        path.chmod(0o755)

    def queue(self, **states: str) -> None:
        """Set squeue's list, where job5_0="RUNNING" is job 5_0."""
        self.say("squeue", "\n".join(f"{name.removeprefix('job')} {state}" for name, state in states.items()))

    def asked(self, command: str) -> list[str]:
        path = self.folder / "asked"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.split()[0] == command]

"""The recorded code is the commit of the repository that tracks the code, and of no other."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mxstudy.tracking import provenance as module
from mxstudy.tracking.provenance import provenance


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put a file into a repository of its own, in place of the module."""
    file = tmp_path / "code.py"
    file.write_text("")
    monkeypatch.setattr(module, "__file__", str(file))
    module._commit.cache_clear()
    git(tmp_path, "init", "--quiet")
    yield file
    module._commit.cache_clear()


def git(repository: Path, *arguments: str) -> str:
    author = ["-c", "user.name=A", "-c", "user.email=a@b"]
    run = subprocess.run(
        ["git", "-C", str(repository), *author, *arguments], check=True, capture_output=True, text=True
    )
    return run.stdout.strip()


def commit(code: Path) -> str:
    git(code.parent, "add", code.name)
    git(code.parent, "commit", "--quiet", "-m", "code")
    return git(code.parent, "rev-parse", "HEAD")


def test_a_clean_commit(code: Path) -> None:
    expected = commit(code)
    assert (provenance()["commit"], provenance()["dirty"]) == (expected, False)


def test_a_change_since_is_dirty(code: Path) -> None:
    expected = commit(code)
    code.write_text("changed")
    assert (provenance()["commit"], provenance()["dirty"]) == (expected, True)


def test_code_that_is_installed_in_somebody_elses_repository_has_no_commit(code: Path) -> None:
    other = code.with_name("other.py")
    other.write_text("")
    commit(other)
    assert (provenance()["commit"], provenance()["dirty"]) == (None, None)


def test_versions_machine_and_command_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "mxstudy", "+experiment=quickstart", "data.paths=[a b]"])
    found = provenance()
    assert found["torch"] == torch.__version__
    assert found["gpu"] == (torch.cuda.get_device_name() if torch.cuda.is_available() else None)
    assert found["command"] == "python -m mxstudy +experiment=quickstart 'data.paths=[a b]'"
    assert {"python", "mxstudy", "torchao", "host"} <= found.keys()

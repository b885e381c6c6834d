"""Runs are found by their experiment and fingerprint, each once, without those that were moved aside or copied."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tracked import FINGERPRINT, make_folder

from mxstudy.tracking.found_runs import find_runs, newest, runs_by_fingerprint


def test_runs_are_found_by_name_across_experiments_but_not_those_moved_aside(tmp_path: Path) -> None:
    first = make_folder(tmp_path, "aaaa" + "0" * 60, experiment="one")
    second = make_folder(tmp_path, "aabb" + "0" * 60, experiment="two")
    aside = make_folder(tmp_path, "cccc" + "0" * 60, experiment="two")
    aside.path.rename(aside.path.with_name(f"{second.path.name}.old-1"))
    (tmp_path / "two" / ("d" * 12)).mkdir()  # killed before it had a status
    assert find_runs(tmp_path) == [first, second]
    found = {name: runs_by_fingerprint(tmp_path)(name * 16) for name in ("aaaa", "aabb", "cccc")}
    assert found == {"aaaa": [], "aabb": [], "cccc": []}
    found = {name: runs_by_fingerprint(tmp_path)(name + "0" * 60) for name in ("aaaa", "aabb", "cccc")}
    assert found == {"aaaa": [first], "aabb": [second], "cccc": []}
    assert runs_by_fingerprint(tmp_path / "nothing")("aaaa" + "0" * 60) == []


def test_of_equal_fingerprints_the_newest_is_found(tmp_path: Path) -> None:
    older, newer = make_folder(tmp_path, experiment="z"), make_folder(tmp_path, experiment="a")
    both = runs_by_fingerprint(tmp_path)(FINGERPRINT)
    assert newest(both) == newer
    older.update(started_s=newer.status().started_s + 1)
    assert newest(both) == older
    assert newest([]) is None


def test_runs_are_looked_for_once_and_a_copy_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_folder(tmp_path)
    for name in (f"{run.path.name}.old-copy", f"{'b' * 12}.old-copy", f"{'b' * 12}_mine"):
        shutil.copytree(run.path, run.path.with_name(name))
    glob, asked = Path.glob, []
    monkeypatch.setattr(Path, "glob", lambda path, pattern: (asked.append(pattern), glob(path, pattern))[1])
    assert find_runs(tmp_path) == [run]
    assert len([pattern for pattern in asked if "status.json" in pattern]) == 1

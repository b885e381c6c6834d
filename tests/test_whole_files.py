"""Files are written whole: whatever happens, they hold the old text or the new one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mxstudy.whole_files import replace_file, replace_files, replacing


def test_a_file_is_created_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in ("old", "new, with \u00fc"):
        replace_file(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_what_fails_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    replace_file(path, "old")

    def interrupted() -> None:
        with replacing(path) as temporary:
            temporary.write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_the_text_is_on_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (done.append("fsync"), fsync(descriptor))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("rename"), replace(a, b))[1])
    replace_file(tmp_path / "a.json", "text")
    assert done == ["fsync", "rename", "fsync"]  # the file, its name, the folder


def test_files_of_one_folder_appear_in_their_order_and_the_folder_is_flushed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (done.append("fsync"), fsync(descriptor))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(Path(b).name), replace(a, b))[1])
    replace_files(tmp_path, {"b.yaml": "first", "a.json": "last"})
    assert done == ["fsync", "b.yaml", "fsync", "a.json", "fsync"]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"b.yaml": "first", "a.json": "last"}

"""A valid config.yaml that was changed by hand belongs to another run, and is refused wherever it is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import call
from tracked import make_folder, training_row, write_rows

from mxstudy.launch.select import select
from mxstudy.reader import ConfigError, changed
from mxstudy.results import load
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.provenance import provenance
from mxstudy.tracking.unchanged import KEY, digest_of

CHANGED = r"config\.yaml: is not the config that this run was made with .*; restore it, or move the folder away"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = make_folder(tmp_path / "runs")
    write_rows(made, [training_row(0)])
    return made


def edit(folder: RunFolder, before: str, after: str) -> None:
    text = folder.config_path.read_text()
    assert before in text
    folder.config_path.write_text(text.replace(before, after))


def forget(folder: RunFolder) -> None:
    """Make it a folder of an earlier version."""
    about = folder.provenance()
    del about[KEY]
    folder.set_provenance(about)


def test_a_changed_config_is_refused_where_it_is_read(folder: RunFolder) -> None:
    edit(folder, "lr: 0.001", "lr: 0.002")
    for read in (folder.config, folder.config_values, lambda: load([folder.path], "runs")):
        with pytest.raises(ConfigError, match=CHANGED):
            read()


def test_it_is_left_out_of_a_list_of_runs_and_named(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_folder(tmp_path / "runs", "a" * 64)
    edit(folder, "lr: 0.001", "lr: 0.002")
    assert select([], tmp_path / "runs") == [other]
    assert "left out: " in (said := capsys.readouterr().out)
    assert f"{folder.config_path}: is not the config" in said
    assert call("+launch=status", f"runs_dir={tmp_path}/runs") == (0, "")


def test_what_decides_no_number_may_change(folder: RunFolder) -> None:
    """What a resumed run may change, and the order and layout of the file, decide no number."""
    edit(folder, "cache_dir: .cache", "# moved\ncache_dir:   /elsewhere")
    assert folder.config().cache_dir == "/elsewhere"
    later = changed(folder.config(), cache_dir=".cache", runs_dir="other")
    folder.go_on(later, provenance())
    assert folder.config() == later
    assert folder.provenance()[KEY] == digest_of(later)
    edit(folder, "lr: 0.001", "lr: 0.002")
    with pytest.raises(ConfigError, match=CHANGED):
        folder.config()


def test_folders_of_earlier_versions_are_believed(folder: RunFolder) -> None:
    forget(folder)
    edit(folder, "lr: 0.001", "lr: 0.002")
    assert folder.config().optimizer.lr == 0.002


def test_what_is_done_with_a_configs_values_changes_them_for_nobody_else(folder: RunFolder) -> None:
    folder.config_values()["optimizer"]["lr"] = 0.002
    assert folder.config_values()["optimizer"]["lr"] == 0.001


def test_a_config_of_another_schema_is_not_compared(folder: RunFolder) -> None:
    edit(folder, "\n  lr: 0.001", "\n  rate: 0.001")  # today's schema cannot read it
    assert folder.config_values()["optimizer"]["rate"] == 0.001
    edit(folder, "\n  rate: 0.001", "\n  lr: 0.002")
    about = folder.provenance()
    folder.set_provenance(about | {KEY: about[KEY] | {"schema": 0}})
    assert folder.config().optimizer.lr == 0.002

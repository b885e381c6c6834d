"""A run that a user names is found, or the message says where it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tracked import FINGERPRINT, make_folder

from mxstudy.launch.select import is_same, select
from mxstudy.reader import ConfigError
from mxstudy.tracking.named_runs import named_run


def test_a_rehearsal_that_is_named_among_the_real_runs_is_said_to_be_elsewhere(tmp_path: Path) -> None:
    own, real = make_folder(tmp_path / "rehearsals"), make_folder(tmp_path, "f" * 64)
    name = FINGERPRINT[:8]
    assert named_run(name, tmp_path / "rehearsals", "checkpoint").path == own.path
    with pytest.raises(ConfigError, match=rf"MLflow run id; give its folder, {re.escape(str(own.path))}$"):
        named_run(name, tmp_path, "checkpoint")
    with pytest.raises(ConfigError, match=rf"MLflow run id; give its folder, {re.escape(str(real.path))}$"):
        named_run("f" * 8, tmp_path / "rehearsals", "checkpoint")
    with pytest.raises(ConfigError, match=r"MLflow run id$"):
        named_run("0" * 8, tmp_path, "checkpoint")
    with pytest.raises(ConfigError, match=r"MLflow run id; give at least 6 digits of a fingerprint$"):
        named_run(name[:5], tmp_path, "checkpoint")
    with pytest.raises(ConfigError, match=rf"has run={name}; runs_dir={re.escape(str(tmp_path))}/rehearsals has one$"):
        select([f"run={name}"], tmp_path)


@pytest.mark.parametrize(
    ("text", "value", "same"),
    [
        ("1e-3", 0.001, True),
        ("6e2", 600, True),
        ("600", 600, True),
        ("true", True, True),
        ("true", 1, False),
        ("null", None, True),
        ("[0.9,0.95]", [0.9, 0.95], True),
        ("[0.9, 9.5e-1]", [0.9, 0.95], True),
        ("[0.9]", [0.9, 0.95], False),
        ("1", "1", True),
        ("[0.9", [0.9], False),
        ("${seed}", 1, False),
    ],
)
def test_a_value_is_selected_as_the_command_line_writes_it(text: str, value: object, same: bool) -> None:
    assert is_same(text, value) is same

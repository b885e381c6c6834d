"""A choice's file, read without Hydra, gives what Hydra composes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mxstudy.tracking import choices
from mxstudy.tracking.choices import choices_of, given


def test_a_choice_gives_what_its_file_and_those_below_it_say() -> None:
    assert given("norm", "mxnorm_p2") == {"norm.kind": "mxnorm", "norm.p": 2}
    assert given("optimizer", "adamw") == {"optimizer.kind": "adamw", "optimizer.lr": 2e-3}  # YAML 1.1 reads a word
    assert given("norm", "of_mine") is None
    assert "precision.kind" not in (given("precision", "mxfp8") or {})
    clean = given("fidelity", "clean") or {}
    assert (clean["precision.rounding"], clean["precision.scale_rule"]) == ("even", "floor")  # the second by paper_text
    assert "mxnorm_p1" in choices_of("norm")


def test_another_value_of_the_same_file_is_looked_up() -> None:
    nvfp4, olmo = given("precision", "nvfp4") or {}, given("model", "olmo") or {}
    assert nvfp4["precision.recipes.nvfp4.wgrad_dh.rounding"] == "stochastic"
    assert olmo["model.hidden_size"] == "${times:64,${.num_heads}}"  # Hydra computes it


def test_a_file_that_is_being_written_disturbs_no_other_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "CONF", tmp_path)
    (tmp_path / "norm").mkdir()
    (tmp_path / "norm/half_of_it.yaml").write_text("p: 2\n\teps: 1e-6")
    assert given("norm", "half_of_it") is None

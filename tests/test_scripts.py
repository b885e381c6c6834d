"""The command mxstudy has a version, and the scripts of analysis/."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from analysis.figures import FIGURES
from mxstudy import scripts
from mxstudy.__main__ import main
from mxstudy.reader import ConfigError
from mxstudy.tracking.folder import RunFolder

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FRESH = """
import sys
sys.argv = ["mxstudy", *sys.argv[1:]]
from mxstudy.__main__ import main
main()
print(sorted({"torch", "hydra", "mlflow"} & sys.modules.keys()))
"""


def test_every_figure_is_a_script_that_the_command_draws() -> None:
    assert {figure.module.removeprefix("analysis.") for figure in FIGURES} <= {*scripts.names()}
    assert not {*scripts.OTHERS} & {*scripts.names()}


def test_an_unknown_figure_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^figure loss_curve: no such figure; did you mean 'loss_curves'"):
        scripts.run(["figure", "loss_curve"])


@pytest.mark.parametrize("words", [["figure"], ["figure", "--help"]])
def test_the_figures_are_listed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    scripts.run(words)
    assert capsys.readouterr().out.splitlines() == scripts.names()


@pytest.mark.parametrize("words", [["report"], ["figure", "loss_curves", "runs/quick"], ["export", "--runs"]])
def test_a_script_without_runs_says_in_one_line_how_to_give_them(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        scripts.run(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"mxstudy {words[0]}.*: error: .*; --runs runs/NAME takes the runs of .*", line)


def test_who_reads_only_the_beginning_of_the_output_gets_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_more(words: list[str]) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(scripts, "run", write_more)
    monkeypatch.setattr(sys, "argv", ["mxstudy", "figure"])
    with (tmp_path / "output").open("w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit, match="1"):
            main()


@pytest.mark.integration
def test_the_version_loads_neither_torch_nor_hydra() -> None:
    said = subprocess.run([sys.executable, "-c", FRESH, "--version"], capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"mxstudy \d+\.\d+\.\d+\n\[\]\n", said)


@pytest.mark.integration
def test_a_table_is_exported(trained: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scripts.run(["export", "--runs", str(trained.path), "--name", "mine", "--to", str(tmp_path)])
    assert (tmp_path / "mine_runs.parquet").exists()
    assert "mine_runs.parquet: 1 rows" in capsys.readouterr().out


def test_changelog_and_citation_have_the_version_and_the_licence_of_the_package() -> None:
    version = PROJECT["version"]
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {version}\n" in citation
    assert f"\nlicense: {PROJECT['license']}\n" in citation
    assert (ROOT / "LICENSE").read_text().split()[:2] == ["Apache", "License"]

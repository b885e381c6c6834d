"""A script of analysis/ that cannot read a file ends with one line that names it, however it reads the file."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pandas as pd
import pytest
from each import each
from tracked import make_folder, training_row, write_rows

from analysis import export, report, style
from analysis.command import command
from analysis.figures import BENCHMARK, FIGURES
from analysis.instability import claims
from mxstudy import results

ANALYSIS = Path(report.__file__).parent
OTHERS = [(report, []), (export, ["--name", "x"]), (claims, ["--figure", "6"])]
OF_RUNS = {figure.module: figure.arguments.split() for figure in FIGURES if figure.kinds != BENCHMARK}
COMMANDS = [*((importlib.import_module(name), words) for name, words in OF_RUNS.items()), *OTHERS]
READ = ("status.json", "config.yaml", "provenance.json", "memberships.json")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for digit in "ab":
        folder = make_folder(tmp_path / "runs", digit * 64)
        write_rows(folder, [training_row(0)])
        folder.update(state="finished")
    return tmp_path / "runs"


def test_a_script_reads_the_runs_of_one_moment(runs: Path) -> None:
    """A run that begins meanwhile is in no frame of this script, and in all of the next."""
    numbers = []

    @command
    def script(digits: str) -> None:
        for kind, digit in zip(("runs", "metrics"), digits, strict=True):
            numbers.append(results.load([runs], kind)["fingerprint"].nunique())
            write_rows(make_folder(runs, digit * 64), [training_row(0)])

    script("cd")
    script("ef")
    assert numbers == [2, 2, 4, 4]


def said_by(script: object, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        script.main(arguments)  # type: ignore[attr-defined]
    assert ended.value.code
    return capsys.readouterr().err


def test_every_script_is_a_command() -> None:
    scripts = {path: path.read_text() for path in ANALYSIS.rglob("*.py")}
    mains = [path for path, text in scripts.items() if "\ndef main(" in text]
    assert len(mains) > len(OF_RUNS)
    assert [path for path in mains if "\n@command\ndef main(" not in scripts[path]] == []


@pytest.mark.integration
@each("name", READ)
@each("content", ["", '{"a": 1, "b"'])
def test_a_spoilt_file_of_one_run_is_named_by_every_command(
    name: str, content: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoilt = next(runs.glob(f"*/{'a' * 12}")) / name
    before = spoilt.read_text() if spoilt.exists() else None
    spoilt.write_text(content)
    for script, words in COMMANDS:
        (line,) = said_by(script, ["--runs", str(runs), *words], capsys).splitlines()[-1:]
        assert f"{spoilt}: cannot be read (" in line
    spoilt.unlink() if before is None else spoilt.write_text(before)


@pytest.mark.integration
@each(
    "name",
    ["instability.fig06_learning_rate_grid", "instability.fig09_depth_width", "students.decisive", "students.losses"],
)
def test_a_figure_of_students_says_so_of_other_runs(name: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = f"analysis.{name}"
    said = said_by(importlib.import_module(module), ["--runs", str(runs), *OF_RUNS[module]], capsys)
    assert "--runs: these are no students" in said.splitlines()[-1]


def test_the_code_of_runs_that_cannot_be_read_is_not_passed_over(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A caption reads only the runs' code, and without runs says nothing about it."""
    assert "1 run" in style.caption(pd.DataFrame({"label": ["a"], "fingerprint": ["a" * 64]}), "Shows.", [runs])
    next(runs.glob("*/b*/provenance.json")).write_text("")
    with pytest.raises(ValueError, match=r"provenance\.json: cannot be read"):
        style.caption(pd.DataFrame({"label": ["a"], "fingerprint": ["a" * 64]}), "Shows.", [runs])


@each("left", [b"", b"PAR1 and no more", None])
def test_a_spoilt_table_is_named(left: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "lot_runs.parquet"
    if left is None:  # a file that another program wrote
        pd.DataFrame({"a": [1]}).to_parquet(table)
    else:
        table.write_bytes(left)
    (line,) = said_by(export, ["--runs", str(tmp_path / "lot"), "--name", "x"], capsys).splitlines()
    assert line.startswith(f"{table}: cannot be read as a table of runs (")


@each(
    "module, words, said",
    [
        ("loss_comparison", ["--runs", "x", "--baseline", "rmsnorm"], "rmsnorm is not of the form GROUP=CHOICE"),
        ("export", ["--runs", "x", "--name", "x", "--every-steps", "0"], "0 is not a whole number above 0"),
        ("loss_curves", ["--runs", "x", "--name", "../loss"], "../loss leads out of figures/; give a name"),
        ("report", ["--runs", "x", "--name", "/tmp/loss"], "/tmp/loss leads out of figures/"),
        ("pages.__main__", ["student_teachers"], "no page is called student_teachers"),
    ],
)
def test_a_word_that_an_option_cannot_have_is_refused_in_one_line(
    module: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = said_by(importlib.import_module(f"analysis.{module}"), words, capsys).splitlines()
    assert said in line


@pytest.mark.integration
@each(
    "module, words",
    [
        ("models_table", ["--paper", "mxnorm"]),
        ("arm_losses", ["--of", "fp4_where"]),
        ("mxnorm.fig03_lr_sensitivity", []),
    ],
)
def test_a_figure_of_language_models_says_so_of_students(
    module: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    students = str(Path(__file__).parents[1] / "results/decisive")
    (line,) = said_by(importlib.import_module(f"analysis.{module}"), ["--runs", students, *words], capsys).splitlines()
    assert "error: the runs have no column" in line


def test_a_spoilt_benchmark_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kernels.json").write_text('{"rows": [')
    kernels = importlib.import_module("analysis.mxnorm.fig08_kernels")
    (line,) = said_by(kernels, ["--runs", str(tmp_path / "kernels.json")], capsys).splitlines()
    assert line.startswith(f"{tmp_path}/kernels.json: cannot be read (")


@pytest.mark.integration
@each(
    "uri, said",
    [
        ("http://127.0.0.1:9", "ConnectionRefusedError: .*; start that server again, or set MLFLOW_TRACKING_URI to"),
        ("sqlite:///text.db", "DatabaseError: file is not a database; .* set MLFLOW_TRACKING_URI to use another store"),
        ("htp://host", "MLFLOW_TRACKING_URI: 'htp://host' does not begin with one of sqlite,"),
    ],
)
def test_a_tracking_store_that_cannot_be_read_is_named(
    uri: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    (tmp_path / "text.db").write_text("no database" * 100)
    for script, words in COMMANDS[:1] + OTHERS[:1]:
        (line,) = said_by(script, ["--runs", "mlflow:quick", *words], capsys).splitlines()
        assert re.search(said, line)

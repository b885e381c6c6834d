"""Every row of bad_inputs.py ends in its line, and nothing is written.

Rows of WORDS go through the command line. Those of VALUES and FILES are composed and planned, as a command does before
it makes a run's folder. test_bad_input.py has what is found later, and whole commands with bad configs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_inputs import CHOICES, FILES, FOREIGN, LEFT, QUESTIONS, REMEDIES, TWO, VALUES, VARIABLES, WHOLE_FILES, WORDS
from commands import OWN_TEXT, SMALL, call, corpus, run
from composing import an_experiment, compose_job
from each import each
from quiz import ROWS, write_rows

from mxstudy.cli import composing
from mxstudy.config import PrepareData, PySource
from mxstudy.config.data import Bytes
from mxstudy.data.tokenizer import ByteTokenizer
from mxstudy.evaluation.checkpoints import describe
from mxstudy.evaluation.hugging_face import SHAPES
from mxstudy.launch import inline, plan
from mxstudy.launch.composed import Composed
from mxstudy.reader import ConfigError, flatten
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.found_runs import find_runs
from mxstudy.train.process_group import find_rank

TINY = ("+experiment=quickstart", "+debug=tiny")
TRIED = {"experiment": "quickstart"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder that the commands run in, with the files that they name."""
    folder, before = tmp_path_factory.mktemp("bad"), Path.cwd()
    os.chdir(folder)
    (folder / "a_file").touch()
    (folder / "a_folder").mkdir()
    os.mkfifo(folder / "a_pipe")
    (folder / "empty.txt").touch()
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "half.json").write_bytes(LEFT["half"])
    (folder / "deep.json").write_text("[" * 100_000)
    ByteTokenizer().save(folder / "tokenizer.json")
    for place in ("rows.jsonl", "a_set/train.jsonl"):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text('{"text": "a b c", "n": 1}\n' * 50)
    for name, change in QUESTIONS.items():
        (folder / name).mkdir()
        write_rows(folder / name / "arc_easy.test.jsonl", [ROWS["arc_easy"] | change])
    yield folder
    os.chdir(before)


def line_of(error: ConfigError) -> str:
    (line,) = str(error).splitlines()
    return line


def refused(here: Path, job: Composed) -> str:
    """Return the line with which a command's plan ends, and check that nothing was written."""
    before = sorted(here.rglob("*"))
    with pytest.raises(ConfigError) as caught:
        plan.plan([job])
    assert sorted(here.rglob("*")) == before
    return line_of(caught.value)


def test_there_are_a_hundred_rows() -> None:
    tables = (WORDS, VALUES, CHOICES, FILES, VARIABLES, FOREIGN, WHOLE_FILES)
    assert sum(map(len, tables)) + len(REMEDIES) * len(LEFT) > 150


@pytest.mark.integration
@each("command, line", WORDS)
def test_a_bad_word_is_refused(command: str, line: str, here: Path) -> None:
    before = sorted(here.iterdir())
    code, said = call_as_given(command.split())
    assert (code, len(said.splitlines())) == (1, 1), said
    assert line in said
    assert sorted(here.iterdir()) == before


def call_as_given(words: list[str]) -> tuple[int, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("commands.latest", list)  # a key that is given twice stays twice
        return call(*words)


@pytest.mark.integration
@each("group, content, line", CHOICES)
def test_a_bad_file_of_a_choice_is_named(group: str, content: bytes, line: str, here: Path, tmp_path: Path) -> None:
    file = tmp_path / group / "mine.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    words = ["+experiment=quickstart", "precision=mine"] if group == "precision" else [f"+{group}=mine"]
    code, said = call(*words, f"--config-dir={tmp_path}")
    assert (code, len(said.splitlines())) == (1, 1), said
    assert said.startswith(f"{file}: cannot be read (")
    assert line in said


@pytest.fixture(scope="module")
def by_override() -> dict[str, Composed]:
    """Return the job of each row of VALUES, from one launch: jobs that set the same keys share a composition."""
    loader, master, _ = an_experiment()
    (plain_job,) = composing.compose(loader, master, [TINY])
    known = flatten(plain_job.values)
    keys = {line.partition("=")[0] for line, _ in VALUES} & {key for key, value in known.items() if value is not None}
    same = {key: f"{key}={json.dumps(known[key])}" for key in sorted(keys)}

    def job(overrides: str) -> list[str]:
        key = overrides.partition("=")[0]
        return [*TINY, *(same | {key: overrides}).values()] if key in same else [*TINY, *overrides.split(" ")]

    jobs = composing.compose(loader, master, [job(line) for line, _ in VALUES])
    return dict(zip((line for line, _ in VALUES), jobs, strict=True))


@pytest.mark.integration
@each("overrides, line", VALUES)
def test_a_bad_value_is_refused(overrides: str, line: str, here: Path, by_override: dict[str, Composed]) -> None:
    assert line.replace("HERE", str(here)) in refused(here, by_override[overrides])


@pytest.mark.slow
@each("overrides, line", FILES)
def test_a_bad_file_is_refused_before_there_is_a_run(overrides: str, line: str, here: Path) -> None:
    asked = ("evaluation.every_steps=2", "evaluation.tasks=[arc_easy]") if "data_dir" in overrides else ()
    assert line in refused(here, compose_job(*SMALL, *asked, *overrides.split(" ")))


@each("changed, line", VARIABLES)
def test_a_bad_variable_is_refused(changed: dict[str, str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_rank(TWO | changed)
    assert line in line_of(caught.value)


@each("content, line", [*FOREIGN, *WHOLE_FILES])
def test_a_bad_hugging_face_config_is_refused(content: dict[str, object] | str, line: str, tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path / "tokenizer.json")
    sizes = dict.fromkeys(SHAPES, 64) | {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 257}
    values = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "max_position_embeddings": 64} | sizes
    (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(values | content))
    with pytest.raises(ConfigError) as caught:
        describe(tmp_path)
    assert line in line_of(caught.value)


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of runs with two in it, which have not begun anything."""
    folder = tmp_path_factory.mktemp("two")
    about = {"label": "a", "choices": {"experiment": "mine"}, "overrides": []}
    for digit in "ab":
        config = PrepareData(experiment="mine", data=PySource(), tokenizer=Bytes())
        RunFolder.create(folder / "mine" / (digit * 12), config, digit * 64, about)
    return folder


@each("name", REMEDIES)
@each("left", LEFT)
def test_a_spoilt_file_of_one_run_is_named_and_the_others_are_shown(
    name: str, left: str, two_runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = two_runs / "mine" / ("a" * 12) / name
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(LEFT[left])
    try:
        assert call("+launch=status", f"runs_dir={two_runs}") == (0, "")
    finally:
        path.unlink()
        if before is not None:
            path.write_bytes(before)
    said = capsys.readouterr().out
    is_fine = (name, left) == ("memberships.json", "list")  # a list of nothing
    assert is_fine or re.search(rf"^left out: {path}: cannot be read \(.*\); {REMEDIES[name]}", said, re.MULTILINE)
    assert re.search(rf"^mine/{'b' * 12} .* queued", said, re.MULTILINE)


@pytest.mark.integration
def test_a_command_that_meets_a_spoilt_run_names_it(here: Path) -> None:
    """A choice in a sub-folder, whose runs no command would find, is named too."""
    job = compose_job("+experiment=quickstart", "+debug=tiny", f"runs_dir={here}/spoilt")
    (planned,) = plan.plan([job])
    run = RunFolder.create(planned.folder, planned.config, planned.fingerprint, {"label": "", "choices": TRIED})
    for name, remedy in REMEDIES.items():
        path = run.path / name
        before = path.read_text() if path.exists() else None
        path.write_text("")
        assert re.search(rf"{path}: cannot be read \(it is empty\); {remedy}", refused(here, job))
        path.unlink() if before is None else path.write_text(before)
    assert isinstance(job.values, dict)
    job.values["experiment"] = "sub/mine"
    with pytest.raises(ConfigError, match=r"^experiment: 'sub/mine' is in a sub-folder; move its file to experiment/"):
        plan.plan([job])


@pytest.mark.slow
def test_where_one_folder_cannot_be_made_the_other_jobs_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    claim, asked = inline.claim, []

    def full(job: plan.Job) -> RunFolder:
        asked.append(job)
        if len(asked) == 1:
            raise OSError(28, "No space left on device", str(job.folder))
        return claim(job)

    monkeypatch.setattr(inline, "claim", full)
    assert call(*SMALL, *OWN_TEXT, corpus(tmp_path), "seed=1,2")[0] == 1
    assert [run.status().state for run in find_runs(tmp_path / "runs")] == ["finished"]
    said = capsys.readouterr().out
    assert re.search(r"failed: runs_dir: \S+ could not be made \(No space left on device: \S+\); make room", said)
    assert "1 of 2 jobs are not done" in said


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("size=4k", r"failed: runs_dir: .* could not be made \(No space left on device"),
        ("size=1m,nr_inodes=3", r"failed: runs_dir: .* could not be made \(No space left on device"),
        ("size=1m,ro", r"^runs_dir: no folder can be made in .*/disk \(.*\); give one that this user may write to$"),
    ],
)
def test_a_disk_without_room_for_a_folder(options: str, line: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o {options} tmpfs {disk}"):
        pytest.skip("cannot mount a small disk here")
    try:
        code, said = run(tmp_path, "+experiment=quickstart", "+debug=tiny", "tracking=none", f"runs_dir={disk}/runs")
        assert code == 1
        assert re.search(line, said, re.MULTILINE), said
        assert "Traceback" not in said
    finally:
        os.system(f"umount {disk}")


@pytest.mark.slow
@pytest.mark.integration
def test_a_locale_in_which_paths_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """In the C locale, where Python reads paths as UTF-8, a path with an umlaut works like any other."""
    folder = tmp_path / "\u00fc"
    folder.mkdir()
    command = [sys.executable, "-m", "mxstudy", *SMALL, *OWN_TEXT, corpus(tmp_path), 'runs_dir="\u00fc"']
    for variables, code, line in (
        ({"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, 1, "LC_ALL: file names are in ascii here; set LC_ALL=C.UTF"),
        ({}, 0, "loss"),
    ):
        environment = os.environ | {"LC_ALL": "C", "PYTHONPATH": str(Path(__file__).parents[1])} | variables
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
        assert ended.returncode == code, ended.stderr
        assert line in ended.stdout + ended.stderr
        assert "Traceback" not in ended.stderr

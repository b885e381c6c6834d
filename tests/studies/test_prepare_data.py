"""+experiment=prepare_data leaves shards and a report, survives a kill and damage, and feeds the training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import OWN_TEXT, SMALL, killed_at, run, run_here
from each import slow_but

from mxstudy.tracking.found_runs import find_runs
from mxstudy.tracking.journal import read_journal

pytestmark = pytest.mark.integration

TEXTS = [f"document {number % 50}: {'words ' * (number % 5)}" for number in range(60)]
COMMAND = ("+experiment=prepare_data", "data=slimpajama", "tokenizer=bytes", "tracking=none", "workers=2")


@pytest.fixture
def mirror(tmp_path: Path) -> str:
    for number in range(3):
        path = tmp_path / "mirror" / "train" / "chunk1" / f"example_train_{number}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[number::3]))
    return f"data.mirror={tmp_path / 'mirror'}"


MOMENTS = [r"open .*seen\.bin", r"open .*/\.manifest\.json\.", r"rename .*\.partial"]


def contents(folder: Path) -> dict[str, bytes]:
    (shards,) = (path for path in (folder / ".cache" / "shards").iterdir() if path.suffix == "")
    return {path.name: path.read_bytes() for path in shards.iterdir()}


def test_a_run(tmp_path: Path, mirror: str, capfd: pytest.CaptureFixture[str]) -> None:
    run_here(tmp_path, *COMMAND, mirror)
    (folder,) = find_runs(tmp_path / "runs")
    assert folder.status().state == "finished"
    manifest = json.loads((folder.path / "shards.json").read_text())
    assert contents(tmp_path)["manifest.json"] == json.dumps(manifest, indent=2).encode() + b"\n"
    assert sum(split["documents"] for split in manifest["splits"].values()) == len(set(TEXTS))
    assert sum(split["duplicates"] for split in manifest["splits"].values()) == len(TEXTS) - len(set(TEXTS))
    (last,) = read_journal(folder.journal_path)
    assert last["values"]["tokens"] == sum(len(text.encode()) + 1 for text in set(TEXTS))
    assert last["values"]["tokens_per_s"] > 0
    said = capfd.readouterr().out
    assert "tokens/s" in said
    assert "sha256 of 3 files verified" in said

    run_here(tmp_path, *COMMAND, mirror)
    assert "finished" in capfd.readouterr().out
    (shards,) = (tmp_path / ".cache" / "shards").glob("*/train-00000.bin")
    shards.write_bytes(bytes(shards.stat().st_size))
    with pytest.raises(SystemExit):
        run_here(tmp_path, *COMMAND, mirror, "rerun=true")
    assert "train-00000.bin: its sha256 is not the manifest's; delete" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("moment", slow_but([MOMENTS[1]], MOMENTS))
def test_killed_and_on(tmp_path: Path, mirror: str, moment: str) -> None:
    (tmp_path / "undisturbed").mkdir()
    run_here(tmp_path / "undisturbed", *COMMAND, mirror)
    code, said = run(tmp_path / "killed", *COMMAND, mirror, fault=killed_at(moment))
    assert code == -9, said
    code, said = run(tmp_path / "killed", *COMMAND, mirror)
    assert code == 0, said
    assert contents(tmp_path / "killed") == contents(tmp_path / "undisturbed")
    (folder,) = find_runs(tmp_path / "killed" / "runs")
    assert folder.status().state == "finished"


@pytest.mark.slow
def test_a_training_finds_what_was_prepared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"text {number} " * 50)
    data = [*OWN_TEXT, f"data.paths=[{tmp_path}/*.txt]"]
    run_here(
        tmp_path, "+experiment=prepare_data", "tracking=none", "workers=1", *(w for w in data if "valid" not in w[:5])
    )
    assert "tokenised in" in capfd.readouterr().out
    run_here(tmp_path, *SMALL, "train.steps=1", *data)
    assert "tokenis" not in capfd.readouterr().out
    assert len(find_runs(tmp_path / "runs")) == 2


@pytest.mark.slow
def test_the_corpora_of_a_blend_are_prepared_for_the_training_that_mixes_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for number in range(40):
        (tmp_path / f"{'ab'[number % 2]}{number}.txt").write_text(f"text {number} " * 50)
    own = "{{kind: files, format: text, paths: ['{}/{}*.txt'], validation_fraction: 0.2}}"
    data = ["data=blend", "data.phases=[{weights: {a: 1, b: 2}}]", "tokenizer=bpe_2k", "tokenizer.vocab_size=280"]
    data += [f"+data.corpora.{name}={own.format(tmp_path, name)}" for name in "ab"]
    run_here(tmp_path, "+experiment=prepare_data", "tracking=none", "workers=2", *data)
    (folder,) = find_runs(tmp_path / "runs")
    manifests = json.loads((folder.path / "shards.json").read_text())["corpora"]
    counts = [split for name in "ab" for split in manifests[name]["splits"].values()]
    rows = read_journal(folder.journal_path)
    assert rows[-1]["values"]["documents"] == rows[-1]["step"] == sum(split["documents"] for split in counts) == 40
    assert rows[-1]["values"]["tokens"] == sum(split["tokens"] for split in counts)
    said = capfd.readouterr().out
    assert "sha256 of 6 files verified" in said
    assert [said.count(f" {name} {split} ") for name in "ab" for split in ("train", "validation")] == [1] * 4
    run_here(tmp_path, *SMALL, "train.steps=1", "model.vocab_size=280", "validation.sequences=2", *data)
    assert "tokenis" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.mirror=nowhere"], "data.mirror: 'nowhere' is not a folder"),
        ([], "data.name: cannot load 'cerebras/SlimPajama-627B' on the Hugging Face hub"),
        (["MIRROR", "data.text_field=content"], "line 1 has no column 'content'"),
        (["MIRROR", "data.split=test"], "data.split: 'cerebras/SlimPajama-627B' has no 'test'"),
        (["MIRROR", f"cache_dir={'x' * 300}"], "cache_dir: File name too long: "),
        (["MIRROR", "workers=0"], "workers: must lie in 1 .. 4,096, not 0; null: all"),
        (
            ["MIRROR", "tokenizer=pretrained", "tokenizer.name=nowhere.json"],
            "tokenizer.name: 'nowhere.json' is neither",
        ),
    ],
)
def test_what_cannot_be_prepared_is_refused_before_anything_is_written(
    tmp_path: Path, mirror: str, words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match=message.replace("(", r"\(")):
        run_here(tmp_path, *COMMAND, *(mirror if word == "MIRROR" else word for word in words))
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / ".cache").exists()

"""Bad input, as a user meets it: a message that says what is wrong and what would be right, and nothing lost."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import OWN_TEXT, SMALL, Fault, call, corpus, run, status, the_run

from mxstudy.config import Bytes
from mxstudy.data.tokenizer import load_tokenizer
from mxstudy.tracking import mlflow as mirroring
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.journal import read_journal


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_journal(the_run(folder) / "metrics.jsonl") if "loss" in row]


def steps_kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (the_run(folder) / "checkpoints").iterdir())


# -------------------------------------------------------------------------------- refused before a run is made

REFUSED = [
    (["model.hidden_size=48", "precision=mxfp8"], "precision.block_size: 32 does not divide layers.0", "size 48"),
    (["model.hidden_size=48", "norm=mxnorm_p2"], "model.hidden_size: 48 does not divide into blocks of 32"),
    (["model.ffn_size=80", "precision=mxfp8"], "precision.block_size: 32 does not divide layers.0", "size 80"),
    (["model.num_heads=3"], "model.num_heads: hidden_size 64 does not divide into 3 heads of an even size"),
    (["norm=mxnorm_p2", "norm.p=0"], "norm.p: the exponent of the p-mean must be positive and finite, not 0.0"),
    (["norm=mxnorm_p2", "norm.p=-1"], "norm.p: the exponent of the p-mean must be positive and finite, not -1.0"),
    (["model.vocab_size=256"], "model.vocab_size: 256 is smaller than the tokenizer's 257"),
    (["tracking.uri=file:///tmp/mlruns"], "would be a file store", "give sqlite:///mlflow.db or http://HOST:PORT"),
    (["tracking.uri=ftp://host"], "tracking.uri: 'ftp://host' is none of sqlite, postgresql"),
    (["precision=mxfp8", "train.micro_batch_size=1", "train.sequence_length=40"], "train.micro_batch_size: 40 tokens"),
    (["train.device=gpu"], "train.device: 'gpu' is not a choice", "cpu"),
]


PLANS = [
    ("{layres.*: mxfp8}", "pattern 'layres.*' matches no linear", "did you mean 'layers.*'?"),
    ("{layers.*: mxpf8}", "'mxpf8' is not a choice", "did you mean 'mxfp8'?"),
    ("{layers.*: mxfp8, layers.7.*: bf16}", "'layers.7.*' matches no linear", "layers."),
]


@pytest.mark.integration
@pytest.mark.parametrize("row", REFUSED, ids=lambda row: " ".join(row[0]))
def test_what_cannot_run_is_refused_and_nothing_is_written(row: tuple[list[str], *tuple[str, ...]], here: Path) -> None:
    arguments, *words = row
    code, said = call("+experiment=quickstart", "+debug=tiny", *arguments)
    assert code == 1
    assert [word for word in words if word not in said] == []
    assert len(said.splitlines()) == 1
    assert list(here.iterdir()) == []


def test_a_misspelt_key_inside_a_yaml_file_is_refused(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("conf")
    (folder / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - /study: pretrain\n  - _self_\ntrain:\n  stepz: 7\n"
    (folder / "experiment" / "mine.yaml").write_text(text)
    code, said = call("+experiment=mine", f"--config-dir={folder}")
    assert (code, said) == (1, "train.stepz: no such key; did you mean 'steps'?")
    assert list(here.iterdir()) == []


@pytest.mark.integration
@pytest.mark.parametrize("row", PLANS, ids=lambda row: row[0])
def test_a_plan_that_fits_no_module_is_refused(
    row: tuple[str, ...], here: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plan, *words = row
    folder = tmp_path_factory.mktemp("conf")
    (folder / "precision").mkdir()
    text = f"defaults:\n  - base_precision\nschedule:\n  - {{from_step: 0, plan: {plan}}}\n"
    (folder / "precision" / "mine.yaml").write_text(text)
    code, said = call("+experiment=quickstart", "+debug=tiny", "precision=mine", f"--config-dir={folder}")
    assert code == 1
    assert [word for word in words if word not in said] == [], said
    assert list(here.iterdir()) == []


# ------------------------------------------------------- found when the corpus is read: failed before the training


def unreadable(folder: Path) -> None:
    (folder / "corpus" / "05.txt").write_bytes(b"caf\xe9")


def empty(folder: Path) -> None:
    for path in (folder / "corpus").iterdir():
        path.write_text("")


def short(folder: Path) -> None:
    for path in sorted((folder / "corpus").iterdir())[1:]:
        path.unlink()


CORPORA = {
    "not UTF-8": (unreadable, [], r"data: .*/corpus/05\.txt is not UTF-8: .* at byte 3"),
    "empty": (empty, [], "data: the corpus is empty: it has no text"),
    "short": (
        short,
        ["data.validation_fraction=0", "train.sequence_length=4096"],
        r"train\.sequence_length: the training split is shorter than one sequence: \d+ tokens, and 4096 \+ 1",
    ),
    "few": (
        lambda folder: None,
        ["validation.sequences=100000"],
        r"validation\.sequences: 100000 of 32 tokens are more than the validation split holds: \d+; ask for fewer",
    ),
}


@pytest.mark.integration
@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_that_will_not_do_fails_before_the_training(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = corpus(here)
    spoil, arguments, message = CORPORA[name]
    spoil(here)
    assert call(*SMALL, *OWN_TEXT, *arguments, paths)[0] == 1
    assert status(here).state == "failed"
    assert re.search(message, status(here).reason or "")
    assert re.search(f"failed: ConfigError: {message}", capsys.readouterr().out)
    assert not (the_run(here) / "metrics.jsonl").exists()
    assert not (the_run(here) / "checkpoints").exists()


@pytest.mark.integration
def test_a_tokenizer_larger_than_the_model_fails_before_the_training(here: Path) -> None:
    load_tokenizer(Bytes(), lambda: iter([]), here / "none").save(here / "own.json")
    pretrained = ("tokenizer=pretrained", f"tokenizer.name={here / 'own.json'}", "model.vocab_size=128")
    assert call(*SMALL, *OWN_TEXT, *pretrained, corpus(here))[0] == 1
    assert re.search(r"model\.vocab_size: 128 is smaller than the tokenizer's \d+", status(here).reason or "")
    assert not (the_run(here) / "metrics.jsonl").exists()


# ------------------------------------------------------------------------------------- met by a run that resumes


def truncated(newest: Path) -> str:
    (file,) = newest.glob("*.safetensors")
    os.truncate(file, 1000)
    return r"CheckpointError: .*step_00000006: truncated or unreadable \(.*\); delete that folder to resume from"


def of_another_run(newest: Path) -> str:
    about = json.loads((newest / "checkpoint.json").read_text())
    (newest / "checkpoint.json").write_text(json.dumps(about | {"fingerprint": "a" * 64}))
    return r"CheckpointError: .*step_00000006: of run aaaaaaaaaaaa, not [0-9a-f]{12}; give it its own folder back"


def without_its_json(newest: Path) -> str:
    (newest / "checkpoint.json").write_text("{}")
    return r"CheckpointError: .*step_00000006: no readable checkpoint\.json"


@pytest.mark.integration
@pytest.mark.parametrize("spoil", [truncated, of_another_run, without_its_json])
def test_a_spoilt_checkpoint_fails_the_run_and_the_one_before_goes_on(spoil: Callable[[Path], str], here: Path) -> None:
    command = (*SMALL, *OWN_TEXT, corpus(here))
    assert call(*command)[0] == 0
    undisturbed = losses(here)
    RunFolder(the_run(here)).update(state="preempted")
    newest = the_run(here) / "checkpoints" / "step_00000006"
    message, kept = spoil(newest), (the_run(here) / "metrics.jsonl").read_bytes()
    assert call(*command)[0] == 1
    assert status(here).state == "failed"
    assert re.match(message, status(here).reason or "")
    assert steps_kept(here) == ["step_00000004", "step_00000006"]
    assert (the_run(here) / "metrics.jsonl").read_bytes() == kept
    newest.rename(here / "away")
    assert call(*command)[0] == 0
    assert losses(here) == undisturbed


@pytest.mark.integration
def test_other_shards_are_refused_on_a_resume(here: Path) -> None:
    command = (*SMALL, *OWN_TEXT, corpus(here))
    assert call(*command)[0] == 0
    RunFolder(the_run(here)).update(state="preempted")
    path = the_run(here) / "shards.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "<u4"}))
    assert call(*command)[0] == 1
    assert re.search(r"ConfigError: data: the shards in .* are not those that .* began with", status(here).reason or "")
    assert len(losses(here)) == 6


@pytest.mark.integration
@pytest.mark.parametrize(
    ("where", "reason", "kept"),
    ids=["while a checkpoint is written", "while the journal is"],
    argvalues=[
        (
            r"open .*/\.step_00000004.*safetensors",
            r"CheckpointError: .*No space left on device\); .*step_00000002 stays",
            4,
        ),
        (r'os\.write .*"step": 3, "tokens"', r"OSError: \[Errno 28\] No space left on device", 3),
    ],
)
def test_a_full_disk_fails_the_run_which_goes_on_when_there_is_room(
    where: str, reason: str, kept: int, tmp_path: Path
) -> None:
    command = (*SMALL, *OWN_TEXT, corpus(tmp_path))
    assert run(tmp_path / "roomy", *command)[0] == 0
    full = tmp_path / "full"
    code, said = run(full, *command, fault=Fault(where, errno=errno.ENOSPC))
    assert code == 1, said
    assert status(full).state == "failed"
    assert re.match(reason, status(full).reason or "")
    assert steps_kept(full) == ["step_00000002"]
    assert losses(full) == losses(tmp_path / "roomy")[:kept]
    code, said = run(full, *command)
    assert code == 0, said
    assert "goes on: was failed at step" in said
    assert losses(full) == losses(tmp_path / "roomy")
    assert status(full).reason is None


@pytest.mark.integration
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    command = (*SMALL, *OWN_TEXT, corpus(tmp_path), "model.vocab_size=2048", f"cache_dir={tmp_path}/cache")
    assert run(tmp_path / "roomy", *command)[0] == 0
    checkpoint = the_run(tmp_path / "roomy") / "checkpoints" / "step_00000006"
    size = sum(file.stat().st_size for file in checkpoint.iterdir())
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size={int(1.6 * size)} tmpfs {disk}"):
        pytest.skip("cannot mount a small disk here")
    try:
        code, said = run(disk, *command)
        assert code == 1, said
        assert status(disk).state == "failed"
        assert "No space left on device" in (status(disk).reason or "")
        assert steps_kept(disk) == ["step_00000002"]
        os.system(f"mount -o remount,size=100m {disk}")
        assert run(disk, *command)[0] == 0
        assert losses(disk) == losses(tmp_path / "roomy")
    finally:
        os.system(f"umount {disk}")


# ------------------------------------------------------------------------------------------- results and servers


@pytest.mark.integration
def test_a_divergence_in_a_sweep_is_a_result(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = (*SMALL, *OWN_TEXT, corpus(here), "optimizer.lr=1e-3,1e20", "checkpoint.every_steps=0")
    assert call(*sweep) == (0, "")
    states = {RunFolder(path.parent).status().state for path in here.glob("runs/*/*/status.json")}
    assert states == {"finished", "diverged"}
    said = capsys.readouterr().out
    assert said.count("(diverged)") == 1
    assert "not done" not in said
    assert call(*sweep) == (0, "")
    assert sorted(re.findall("skipped: [a-z]+", capsys.readouterr().out)) == ["skipped: diverged", "skipped: finished"]


@pytest.mark.integration
def test_a_server_that_is_away_at_the_start_is_caught_up_with_later(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirroring, "LAST_CHANCE_S", 0.1)
    command = (*SMALL, *OWN_TEXT, corpus(here), "tracking=mlflow")
    away = "http://127.0.0.1:9"
    assert call(*command, f"tracking.uri={away}") == (0, "")
    said = capsys.readouterr().out
    assert re.search(rf"tracking: {away}: .*refused.*; the runs go on with their journals", said)
    assert re.search(rf"tracking: {away}: .*; the journal has everything", said)
    assert (status(here).state, len(losses(here))) == ("finished", 6)

    (here / "mlflow.db").write_text("this is no database, " * 100)
    database = f"tracking.uri=sqlite:///{here}/mlflow.db"
    assert call(*command, database) == (0, "")
    assert "file is not a database" in capsys.readouterr().out
    (here / "mlflow.db").unlink()
    assert call(*command, database) == (0, "")
    said = capsys.readouterr().out
    assert "skipped: finished" in said
    assert "the journal has everything" not in said
    client = mirroring.connect(f"sqlite:///{here}/mlflow.db")
    (found,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    points = client.get_metric_history(found.info.run_id, "train/loss")
    assert sorted((point.step, point.value) for point in points) == list(enumerate(losses(here)))
    assert found.info.status == "FINISHED"

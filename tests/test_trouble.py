"""A run that meets trouble says what it is, loses nothing, and continues by the same command."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import OWN_TEXT, SMALL, Fault, call, corpus, run, run_here, status, the_run
from each import slow_but

from mxstudy.reader import ConfigError
from mxstudy.studies.pretrain.run import check_journal
from mxstudy.tracking import mlflow_mirror as mirroring
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.found_runs import find_runs
from mxstudy.tracking.journal import read_journal
from mxstudy.train.checkpoint import checksum_of


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_journal(the_run(folder) / "metrics.jsonl") if "loss" in row]


def steps_kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (the_run(folder) / "checkpoints").iterdir())


# ------------------------------------------------------------------------------------- met by a run that resumes


def truncated(newest: Path) -> str:
    (file,) = newest.glob("*.safetensors")
    os.truncate(file, 1000)
    return (
        r"CheckpointError: .*step_00000006: truncated or unreadable \(.*\); delete that folder to use the one before it"
    )


def of_another_run(newest: Path) -> str:
    about = json.loads((newest / "checkpoint.json").read_text()) | {"fingerprint": "a" * 64}
    del about["checksum"]
    (newest / "checkpoint.json").write_text(json.dumps(about | {"checksum": checksum_of(about)}))
    return r"CheckpointError: .*step_00000006: belongs to run aaaaaaaaaaaa, not [0-9a-f]{12}; move it back to its"


def without_its_json(newest: Path) -> str:
    (newest / "checkpoint.json").write_text("{}")
    return r"CheckpointError: .*step_00000006: no readable checkpoint\.json"


def ahead_of_its_journal(newest: Path) -> str:
    """Leave what a power failure leaves if the journal's last rows did not survive it."""
    journal = newest.parent.parent / "metrics.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(line for line in lines if '"step": 5' not in line))
    return (
        r"ConfigError: .*metrics\.jsonl: step 5 is missing, .* step 6; to go on from step_00000004, delete the folders"
    )


SPOILT = [truncated, of_another_run, without_its_json, ahead_of_its_journal]


@pytest.mark.integration
@pytest.mark.parametrize("spoil", slow_but([truncated], SPOILT))
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
    tokenizer = the_run(here) / "tokenizer.json"
    whole = tokenizer.read_bytes()
    tokenizer.write_bytes(whole[:99])
    assert call(*command)[0] == 0
    assert losses(here) == undisturbed
    assert tokenizer.read_bytes() == whole


def test_a_checkpoint_without_a_journal_says_what_to_delete(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_00000006").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"jsonl: step 0 is missing, .* to go on from the beginning, delete the fold"):
        check_journal(RunFolder(tmp_path), 6)


@pytest.mark.integration
def test_a_flipped_bit_in_a_shard_is_refused_before_the_first_step(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = (*SMALL, *OWN_TEXT, corpus(here), f"cache_dir={here}/cache")
    assert call(*command)[0] == 0
    (shard,) = (here / "cache").glob("shards/*/train-00000.bin")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert call(*command, "seed=1")[0] == 1
    newest = max(find_runs(here / "runs"), key=lambda found: found.status().started_s)
    assert re.search(r"train-00000\.bin: its sha256 is not the manifest's; delete", newest.status().reason or "")
    capsys.readouterr()
    assert call(*command, "seed=2", "train.verify=false")[0] == 0
    assert "train.verify=false: the shards are not compared with their sha256" in capsys.readouterr().out


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


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, ...], list[float]]:
    """Return a command and its losses where there is room."""
    folder = tmp_path_factory.mktemp("roomy")
    command = (*SMALL, *OWN_TEXT, corpus(folder))
    run_here(folder, *command)
    return command, losses(folder)


@pytest.mark.slow
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
    where: str, reason: str, kept: int, roomy: tuple[tuple[str, ...], list[float]], tmp_path: Path
) -> None:
    command, undisturbed = roomy
    full = tmp_path / "full"
    code, said = run(full, *command, fault=Fault(where, errno=errno.ENOSPC))
    assert code == 1, said
    assert status(full).state == "failed"
    assert re.match(reason, status(full).reason or "")
    assert steps_kept(full) == ["step_00000002"]
    assert losses(full) == undisturbed[:kept]
    code, said = run(full, *command)
    assert code == 0, said
    assert "goes on: was failed at step" in said
    assert losses(full) == undisturbed
    assert status(full).reason is None


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    command = (*SMALL, *OWN_TEXT, corpus(tmp_path), "model.vocab_size=2048", f"cache_dir={tmp_path}/cache")
    (tmp_path / "roomy").mkdir()
    run_here(tmp_path / "roomy", *command)
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
    assert len(re.findall(r"^ *\S+ +1 +1 +- ", said, re.MULTILINE)) == 1  # an arm of one run, which died
    assert "not done" not in said
    assert call(*sweep) == (0, "")
    assert sorted(re.findall("skipped: [a-z]+", capsys.readouterr().out)) == ["skipped: diverged", "skipped: finished"]


@contextmanager
def silent_server(until: Callable[[], bool]) -> Iterator[tuple[str, list[bool]]]:
    """Serve an address that accepts connections and answers none.

    At the first connection it waits until `until`, then it goes away. The list says whether that happened within a
    minute.
    """
    listener, came = socket.create_server(("127.0.0.1", 0)), list[bool]()

    def accept() -> None:
        with listener, listener.accept()[0]:
            deadline_s = time.monotonic() + 60
            while not (done := until()) and time.monotonic() < deadline_s:
                time.sleep(0.02)
            came.append(done)

    thread = threading.Thread(target=accept)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", came
    thread.join()


@pytest.mark.slow
def test_no_step_waits_for_a_server_that_is_silent(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No step waits while the sweep's parent is to be made, or while a skipped run has something to send."""
    monkeypatch.setattr(mirroring, "LAST_CHANCE_S", 0.1)
    command = (*SMALL, *OWN_TEXT, corpus(here))
    assert call(*command) == (0, "")

    def all_trained() -> bool:
        journals = [path.read_text() for path in here.glob("runs/*/*/metrics.jsonl")]
        return len(journals) == 2 and all('"step": 5, "tokens"' in text for text in journals)

    with silent_server(all_trained) as (uri, came):
        assert call(*command, "seed=0,1", "tracking=mlflow", f"tracking.uri={uri}") == (0, "")
    assert came == [True]
    assert f"tracking: {uri}: " in capsys.readouterr().out


def wait_for_mirrors() -> None:
    """Wait until no mirror that has given up is still in its last call, which would meet a half-copied database."""
    for thread in threading.enumerate():
        if thread.name == "mirror":
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.slow
def test_a_server_that_is_away_at_the_start_is_caught_up_with_later(
    here: Path, empty_store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (*SMALL, *OWN_TEXT, corpus(here), "tracking=mlflow")
    away, database = "http://127.0.0.1:9", f"tracking.uri=sqlite:///{here}/mlflow.db"
    with monkeypatch.context() as patches:
        patches.setattr(mirroring, "LAST_CHANCE_S", 0.1)
        assert call(*command, f"tracking.uri={away}") == (0, "")
        said = capsys.readouterr().out
        assert re.search(rf"tracking: {away}: .*refused.*; the runs continue with their journals only", said)
        assert re.search(rf"tracking: {away}: .*; the journal has everything", said)
        assert (status(here).state, len(losses(here))) == ("finished", 6)

        (here / "mlflow.db").write_text("this is no database, " * 100)
        assert call(*command, database) == (0, "")
        assert "file is not a database" in capsys.readouterr().out
    wait_for_mirrors()
    shutil.copy(empty_store, here / "mlflow.db")
    assert call(*command, database) == (0, "")
    said = capsys.readouterr().out
    assert "skipped: finished" in said
    assert "the journal has everything" not in said
    client = mirroring.connect(f"sqlite:///{here}/mlflow.db")
    (found,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    points = client.get_metric_history(found.info.run_id, "train/loss")
    assert sorted((point.step, point.value) for point in points) == list(enumerate(losses(here)))
    assert found.info.status == "FINISHED"

"""A preparation that is killed continues where it was, and its files have the bytes of an undisturbed one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from each import slow_but

from mxstudy import config
from mxstudy.data import build_shards as build
from mxstudy.data import growing_shards as partial
from mxstudy.data.shards import locate, prepare, verify
from mxstudy.reader import ConfigError

BPE = config.TrainedBPE(vocab_size=280)
ROWS = [f"document {i % 300}: {'words ' * (i % 7)}" for i in range(400)]  # a hundred of them are there twice

# Prepares in another process, and prints each line of progress. After each it waits for a line of ours.
CHILD = """
import sys
from pathlib import Path
from mxstudy import config
from mxstudy.data import build_shards as build
from mxstudy.data.shards import prepare

def report(line):
    print(line, flush=True)
    sys.stdin.readline()

if __name__ == "__main__":
    build.BATCH_CHARACTERS, build.MAX_FILE_TOKENS, build.REPORT_EVERY_S, build.NOTE_EVERY_S = 200, 500, 0.0, 0.0
    data = config.Files(format="jsonl", paths=(sys.argv[1],), validation_fraction=0.2)
    prepare(data, config.TrainedBPE(vocab_size=280), Path(sys.argv[2]), report, workers=int(sys.argv[3]))
"""


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    return config.Files(format="jsonl", paths=(str(path),), validation_fraction=0.2)


@pytest.fixture
def small(monkeypatch):
    """Make batches of a few documents and files of a few batches, with a note after each."""
    for name, value in {"BATCH_CHARACTERS": 200, "MAX_FILE_TOKENS": 500, "NOTE_EVERY_S": 0.0}.items():
        monkeypatch.setattr(build, name, value)


def silent(line: str) -> None:
    """Ignore lines of progress."""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stop_after(batches: int):
    left = iter(range(batches - 1))

    def watch(counts, tokens_per_s):
        if next(left, None) is None:
            raise KeyboardInterrupt

    return watch


def interrupted(data, cache: Path, batches: int) -> Path:
    """Return the folder of a preparation that stopped after so many batches."""
    with pytest.raises(KeyboardInterrupt):
        prepare(data, BPE, cache, silent, on_counts=stop_after(batches))
    return locate(data, BPE, cache)[0].with_suffix(".partial")


def child(tmp_path: Path, data, workers: int) -> subprocess.Popen:
    (tmp_path / "child.py").write_text(CHILD)
    words = [sys.executable, tmp_path / "child.py", data.paths[0], tmp_path / "cache", str(workers)]
    environment = os.environ | {"PYTHONPATH": str(Path(build.__file__).parents[2])}
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "lines"), slow_but([(2, 25)], [(0, 4), (0, 40), (2, 25)]))
def test_sigkill_and_on(tmp_path, data, small, workers, lines):
    undisturbed = contents(prepare(data, BPE, tmp_path / "undisturbed", silent).folder)
    with child(tmp_path, data, workers) as process:
        for _ in range(lines):
            assert process.stdout.readline()
            process.stdin.write("\n")
            process.stdin.flush()
        processes = psutil.Process(process.pid).children(recursive=True)
        assert len(processes) >= workers
        process.send_signal(signal.SIGKILL)
    assert psutil.wait_procs(processes, timeout=20)[1] == []

    left = contents(locate(data, BPE, tmp_path / "cache")[0].with_suffix(".partial"))
    state = json.loads(left["state.json"])
    finished = [name for name, entry in state["files"].items() if entry["bytes"] == 1000]
    assert len(finished) >= (lines > 20)
    assert all(left[name] == undisturbed[name] for name in finished)

    said: list[str] = []
    shards = prepare(data, BPE, tmp_path / "cache", said.append)
    assert said[1].startswith(f"continuing after {sum(c['documents'] for c in state['counts'].values()):,} documents")
    assert contents(shards.folder) == undisturbed
    verify(shards)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_killed_as_it_notes(tmp_path, data, small, monkeypatch, name):
    """It is killed just before the file takes its place, and just after."""
    undisturbed = contents(prepare(data, BPE, tmp_path / "undisturbed", silent).folder)
    replace = partial.replace_file
    for number, after in enumerate((False, True)):

        def fail(path, text, after=after):
            if path.name != name or after:
                replace(path, text)
            if path.name == name:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(partial, "replace_file", fail)
            with pytest.raises(KeyboardInterrupt):
                prepare(data, BPE, tmp_path / f"{number}", silent)
        assert contents(prepare(data, BPE, tmp_path / f"{number}", silent).folder) == undisturbed


@pytest.mark.integration
def test_every_moment_between_batches(tmp_path, data, small):
    undisturbed = contents(prepare(data, BPE, tmp_path / "undisturbed", silent).folder)
    for batches in (1, 2, 17):
        cache = tmp_path / f"{batches}"
        interrupted(data, cache, batches)
        interrupted(data, cache, batches)
        assert contents(prepare(data, BPE, cache, silent).folder) == undisturbed


@pytest.mark.integration
def test_what_was_written_behind_the_last_note_is_cut_off(tmp_path, data, small):
    undisturbed = contents(prepare(data, BPE, tmp_path / "undisturbed", silent).folder)
    folder = interrupted(data, tmp_path / "cache", 20)
    for name in ("train-00000.bin", "validation-00000.bin", "seen.bin", "train-00099.bin"):
        with (folder / name).open("ab") as file:
            file.write(b"torn")
    assert "train-00099.bin" not in json.loads((folder / "state.json").read_text())["files"]
    assert contents(prepare(data, BPE, tmp_path / "cache", silent).folder) == undisturbed


@pytest.mark.integration
@pytest.mark.parametrize("name", ["train-00000.bin", "train-00001.bin", "seen.bin"])
def test_damage_is_found_before_work_goes_on(tmp_path, data, small, name):
    folder = interrupted(data, tmp_path / "cache", 30)
    content = bytearray((folder / name).read_bytes())
    content[7] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}: its sha256 is not the one recorded .*; delete .* again"):
        prepare(data, BPE, tmp_path / "cache", silent)
    (folder / name).write_bytes(content[:-2])
    with pytest.raises(ConfigError, match=f"{name}: {len(content) - 2} bytes, not {len(content)}; delete"):
        prepare(data, BPE, tmp_path / "cache", silent)


@pytest.mark.integration
def test_workers_change_no_byte(tmp_path, data, small):
    alone, together = (prepare(data, BPE, tmp_path / str(n), silent, workers=n).folder for n in (0, 2))
    assert contents(alone) == contents(together)


def test_what_watches_is_told(tmp_path, data, small):
    told = []
    began_s = time.monotonic()
    shards = prepare(
        data, BPE, tmp_path, silent, on_counts=lambda counts, rate: told.append((build.tokens(counts), rate))
    )
    total = sum(split["tokens"] for split in shards.manifest["splits"].values())
    assert told[-1][0] == total
    assert told[-1][1] >= total / (time.monotonic() - began_s)
    assert [tokens for tokens, _ in told] == sorted(tokens for tokens, _ in told)

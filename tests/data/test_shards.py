"""Shards are prepared once, whole or not at all, and the manifest says what the files hold."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mxstudy import config
from mxstudy.data import build_shards as build
from mxstudy.data.content_hash import split_of
from mxstudy.data.shards import open_shards, prepare, verify
from mxstudy.reader import ConfigError

ROWS = [f"document {i}: {'words ' * (i % 7)}" for i in range(60)]
BPE = config.TrainedBPE(vocab_size=280)

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

build.BATCH_CHARACTERS, build.REPORT_EVERY_S = 200, 0.0
data = config.Files(format="jsonl", paths=(sys.argv[1],), validation_fraction=0.2)
prepare(data, config.TrainedBPE(vocab_size=280), Path(sys.argv[2]), report)
"""


def silent(line: str) -> None:
    pass


def jsonl(path: Path, rows: list[str]) -> config.Files:
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return config.Files(format="jsonl", paths=(str(path),), validation_fraction=0.2)


@pytest.fixture
def data(tmp_path):
    return jsonl(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def documents(shards, split) -> list[str]:
    """Return the decoded split, cut at EOS. The last document must end too."""
    ids = shards.tokens(split)[:]
    tokenizer = shards.tokenizer()
    *parts, rest = np.split(ids, np.flatnonzero(ids == tokenizer.eos_id) + 1)
    assert len(rest) == 0
    return [tokenizer.backend.decode(part[:-1].tolist(), skip_special_tokens=False) for part in parts]


@pytest.mark.parametrize("tokenizer", [config.Bytes(), BPE])
def test_shards_hold_the_corpus(data, cache, tokenizer):
    shards = prepare(data, tokenizer, cache, silent)
    for split in ("train", "validation"):
        expected = [row for row in ROWS if split_of(row, 0.2) == split]
        assert documents(shards, split) == expected
        assert len(expected) > 5
        count = shards.manifest["splits"][split]
        assert count["documents"] == len(expected)
        assert count["duplicates"] == 0
        assert count["bytes"] == len("".join(expected))
        assert count["tokens"] == len(shards.tokens(split))
    verify(shards)


def test_duplicates_are_dropped_and_counted(tmp_path, cache, data):
    plain = prepare(data, config.Bytes(), cache, silent)
    again = prepare(jsonl(tmp_path / "twice.jsonl", ROWS + ROWS[::-1]), config.Bytes(), cache, silent)
    for split in ("train", "validation"):
        assert documents(again, split) == documents(plain, split)
        count = again.manifest["splits"][split]
        assert count["duplicates"] == count["documents"]


def test_manifest_names_what_decides_the_tokens(data, cache):
    shards = prepare(data, BPE, cache, silent)
    manifest = json.loads((shards.folder / "manifest.json").read_text())
    assert manifest == shards.manifest
    assert manifest["corpus"]["sha256"] == [hashlib.sha256(Path(data.paths[0]).read_bytes()).hexdigest()]
    assert manifest["tokenizer"]["sha256"] == manifest["files"]["tokenizer.json"]["sha256"]
    assert manifest["tokenizer"]["vocab_size"] == 280
    assert manifest["tokenizer"]["eos_id"] == shards.tokenizer().eos_id
    for name, entry in manifest["files"].items():
        assert entry["sha256"] == hashlib.sha256((shards.folder / name).read_bytes()).hexdigest()
    assert {path.name for path in shards.folder.iterdir()} == {"manifest.json", *manifest["files"]}


def test_files_skipped_are_counted(tmp_path, cache, monkeypatch):
    (tmp_path / "good.py").write_text("x = 1")
    (tmp_path / "latin.py").write_bytes(b"# \xe9")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    data = config.PySource(validation_fraction=0.0)
    assert prepare(data, config.Bytes(), cache, silent).manifest["skipped_files"] == 1


def test_second_call_only_opens(data, cache, monkeypatch):
    first = prepare(data, BPE, cache, silent)
    monkeypatch.setattr("mxstudy.data.shards.build", None)
    assert prepare(data, BPE, cache, silent) == first
    moved = Path(data.paths[0]).rename(cache.parent / "moved.jsonl")
    elsewhere = config.Files(format="jsonl", paths=(str(moved),), validation_fraction=0.2)
    assert prepare(elsewhere, BPE, cache, silent) == first


def test_whatever_decides_the_tokens_changes_the_folder(tmp_path, data, cache):
    fraction = config.Files(format="jsonl", paths=data.paths, validation_fraction=0.3)
    other = jsonl(tmp_path / "other.jsonl", [*ROWS, "one more"])
    variants = [(data, BPE), (data, config.Bytes()), (data, config.TrainedBPE(vocab_size=281)), (fraction, BPE)]
    folders = {prepare(d, t, cache, silent).folder for d, t in [*variants, (other, BPE)]}
    assert len(folders) == 5


def test_bpe_learns_from_the_training_split_alone(tmp_path, data, cache):
    train = [row for row in ROWS if split_of(row, 0.2) == "train"]
    alone = jsonl(tmp_path / "train.jsonl", train)
    one, other = (prepare(d, BPE, cache, silent).manifest["tokenizer"]["sha256"] for d in (data, alone))
    assert one == other


def test_full_files_are_continued_in_the_next(data, cache, tmp_path, monkeypatch):
    whole = prepare(data, config.Bytes(), cache, silent)
    monkeypatch.setattr(build, "MAX_FILE_TOKENS", 100)
    monkeypatch.setattr(build, "BATCH_CHARACTERS", 70)
    cut = prepare(data, config.Bytes(), tmp_path / "cut", silent)
    assert len(cut.tokens("train").files) > 5
    assert {len(file) for file in cut.tokens("train").files[:-1]} == {100}
    for split in ("train", "validation"):
        assert (cut.tokens(split)[:] == whole.tokens(split)[:]).all()
        assert (cut.unigram_frequencies(split) == whole.unigram_frequencies(split)).all()
    verify(cut)


def test_token_dtype_follows_the_vocabulary(data, cache, monkeypatch):
    shards = prepare(data, config.Bytes(), cache, silent)
    assert shards.tokens("train")[:].dtype == np.uint16
    tokenizer = shards.tokenizer()
    for vocab_size, dtype in ((2**16, "<u2"), (2**16 + 1, "<u4")):
        tokenizer.vocab_size = vocab_size
        folder = cache / str(vocab_size)
        folder.mkdir()
        assert build.dtype_of(tokenizer).str == dtype
        build.tokenize(data, tokenizer, folder, build.How(silent)).finish({})
        ids = np.fromfile(folder / "train-00000.bin", dtype)
        assert ids.tolist() == shards.tokens("train")[:].tolist()


def test_unigram_frequencies(tmp_path, cache):
    path = jsonl(tmp_path / "x.jsonl", ["aaab"]).paths[0]
    data = config.Files(format="jsonl", paths=(path,), validation_fraction=0.0)
    shards = prepare(data, config.Bytes(), cache, silent)
    found = shards.unigram_frequencies("train")
    assert {chr(one): found[one] for one in np.flatnonzero(found)} == {"a": 0.6, "b": 0.2, chr(256): 0.2}
    with pytest.raises(ConfigError, match="validation split is empty"):
        shards.unigram_frequencies("validation")


# ------------------------------------------------------------------------------------------------------- damage


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["train-00000.bin", "validation-00000.bin", "tokenizer.json"])
def test_verify_finds_a_flipped_bit(data, cache, name):
    shards = prepare(data, BPE, cache, silent)
    flip(shards.folder / name)
    with pytest.raises(ConfigError, match=f"{name}: its sha256 is not the manifest's; delete .* prepared again"):
        verify(shards)


def test_open_refuses_what_is_cut_missing_or_unreadable(data, cache):
    shards = prepare(data, BPE, cache, silent)
    path = shards.folder / "train-00000.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    with pytest.raises(
        ConfigError, match=rf"train-00000.bin: {len(content) - 2} bytes, not the manifest's {len(content)}"
    ):
        prepare(data, BPE, cache, silent)
    path.unlink()
    with pytest.raises(ConfigError, match=r"train-00000.bin: missing"):
        open_shards(shards.folder)
    (shards.folder / "manifest.json").write_text('{"files"')
    with pytest.raises(ConfigError, match=r"manifest.json: cannot be read"):
        open_shards(shards.folder)
    shutil.rmtree(shards.folder)
    verify(prepare(data, BPE, cache, silent))


def test_verify_finds_a_changed_manifest(data, cache):
    shards = prepare(data, BPE, cache, silent)
    path = shards.folder / "manifest.json"
    path.write_text(path.read_text().replace('"documents": ', '"documents": 1'))
    with pytest.raises(ConfigError, match=r"manifest.json: changed"):
        verify(shards)


# ------------------------------------------------------------------------------------------------- empty corpora


def test_empty_corpora_are_refused(tmp_path, cache):
    with pytest.raises(ConfigError, match="data: the corpus is empty"):
        prepare(jsonl(tmp_path / "empty.jsonl", []), config.Bytes(), cache, silent)
    with pytest.raises(ConfigError, match="data: the corpus is empty"):
        prepare(jsonl(tmp_path / "blank.jsonl", ["", ""]), BPE, cache, silent)
    everything = jsonl(tmp_path / "some.jsonl", ROWS)
    held_out = config.Files(format="jsonl", paths=everything.paths, validation_fraction=0.999)
    with pytest.raises(ConfigError, match=r"data\.validation_fraction: it leaves no document to train on"):
        prepare(held_out, config.Bytes(), cache, silent)
    assert not [path for path in (cache / "shards").iterdir() if path.suffix not in (".lock", ".partial")]


# --------------------------------------------------------------------------------------------- several processes


@pytest.fixture
def child(data, cache):
    command = [sys.executable, "-c", CHILD, data.paths[0], str(cache)]
    environment = os.environ | {"PYTHONPATH": str(Path(build.__file__).parents[2])}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        yield process
        process.kill()


@pytest.mark.integration
def test_two_processes_prepare_once(data, cache, child):
    """The child holds the lock until we have said that we wait for it. Then we open what it made."""
    lines = []

    def report(line: str) -> None:
        lines.append(line)
        child.stdin.close()

    assert child.stdout.readline().startswith("tokenizer:")
    shards = prepare(data, BPE, cache, report)
    assert [line.split()[0] for line in lines] == ["waiting"]
    assert child.wait(timeout=60) == 0
    verify(shards)
    assert documents(shards, "train") == [row for row in ROWS if split_of(row, 0.2) == "train"]


@pytest.mark.integration
@pytest.mark.parametrize("lines", [1, 3])
def test_a_killed_process_leaves_nothing_half_made(data, cache, tmp_path, child, lines):
    """It is killed after the tokenizer was trained, and between batches of documents."""
    for _ in range(lines):
        assert child.stdout.readline()
        if lines > 1:
            child.stdin.write("\n")
            child.stdin.flush()
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=60)
    assert {path.suffix for path in (cache / "shards").iterdir()} == {".lock", ".partial"}
    shards = prepare(data, BPE, cache, silent)
    verify(shards)
    assert shards.manifest == prepare(data, BPE, tmp_path / "undisturbed", silent).manifest
    assert {path.suffix for path in (cache / "shards").iterdir()} == {".lock", ""}

"""Mirrors of the hub's data sets give the right files in the right order, from any place on, or are refused."""

import hashlib
import io
import os
import threading
from pathlib import Path

import pytest
from each import each
from layouts import EXPECTED, LAYOUTS, choice, lines, slimpajama, starcoder, table

os.environ["HF_HUB_OFFLINE"] = "1"

from mxstudy import config
from mxstudy.data import build_shards as build
from mxstudy.data import corpus
from mxstudy.data.corpus import SourceLocation
from mxstudy.data.files import read_parquet
from mxstudy.data.shards import locate, prepare
from mxstudy.reader import ConfigError


@pytest.fixture
def mirror(tmp_path, request):
    LAYOUTS[request.param](tmp_path / "mirror")
    return choice(request.param, mirror=str(tmp_path / "mirror"))


every = pytest.mark.parametrize("mirror", LAYOUTS, indirect=True)


@every
def test_a_mirror_is_read_as_the_hub_lays_it_out(mirror, request):
    expected = EXPECTED[request.node.callspec.params["mirror"]]
    assert list(corpus.documents(mirror)) == expected
    corpus.check(mirror)
    shorter = config.HuggingFace(**vars(mirror) | {"max_documents": 7})
    assert list(corpus.documents(shorter)) == expected[:7]


@every
def test_it_is_read_on_from_every_place(mirror):
    source = corpus.source_of(mirror)
    everything = list(corpus.read_from(source, SourceLocation()))
    for number, (place, _) in enumerate(everything, start=1):
        assert list(corpus.read_from(source, place))[: len(everything) - number] == everything[number:]


@every
def test_its_identity_is_that_of_the_hub(mirror):
    """What was trained on a mirror is found again where there is none, without a network."""
    away = config.HuggingFace(**vars(mirror) | {"mirror": None})
    assert corpus.identity(mirror) == corpus.identity(away)
    assert corpus.identity(away) == {"kind": "hugging_face", "name": away.name, "revision": "main"}
    assert locate(mirror, config.Bytes(), Path("x")) == locate(away, config.Bytes(), Path("x"))
    other = config.HuggingFace(**vars(away) | {"revision": "v2"})
    assert locate(other, config.Bytes(), Path("x")) != locate(away, config.Bytes(), Path("x"))


@each("name", LAYOUTS)
def test_without_a_network_the_error_says_what_to_do(name):
    data = choice(name)
    with pytest.raises(ConfigError) as refusal:
        corpus.check(data)
    assert str(refusal.value).startswith(f"data.name: cannot load {data.name!r} on the Hugging Face hub")
    assert "data.mirror=FOLDER" in str(refusal.value)
    assert f"hf download --repo-type dataset {data.name} --revision main" in str(refusal.value)


def test_folders_are_looked_into_before_work_begins(tmp_path):
    """A folder whose files have other columns is refused at once, however late its turn comes."""
    starcoder(tmp_path)
    table(tmp_path / "yaml" / "train-00000-of-00001.parquet", ["a"], "text")
    corpus.check(choice("starcoder", mirror=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"yaml/train-00000-of-00001\.parquet has no column 'content'"):
        corpus.check(choice("starcoder", mirror=str(tmp_path), folder=None))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("slimpajama", {"mirror": "nowhere"}, r"data\.mirror: 'nowhere' is not a folder; `hf download .*` fills one"),
        ("slimpajama", {"split": "trian"}, r"data\.split: .* has no 'trian'; did you mean 'train'\?"),
        ("slimpajama", {"text_field": "content"}, r"example_train_0\.jsonl\.zst, line 1 has no column 'content'"),
        ("fineweb_edu", {"subset": "sample-10B"}, r"data\.mirror: cannot load .* in that folder: .*sample-10BT"),
        ("starcoder", {"folder": "cobol"}, r"data\.mirror: cannot load .* in that folder: .*cobol"),
    ],
)
def test_what_a_mirror_does_not_hold_is_refused(tmp_path, name, fields, message):
    LAYOUTS[name](tmp_path)
    with pytest.raises(ConfigError, match=message):
        corpus.check(choice(name, **{"mirror": str(tmp_path)} | fields))


def test_an_empty_mirror_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.mirror: cannot load .* in that folder: .*doesn't contain any data"):
        corpus.check(choice("slimpajama", mirror=str(tmp_path)))


def test_no_thread_of_arrow_touches_a_file_of_parquet(tmp_path):
    """A thread of Arrow that still holds a Python file while the interpreter shuts down aborts the process."""
    touched = set()

    class Watched(io.BytesIO):
        def read(self, *size):
            touched.add(threading.get_ident())
            return super().read(*size)

        def __del__(self):
            touched.add(threading.get_ident())

    starcoder(tmp_path)
    content = (tmp_path / "python" / "train-00000-of-00002.parquet").read_bytes()
    for _ in range(100):
        assert list(read_parquet(Watched(content), "a file", "content", 0)) == EXPECTED["starcoder"][:5]
    assert touched == {threading.get_ident()}


def test_a_torn_file_is_refused_with_its_name(tmp_path):
    slimpajama(tmp_path)
    path = tmp_path / "train" / "chunk1" / "example_train_10.jsonl.zst"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"example_train_10\.jsonl\.zst cannot be read as JSON lines"):
        list(corpus.documents(choice("slimpajama", mirror=str(tmp_path))))


# ------------------------------------------------------------------------------------- what `hf download` has noted

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def note(root: Path, name: str, etag: str, commit: str = COMMIT) -> None:
    """Write the note that huggingface_hub writes beside a download."""
    path = root / ".cache" / "huggingface" / "download" / f"{name}.metadata"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{commit}\n{etag}\n1700000000.0\n")


def test_the_notes_are_those_of_the_library(tmp_path):
    from huggingface_hub._local_folder import write_download_metadata

    write_download_metadata(tmp_path, "train/x.jsonl", COMMIT, "e" * 64)
    theirs = (tmp_path / ".cache/huggingface/download/train/x.jsonl.metadata").read_text()
    note(tmp_path, "train/x.jsonl", "e" * 64)
    ours = (tmp_path / ".cache/huggingface/download/train/x.jsonl.metadata").read_text()
    assert ours.split()[:2] == theirs.split()[:2]


def test_a_file_that_is_not_the_hubs_is_refused(tmp_path):
    starcoder(tmp_path)
    names = [f"python/train-0000{number}-of-00002.parquet" for number in range(2)]
    for name in names:
        note(tmp_path, name, hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())
    note(tmp_path, "README.md", "no sha256: a small file")
    data = choice("starcoder", mirror=str(tmp_path), revision=COMMIT)
    assert list(corpus.documents(data)) == EXPECTED["starcoder"]
    with pytest.raises(ConfigError, match=rf"data\.revision: .*00000.* was downloaded at {COMMIT}, not at f+$"):
        corpus.check(choice("starcoder", mirror=str(tmp_path), revision="f" * 40))
    table(tmp_path / names[1], ["another"], "content")
    with pytest.raises(ConfigError, match=r"data\.mirror: .*train-00001.*: its sha256 is not that of the hub's file"):
        list(corpus.documents(data))


def test_a_bad_row_costs_nothing_that_was_done(tmp_path, monkeypatch):
    """A mirror that has been repaired goes on from the row that was bad."""
    monkeypatch.setattr(build, "BATCH_CHARACTERS", 20)
    for root in ("good", "bad"):
        slimpajama(tmp_path / root)
    broken = tmp_path / "bad" / "train" / "chunk2" / "example_train_1.jsonl.zst"
    content = broken.read_bytes()
    lines(broken, ["train 2 1 0", "train 2 1 1", 7])
    data = choice("slimpajama", mirror=str(tmp_path / "bad"))
    with pytest.raises(ConfigError, match=r"example_train_1\.jsonl\.zst, line 3: 'text' is 7, not a string"):
        prepare(data, config.Bytes(), tmp_path / "cache", print)
    broken.write_bytes(content)
    said: list[str] = []
    shards = prepare(data, config.Bytes(), tmp_path / "cache", said.append)
    assert said[1].startswith("continuing after 22 documents")
    whole = choice("slimpajama", mirror=str(tmp_path / "good"))
    assert prepare(whole, config.Bytes(), tmp_path / "other", print).manifest == shards.manifest


def test_a_mirror_that_has_changed_since_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "BATCH_CHARACTERS", 20)
    slimpajama(tmp_path / "mirror")
    data = choice("slimpajama", mirror=str(tmp_path / "mirror"))
    lines(tmp_path / "mirror" / "train" / "chunk2" / "example_train_1.jsonl.zst", [7])
    with pytest.raises(ConfigError, match="is 7, not a string"):
        prepare(data, config.Bytes(), tmp_path / "cache", print)
    (tmp_path / "mirror" / "train" / "chunk1" / "example_train_1.jsonl.zst").unlink()
    with pytest.raises(
        ConfigError, match=r"data: the files of the corpus are not those that .*\.partial was begun with"
    ):
        prepare(data, config.Bytes(), tmp_path / "cache", print)

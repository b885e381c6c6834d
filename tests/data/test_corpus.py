"""Every source has an order, an identity and a split, and refuses what it cannot read."""

import hashlib
import json
import os
import sys
from pathlib import Path

import pandas
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

import datasets

from mxstudy import config
from mxstudy.data import corpus
from mxstudy.data.content_hash import split_of
from mxstudy.reader import ConfigError


def files(*paths, format="text", **fields):
    return config.Files(format=format, paths=tuple(map(str, paths)), **fields)


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts(data) -> list[str]:
    return list(corpus.documents(data))


# ------------------------------------------------------------------------------------------- Python source text


@pytest.fixture
def fake_python(tmp_path, monkeypatch):
    """Replace the standard library and the installed packages by files of our own, where sysconfig looks."""
    standard = tmp_path / "lib" / "python3"
    roots = {"stdlib": standard, "purelib": standard / "site-packages", "platlib": tmp_path / "lib64"}
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(roots[name]))
    write(standard / "b.py", "b = 1")
    write(standard / "a" / "z.py", "z = 1")
    write(standard / "a.py", "a = 1")
    write(standard / "latin.py", b"# -*- coding: latin-1 -*-\n# \xe9")
    write(standard / "empty.py", "")
    write(standard / "notes.txt", "no Python")
    write(standard / "dist-packages" / "other.py", "other = 1")
    write(roots["purelib"] / "pure.py", "pure = 1")
    write(roots["purelib"] / "thing-1.5.dist-info" / "METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.5\n")
    write(roots["platlib"] / "plat.py", "plat = 1")
    return roots


def test_pysource_is_the_standard_library_by_relative_path(fake_python):
    *rows, (last, _) = corpus.read_from(corpus.source_of(config.PySource()), corpus.SourceLocation())
    assert [text for _, text in rows if text] == texts(config.PySource()) == ["a = 1", "z = 1", "b = 1"]
    assert last.skipped == 1  # latin.py


def test_pysource_adds_installed_packages_once(fake_python):
    data = config.PySource(include_site_packages=True)
    assert texts(data) == ["a = 1", "z = 1", "b = 1", "pure = 1", "plat = 1"]
    assert corpus.identity(data)["packages"] == ["thing==1.5"]
    fake_python["platlib"] = fake_python["purelib"]
    assert texts(data) == ["a = 1", "z = 1", "b = 1", "pure = 1"]


def test_pysource_identity_is_the_python_and_not_its_place(fake_python):
    before = corpus.identity(config.PySource())
    fake_python["stdlib"] = Path("/elsewhere")
    assert corpus.identity(config.PySource()) == before
    assert before["packages"] == []
    assert ".".join(map(str, sys.version_info[:3])) in before["python"]


def test_the_real_standard_library_is_there():
    found = texts(config.PySource())
    assert len(found) > 500
    assert any("class OrderedDict" in text for text in found)


# -------------------------------------------------------------------------------------------------- local files


def test_text_files_keep_config_order_and_sort_each_pattern(tmp_path):
    for name in ("c.txt", "a.txt", "b.txt"):
        write(tmp_path / name, f"{name}\r\nas it is\n")
    found = texts(files(tmp_path / "b.txt", tmp_path / "*.txt"))
    assert found == ["b.txt\r\nas it is\n", "a.txt\r\nas it is\n", "c.txt\r\nas it is\n"]


def test_patterns_reach_into_folders(tmp_path):
    write(tmp_path / "x" / "y" / "deep.txt", "deep")
    assert texts(files(tmp_path / "**" / "*.txt", validation_fraction=0.0)) == ["deep"]


def test_jsonl_and_parquet_give_a_document_a_row(tmp_path):
    rows = [{"body": "one", "n": 1}, {"body": "", "n": 2}, {"body": "zwei \u00fc", "n": 3}]
    jsonl = write(tmp_path / "x.jsonl", "\n\n".join(map(json.dumps, rows)))
    pandas.DataFrame(rows).to_parquet(tmp_path / "x.parquet")
    assert texts(files(jsonl, format="jsonl", text_field="body")) == ["one", "zwei \u00fc"]
    assert texts(files(tmp_path / "x.parquet", format="parquet", text_field="body")) == ["one", "zwei \u00fc"]


def test_identity_of_files_is_their_contents_in_order(tmp_path):
    a, b = write(tmp_path / "a.txt", "one"), write(tmp_path / "b.txt", "two")
    moved = write(tmp_path / "elsewhere" / "a.txt", "one")
    assert corpus.identity(files(a, b)) == corpus.identity(files(moved, b))
    assert corpus.identity(files(a, b)) != corpus.identity(files(b, a))
    assert corpus.identity(files(a))["sha256"] == [hashlib.sha256(b"one").hexdigest()]
    write(a, "one more")
    assert corpus.identity(files(a)) != corpus.identity(files(moved))


def bad_text(tmp_path):
    return files(write(tmp_path / "bad.txt", b"good \xff"))


def bad_jsonl_bytes(tmp_path):
    return files(write(tmp_path / "bad.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n'), format="jsonl")


def bad_json(tmp_path):
    return files(write(tmp_path / "bad.jsonl", '{"text": "a"}\n{"text": \n'), format="jsonl")


def no_object(tmp_path):
    return files(write(tmp_path / "bad.jsonl", '["text"]\n'), format="jsonl")


def no_column(tmp_path):
    return files(write(tmp_path / "bad.jsonl", '{"text": "a"}\n{"texts": "a"}\n'), format="jsonl")


def no_string(tmp_path):
    return files(write(tmp_path / "bad.jsonl", '{"text": "a"}\n\n{"text": 3}\n'), format="jsonl")


def lone_surrogate(tmp_path):
    return files(write(tmp_path / "bad.jsonl", '{"text": "\\ud800"}\n'), format="jsonl")


def no_parquet(tmp_path):
    return files(write(tmp_path / "bad.parquet", "no Parquet"), format="parquet")


def long_integer(tmp_path):
    return files(write(tmp_path / "bad.jsonl", f'{{"text": "a", "n": {"1" * 5000}}}\n'), format="jsonl")


def no_parquet_column(tmp_path):
    pandas.DataFrame({"txt": ["a"]}).to_parquet(tmp_path / "bad.parquet")
    return files(tmp_path / "bad.parquet", format="parquet")


def no_parquet_string(tmp_path):
    pandas.DataFrame({"text": ["a", None]}).to_parquet(tmp_path / "bad.parquet")
    return files(tmp_path / "bad.parquet", format="parquet")


def no_file(tmp_path):
    return files(write(tmp_path / "x.txt", "x"), tmp_path / "absent.txt")


def no_match(tmp_path):
    return files(tmp_path / "*.absent")


def folder(tmp_path):
    return files(tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (bad_text, r"bad\.txt is not UTF-8.*byte 5$"),
        (bad_jsonl_bytes, r"bad\.jsonl is not UTF-8.*byte 24$"),
        (bad_json, r"bad\.jsonl, line 2: not valid JSON"),
        (long_integer, r"bad\.jsonl, line 1: not valid JSON: .*5000 digits"),
        (no_object, r"line 1: must be a JSON object, not list"),
        (no_column, r"line 2 has no column 'text'; did you mean 'texts'\?"),
        (no_string, r"line 3: 'text' is 3, not a string"),
        (lone_surrogate, r"line 1: not valid Unicode"),
        (no_parquet, r"bad\.parquet cannot be read as Parquet"),
        (no_parquet_column, r"bad\.parquet has no column 'text'; did you mean 'txt'\?"),
        (no_parquet_string, r"row 2: 'text' is None, not a string"),
        (no_file, r"absent\.txt' does not exist"),
        (no_match, r"\*\.absent' does not exist, and matches no file as a glob pattern"),
        (folder, r"is a folder; name its files"),
    ],
)
def test_bad_files_are_refused_with_their_place(tmp_path, make, message):
    with pytest.raises(ConfigError, match=message):
        texts(make(tmp_path))


# --------------------------------------------------------------------------------------- Hugging Face data sets


def hugging_face(path, **fields):
    return config.HuggingFace(name=str(path), **fields)


def test_folders_of_every_kind_give_the_same_documents(tmp_path):
    data = datasets.Dataset.from_dict({"text": ["one", "two", "", "three"]})
    data.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=data, other=data.select([1])).save_to_disk(tmp_path / "splits")
    write(tmp_path / "jsonl" / "x.jsonl", "".join(json.dumps(row) + "\n" for row in data))
    write(tmp_path / "text" / "x.txt", "one\ntwo\n\nthree\n")
    (tmp_path / "parquet").mkdir()
    data.to_parquet(tmp_path / "parquet" / "x.parquet")
    for name in ("saved", "splits", "jsonl", "text", "parquet"):
        assert texts(hugging_face(tmp_path / name)) == ["one", "two", "three"], name
    assert texts(hugging_face(tmp_path / "splits", split="other")) == ["two"]
    assert texts(hugging_face(tmp_path / "saved", max_documents=1)) == ["one"]


def test_identity_of_a_folder_is_its_contents_and_of_a_hub_data_set_its_revision(tmp_path):
    for name in ("here", "there"):
        write(tmp_path / name / "x.jsonl", '{"text": "one"}\n')
    here, there = (corpus.identity(hugging_face(tmp_path / name)) for name in ("here", "there"))
    assert here == there
    assert list(here["sha256"]) == ["x.jsonl"]
    write(tmp_path / "there" / "x.jsonl", '{"text": "two"}\n')
    assert corpus.identity(hugging_face(tmp_path / "there")) != here
    hub = corpus.identity(config.HuggingFace(name="org/name", revision="abc"))
    assert hub == {"kind": "hugging_face", "name": "org/name", "revision": "abc"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split": "trian"}, r"data\.(split|name).*trian"),
        ({"subset": "wiki"}, r"data\.(subset|name).*"),
        ({"text_field": "texts"}, r"(row 1|x\.parquet) has no column 'texts'; did you mean 'text'\?"),
        ({"text_field": "n"}, r"row 1: 'n' is 1, not a string"),
        ({"revision": "abc"}, r"data\.revision: the local folder"),
    ],
)
@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_what_a_folder_does_not_hold_is_refused(tmp_path, kind, fields, message):
    data = datasets.Dataset.from_dict({"text": ["one"], "n": [1]})
    if kind == "saved":
        data.save_to_disk(tmp_path / kind)
    else:
        (tmp_path / kind).mkdir()
        data.to_parquet(tmp_path / kind / "x.parquet")
    with pytest.raises(ConfigError, match=message):
        texts(hugging_face(tmp_path / kind, **fields))


def test_data_sets_that_cannot_be_loaded_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot load 'org/absent' on the Hugging Face hub \(not a local folder\)"):
        texts(hugging_face("org/absent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"cannot load .*empty' in that folder"):
        texts(hugging_face(tmp_path / "empty"))
    write(tmp_path / "broken" / "x.jsonl", '{"text": "a"}\n{"text"\n')
    with pytest.raises(ConfigError, match=r"broken/x\.jsonl, line 2: not valid JSON"):
        texts(hugging_face(tmp_path / "broken"))


# ----------------------------------------------------------------------------------------------------- the split


def test_split_is_the_hash_of_the_text_alone():
    drawn = [split_of(f"document {i}", 0.1) for i in range(5000)]
    assert drawn.count("validation") == pytest.approx(500, abs=90)  # 4 sigma
    for i in (0, 1, 2, 3):
        value = int(hashlib.sha256(f"document {i}".encode()).hexdigest()[:16], 16) / 2**64
        assert split_of(f"document {i}", value) == "train"
        assert split_of(f"document {i}", value + 1e-9) == "validation"


def test_a_larger_fraction_keeps_what_was_held_out():
    held_out = {i for i in range(1000) if split_of(str(i), 0.05) == "validation"}
    assert held_out < {i for i in range(1000) if split_of(str(i), 0.2) == "validation"}
    assert {split_of(str(i), 0.0) for i in range(1000)} == {"train"}

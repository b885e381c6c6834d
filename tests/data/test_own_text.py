"""A single text is cut in two, validation files stay whole, and what cannot be divided is refused in one line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from each import each

from mxstudy import config
from mxstudy.data import corpus
from mxstudy.data.shards import Shards, prepare
from mxstudy.reader import ConfigError

BYTES = config.Bytes()
TEXT = "To be, or not to be, that is the question: \u00e9 "
SHAKESPEARE = Path(__file__).parents[3] / "shared" / "data" / "english" / "tinyshakespeare.txt.gz"


def files(*paths: Path, **fields: object) -> config.Files:
    return config.Files(format="text", paths=tuple(map(str, paths)), **fields)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def prepared(data: config.Files, folder: Path) -> Shards:
    return prepare(data, BYTES, folder / "cache", lambda line: None)


def text_of(shards: Shards, split: str) -> list[str]:
    ids = shards.tokens(split)[:].tolist()
    return bytes(i if i < 256 else 0 for i in ids).decode().split("\0")[:-1]


def test_one_text_keeps_its_last_characters_for_validation(tmp_path: Path) -> None:
    book = write(tmp_path / "book.txt", TEXT * 10)
    data = files(book, validation_fraction=0.1)
    first = int(len(TEXT) * 10 * 0.9)
    assert list(corpus.unique_documents(data)) == [
        ("train", (TEXT * 10)[:first]),
        ("validation", (TEXT * 10)[first:]),
    ]
    shards = prepared(data, tmp_path)
    assert (text_of(shards, "train"), text_of(shards, "validation")) == ([(TEXT * 10)[:first]], [(TEXT * 10)[first:]])
    assert shards.manifest["splits"]["validation"]["documents"] == 1


def test_how_much_is_validated_on_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    prepare(files(write(tmp_path / "book.txt", "a" * 999), validation_fraction=0.1), BYTES, tmp_path, said.append)
    assert "1,001 tokens, 101 for validation" in said[-1]  # each part ends with a token of its own


def test_files_for_validation_are_all_of_it(tmp_path: Path) -> None:
    train = [write(tmp_path / f"train{n}.txt", f"{TEXT}{n}") for n in range(3)]
    held_out = [write(tmp_path / f"validation{n}.txt", f"{n}{TEXT}") for n in range(2)]
    twice = write(tmp_path / "validation2.txt", f"{TEXT}0")  # trained on too
    data = files(*train, validation_paths=(str(tmp_path / "validation*.txt"),))
    assert twice.exists()
    shards = prepared(data, tmp_path)
    assert text_of(shards, "train") == [path.read_text() for path in train]
    assert text_of(shards, "validation") == [path.read_text() for path in held_out]
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n{"text": "b"}\n')
    of_rows = config.Files(format="jsonl", paths=(str(rows),), validation_paths=(str(write(tmp_path / "v", "")),))
    assert list(corpus.unique_documents(of_rows)) == [("train", "a"), ("train", "b")]


def test_identities_say_what_is_validated_on_and_earlier_ones_stay(tmp_path: Path) -> None:
    a, b, c = (write(tmp_path / f"{name}.txt", name * 100) for name in "abc")
    ids = [corpus.identity(files(a)), corpus.identity(files(a, validation_fraction=0.0))]
    ids += [corpus.identity(files(a, validation_paths=(str(path),))) for path in (b, c)]
    assert len({str(one) for one in ids}) == 4
    rows = config.Files(format="jsonl", paths=(str(a),))
    for earlier in (ids[1], corpus.identity(files(a, b)), corpus.identity(rows)):
        assert earlier.keys() == {"kind", "sha256"}


def empty(folder: Path) -> config.Files:
    return files(write(folder / "a.txt", ""))


def one_character(folder: Path) -> config.Files:
    return files(write(folder / "a.txt", "a"))


def hardly_any(folder: Path) -> config.Files:
    return files(write(folder / "a.txt", "abc"), validation_fraction=1e-20)


def nothing_new(folder: Path) -> config.Files:
    same = (str(write(folder / "b.txt", TEXT)),)
    return files(write(folder / "a.txt", TEXT), validation_paths=same)


def repeated(folder: Path) -> config.Files:
    return files(write(folder / "a.txt", TEXT * 2), validation_fraction=0.5)


def same_file(folder: Path) -> config.Files:
    for name in "ab":
        write(folder / f"{name}.txt", name * 100)
    return files(folder / "*.txt", validation_paths=(f"{folder}/../{folder.name}/b.txt",))


def absent(folder: Path) -> config.Files:
    return files(write(folder / "a.txt", TEXT), validation_paths=("nowhere.txt",))


def both(folder: Path) -> config.Files:
    return files(folder, validation_paths=("b.txt",), validation_fraction=0.1)


def outside(folder: Path) -> config.Files:
    return files(folder, validation_fraction=1.0)


def blended(folder: Path) -> config.Blend:
    own = files(folder, validation_paths=("b.txt",))
    assert config.blend_of(own).corpora == {"files": own}  # allowed when it stands alone
    both = {"mine": own, "other": config.PySource()}
    return config.Blend(corpora=both, phases=(config.Phase(weights=dict.fromkeys(both, 1.0)),))


@each(
    ("make", "message"),
    [
        (empty, r"data\.paths: \S+a\.txt is empty; name a file with text"),
        (one_character, r"data\.validation_fraction: 0\.02 of the 1 characters of \S+a\.txt leaves none to train on"),
        (hardly_any, r"data\.validation_fraction: 1e-20 of the 3 characters of \S+a\.txt leaves none to validate on"),
        (
            nothing_new,
            r"data: no validation text is left, because empty texts and texts that are also trained on are dropped; ",
        ),
        (
            repeated,
            r"data: no validation text is left, because empty texts and texts that are also trained on are dropped; ",
        ),
        (same_file, r"data\.validation_paths: \S+/b\.txt is one of data\.paths too; leave it out of one of them"),
        (absent, r"data\.validation_paths: 'nowhere\.txt' does not exist, and matches no file as a glob pattern"),
        (
            both,
            r"validation_paths: all validation is on them, and no fraction of paths \(0\.1\) is kept; leave them out, "
            r"or validation_fraction at 0\.02",
        ),
        (outside, r"validation_fraction: must lie in 0\.\.1 and leave something to train on, not 1\.0"),
        (blended, r"corpora\.mine\.validation_paths: a blend keeps the same validation_fraction of all its corpora; "),
    ],
)
def test_what_cannot_be_divided_is_refused(make, message, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp(make.__name__)
    with pytest.raises(ConfigError, match=f"^{message}") as refused:
        prepared(make(folder), folder)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason=f"needs {SHAKESPEARE.name}")
def test_tiny_shakespeare_is_divided_as_in_nanogpt(tmp_path: Path) -> None:
    book = tmp_path / "tinyshakespeare.txt"
    book.write_bytes(gzip.decompress(SHAKESPEARE.read_bytes()))
    sizes = {split: len(text) for split, text in corpus.unique_documents(files(book, validation_fraction=0.1))}
    assert sizes == {"train": 1_003_854, "validation": 111_540}

"""The kept digests are those of the sources, whatever lies in the cache."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from mxstudy.tracking import digest_cache
from mxstudy.tracking.digest_cache import cached

SOURCES = {"numerics/grid.py": "x = 1\n", "tracking/code.py": "y = 2\n"}


class Counting:
    """Digest a source by its length, and count the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, sources: Mapping[str, str]) -> dict[str, str]:
        self.calls += 1
        return {name: str(len(text)) for name, text in sources.items()}


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    module = tmp_path / "digest_cache.py"
    monkeypatch.setattr(digest_cache, "__file__", str(module))
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    return Path(importlib.util.cache_from_source(str(module))).with_name("digests.json")


def test_equal_sources_are_digested_once() -> None:
    compute = Counting()
    assert cached(SOURCES, compute) == cached(dict(reversed(SOURCES.items())), compute) == Counting()(SOURCES)
    assert compute.calls == 1


@pytest.mark.parametrize(
    "changed",
    [SOURCES | {"numerics/grid.py": "x = 12\n"}, SOURCES | {"new.py": ""}, {"grid.py": "x = 1\n"}, {}],
    ids=["text", "another file", "name", "none"],
)
def test_changed_sources_are_digested_anew(changed: dict[str, str]) -> None:
    cached(SOURCES, Counting())
    assert cached(changed, Counting()) == Counting()(changed)


def falsified(text: str) -> str:
    content = json.loads(text)
    return json.dumps(content | {"digests": content["digests"] | {"numerics/grid.py": "7"}})


@pytest.mark.parametrize(
    "damage",
    [lambda text: text[:-9], lambda text: "", lambda text: "[]", lambda text: "{}", lambda text: "null", falsified],
    ids=["torn", "empty", "a list", "without keys", "null", "falsified"],
)
def test_a_damaged_cache_is_made_anew(damage, path: Path) -> None:
    right = cached(SOURCES, Counting())
    whole = path.read_text()
    path.write_text(damage(whole))
    assert cached(SOURCES, Counting()) == right
    assert path.read_text() == whole


def test_nothing_is_written_where_python_writes_no_compiled_files(path: Path, monkeypatch) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    assert cached(SOURCES, Counting()) == Counting()(SOURCES)
    assert not path.parent.exists()


def test_a_folder_that_takes_no_files_is_no_error(path: Path) -> None:
    path.parent.write_text("no folder")
    assert cached(SOURCES, Counting()) == Counting()(SOURCES)

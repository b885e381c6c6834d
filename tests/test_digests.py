"""Six steps of small models give the bits that they gave when `tests/fixtures/digests_*.json` were recorded.

Bits depend on torch's build and on the kind of processor, so a fixture is for one of each. Where none fits, a case is
run twice instead. That still shows that its numbers follow from its config, and what is refused. To have one made by an
older commit: `git worktree add OLD COMMIT; PYTHONPATH=OLD python tests/digests.py --out tests/fixtures/digests_X.json`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from digest_cases import COMPILED, QUICK, STEPS, cases
from digests import REFUSED, Record, differences, machine, main, run_case
from each import slow_but

from mxstudy.train.runtime import configure_torch

FIXTURES = [
    json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "fixtures").glob("digests_*.json"))
]
HERE = {**machine(), "steps": STEPS, "compile": False}
FITTING = [fixture["cases"] for fixture in FIXTURES if fixture["about"] == HERE]
NOT_QUICK = [name for name in cases() if name not in QUICK]
TWICE_TAKES_LONGER = [name for name in QUICK if "rmsnorm" in name]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    configure_torch()


def assert_same(name: str) -> None:
    said = run_case(name)
    want = FITTING[0][name] if FITTING else run_case(name)
    assert differences({"about": {}, "cases": {name: said}}, {"about": {}, "cases": {name: want}}) == []
    assert ":" not in said, "an error, which is no result"
    assert {fixture["cases"][name] == REFUSED for fixture in FIXTURES} == {said == REFUSED}


@pytest.mark.integration
@pytest.mark.parametrize("name", slow_but(QUICK[::4], QUICK))
def test_every_precision_has_its_bits(name: str) -> None:
    if name in TWICE_TAKES_LONGER and not FITTING:
        pytest.skip(f"no fixture is of {HERE}: cases are run twice instead, and these only among the slow tests")
    assert_same(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_QUICK if FITTING else [*TWICE_TAKES_LONGER, *NOT_QUICK])
def test_so_has_every_norm_backend_and_option(name: str) -> None:
    assert_same(name)


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture["about"]["processor"])
def test_a_fixture_has_all_cases_and_no_two_that_say_the_same(fixture: Record) -> None:
    """The two backends may agree: on CPU they do one arithmetic in one order."""
    said = fixture["cases"]
    assert list(said) == list(cases())
    assert set(QUICK) <= set(said)
    apart = [name for name in said if "/modules/" not in name and said[name] != REFUSED]
    assert len({said[name] for name in apart}) == len(apart)
    for name in said.keys() - set(apart):
        assert said[name] in (REFUSED, said[name.replace("/modules/", "/auto/")])


def test_cases_that_are_compiled_are_cases() -> None:
    assert set(COMPILED) <= set(cases("cuda"))
    assert set(cases()) <= set(cases("cuda"))


def test_records_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    same = {"a/b": "01 02 03", "a/c": REFUSED}
    records = same, same | {"a/b": "01 04 05", "a/c": "06 07 08"}, {"a/b": same["a/b"]}
    paths = [tmp_path / f"{number}.json" for number in range(3)]
    for path, record in zip(paths, records, strict=True):
        path.write_text(json.dumps({"about": {"torch": "2"}, "cases": record}))
    said = {}
    for one, other in itertools.product(range(3), repeat=2):
        monkeypatch.setattr("sys.argv", ["digests.py", "--compare", str(paths[one]), str(paths[other])])
        assert main() == (one != other)
        said[one, other] = capsys.readouterr().out.splitlines()
    assert said[0, 0] == ["0 differ, 2 are the same"]
    assert said[0, 1][:2] == ["a/b: other gradients, weights", "a/c: 'refused' and '06 07 08'"]
    assert said[0, 2][0] == "a/c: 'refused' and 'not there'"

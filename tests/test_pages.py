"""The pages of results/ are what the tables beside them say, and show images that can be drawn from them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from analysis.figures import FIGURES, IMAGES
from analysis.pages.__main__ import PAGES, main
from analysis.pages.marks import PART, RESULTS, names, rewritten

ROOT = Path(__file__).parents[1]
BY_HAND = {"claims"}  # the ledger has a command of its own
PLANS = {"README", "prestated"}  # their tables are an index, and plans, whose numbers no run has made
SLOW = {"olmes"}  # bootstraps
SHOWN = re.compile(r"!\[[^]]*\]\((\w+)\.png\)")


def page_of(name: str) -> str:
    return (ROOT / RESULTS / f"{name}.md").read_text()


@pytest.mark.integration
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PAGES])
def test_a_page_is_what_its_tables_say(name: str, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    page = page_of(name)
    for match in PART.finditer(page):
        (again,) = PART.finditer(rewritten(match[0], PAGES[name]))
        assert match["made"] == again["made"], f"results/{name}.md, {match['name']}: run make pages"


@pytest.mark.parametrize("name", [name for name in PAGES if name != "README"])
def test_every_part_is_on_its_page(name: str) -> None:
    index = {part.removeprefix(f"{name}: ") for part in names(page_of("README")) if part.startswith(f"{name}: ")}
    assert {*names(page_of(name))} | index == {*PAGES[name]}


def test_every_page_is_made_from_tables() -> None:
    pages = {path.stem for path in (ROOT / RESULTS).glob("*.md")} - BY_HAND
    assert pages == {*PAGES}
    for name in pages - PLANS:
        prose = PART.sub("", page_of(name))
        assert not [line for line in prose.splitlines() if line.startswith("|")], f"{name}: a table without a mark"


def test_every_image_is_on_a_page_and_can_be_drawn() -> None:
    shown = [image for path in (ROOT / RESULTS).glob("*.md") for image in SHOWN.findall(path.read_text())]
    assert sorted(shown) == sorted(path.stem for path in (ROOT / RESULTS).glob("*.png")) == sorted(IMAGES)
    figures = {figure.name: figure for figure in FIGURES}
    for name in IMAGES.values():
        assert figures[name].backing()
        assert all((ROOT / path).exists() for path in figures[name].backing())


def test_the_command_writes_what_differs_and_nothing_else(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "results").mkdir()
    page = "Prose 7.\n\n<!-- from: jobs -->\n| a |\n<!-- end -->\nIn <!-- from: values -->1 s<!-- end -->."
    for name, text in {"launch.md": page, "data.md": "No part.", "launch.json": None}.items():
        (tmp_path / "results" / name).write_text(text or (ROOT / "results" / name).read_text())
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "data"]) == 0
    assert capsys.readouterr().out == "results/launch.md\n"
    written = (tmp_path / "results" / "launch.md").read_text()
    assert written.startswith("Prose 7.\n\n<!-- from: jobs -->\n| jobs | vary in |")
    assert written.endswith("\n<!-- end -->\nIn <!-- from: values -->7.4 to 7.9 s<!-- end -->.")
    assert main(["launch"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("<!-- from: a -->1", "each <!-- from: NAME --> needs one <!-- end -->"),
        ("1<!-- end -->", "each <!-- from: NAME --> needs one <!-- end -->"),
        ("<!-- from: b -->1<!-- end -->", "from: b: no such part of this page; choose from a"),
    ],
)
def test_a_mark_that_is_wrong_is_refused(page: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        rewritten(page, {"a": lambda: "2"})
    assert rewritten("<!-- from: a -->1<!-- end -->", {"a": lambda: "2"}) == "<!-- from: a -->2<!-- end -->"

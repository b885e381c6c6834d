"""The pages of results/ say what the tables beside them say, and show images that can be drawn from them."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from analysis.figures import FIGURES, IMAGES
from analysis.ledger.claim import IMPOSSIBLE, NOT_RUN
from analysis.ledger.rules import CONTRADICTED, REPRODUCED, UNCLEAR
from analysis.pages import training_speed
from analysis.pages.__main__ import OF_ALL, PAGES, main
from analysis.pages.marks import PART, RESULTS, benchmark, names, rewritten

ROOT = Path(__file__).parents[1]
BY_HAND = {"claims"}  # the ledger has a command of its own
PLANS = {"README", "prestated"}  # their tables are an index, and plans, with numbers that come from no run
SLOW = {"olmes"}  # bootstraps
SHOWN = re.compile(r"!\[[^]]*\]\((\w+)\.png\)")

# What looks measured: decimals, percentages, counts of a total, intervals, and numbers with a comma; not 12 or 512.
MEASURED = re.compile(r"[+-]?\d+\.\d+(?:e-?\d+)?|\d+ \.\. \d+|\d+ of (?:the )?\d+|\d+ ?%|\d+,\d{3}")
PROVENANCE = re.compile(r"^## How it was (?:obtained|made)$.*", re.S | re.M)
NO_NUMBERS = re.compile(r"^ {4}.*$|`[^`]*`|\]\([^)]*\)", re.M)  # commands, code, links
OTHER_NUMBERS = re.compile(
    r"""
    (?:torch|torchao|lm-eval)\ [\d.]+                                         # versions
    | (?:[Ss]ections?|appendi(?:x|ces)|[Ff]igures?|Eq\.)\ [\dA-Z.]+(?:,\ [\dA-Z.]+)*  # places in a document
    | [(;]\ ?(?:limits?|target)\b[^);]*                                     # what was to be reached
    | \(the\ paper\b[^)]*\)                                                 # a paper's
    | 9[05]\ %                                                              # levels of intervals
    | [^.]*(?:[.]\d[^.]*)*\bno\ table\ holds\b[^.]*(?:[.]\d[^.]*)*            # what cannot be made anew
    """,
    re.X,
)
SETTINGS = {  # numbers in a page's sentences that say how something was made or counted
    "README": ("0.88", "0.02", "0.026"),
    "approximation": ("1,024", "4,096", "0.99", "0.003"),
    "checkpoint": ("10 %",),
    "data": ("32,000",),
    "kernels": ("0.90", "0.95", "4.8", "1,280", "8,192", "4,096", "65,536"),
    "learning_rate_window": ("0.22", "6,500", "7,000", "4,000"),
    "mxnorm_equivalence": ("2.93", "0.026"),
    "olmes": ("2,900",),
    "shakespeare": ("1.47", "5,000"),
    "spike_proxy": ("30 %", "1,200", "0.4814", "0.4688"),
    "student_figures": ("1 %", "75 %", "0.875", "1,200", "4,800", "8,900", "2,000", "0.5"),
    "student_teacher": ("0.88", "0.22", "3.2", "1,000", "1,500", "2,000", "6,500", "8,500", "9,000"),
}


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


@pytest.mark.parametrize("name", [name for name in PAGES if name not in OF_ALL])
def test_every_part_is_on_its_page(name: str) -> None:
    index = {part.removeprefix(f"{name}: ") for part in names(page_of("README")) if part.startswith(f"{name}: ")}
    assert {*names(page_of(name))} | index == {*PAGES[name]}


def test_every_page_is_made_from_tables() -> None:
    pages = {path.stem for path in (ROOT / RESULTS).glob("*.md")} - BY_HAND
    assert pages == {*PAGES}
    for name in pages - PLANS:
        prose = PART.sub("", page_of(name))
        assert not [line for line in prose.splitlines() if line.startswith("|")], f"{name}: a table without a mark"


def typed(page: str) -> list[str]:
    """Return the numbers of a page that look measured and are not made from a table."""
    prose = NO_NUMBERS.sub("", PART.sub("", PROVENANCE.sub("", page)))
    return MEASURED.findall(OTHER_NUMBERS.sub("", " ".join(prose.split())))


@pytest.mark.parametrize("name", sorted({*PAGES} - {"prestated"}))
def test_no_number_of_a_sentence_is_typed(name: str) -> None:
    assert {*typed(page_of(name))} == {*SETTINGS.get(name, ())}, "mark it, or name it among the settings"


def test_each_finding_stands_on_rows_that_are_decided_as_it_says() -> None:
    verdicts = {row["id"]: row["verdict"] for row in json.loads((ROOT / RESULTS / "claims.json").read_text())}
    _, *sections = page_of("findings").split("\n## ")
    decided, known = {REPRODUCED, CONTRADICTED}, set[str]()
    for title, _, section in (section.partition("\n") for section in sections):
        sentences = section.strip().split("\n- ")
        named = [re.findall(r"\[([^]]*)\]\((\w+)\.md\)", sentence) for sentence in sentences]
        assert all(named), f"{title}: a finding without a row or a page"
        for name, page in itertools.chain(*named):
            assert page == "claims" or page == name
            known |= {name} if page == "claims" else set()
            allowed = {UNCLEAR, NOT_RUN, IMPOSSIBLE} if title == "Not known" else decided
            assert page != "claims" or verdicts[name] in allowed, f"{title}: {name} is {verdicts[name]}"
    assert len(known) > 20


def test_what_is_typed_is_seen() -> None:
    made = "<!-- from: a -->7.5<!-- end --> and `lr=0.1` ([text](0.3.md), torch 2.11.0, section 3.5; limit: 1.06)"
    said = "rates were 0.7, of another call, which no table holds. In (the paper: 3.1) 95 % is\n\n    python 0.4"
    assert typed(f"{made}. Elsewhere {said}\n\n## How it was obtained\nIt took 1,220 s.") == []
    assert typed("4 of 21 end 0.5 .. 0.7 lower, by 12 %, -0.23 (at 7,299)") == [
        "4 of 21",
        "0.5",
        "0.7",
        "12 %",
        "-0.23",
        "7,299",
    ]


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
    assert written.endswith("\n<!-- end -->\nIn <!-- from: values -->4.8 to 5.6 s<!-- end -->.")
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


def test_a_step_beside_its_baseline_and_the_readings_of_its_gpu(tmp_path: Path, monkeypatch) -> None:
    """The file names its baseline. Those in results/ may be older."""
    older = json.loads((ROOT / RESULTS / "train_step_llama_125m.json").read_text())
    (base, *_), read = older["rows"], {"sm_mhz": 1400, "power_w": 690, "temperature_c": 61}
    readings = {f"{key}_{which}": value for key, value in read.items() for which in ("min", "median", "max")}
    base = base | {"arm": "bf16, fused"} | readings
    slower = base | {"arm": "bf16, inductor", "over_bf16": 1.041, "peak_over_bf16": 1.12, "sm_mhz_max": 1980}
    newer = older | {"rows": [base, slower], "settings": older["settings"] | {"baseline": "bf16, fused"}}
    (tmp_path / "results").mkdir()
    for size in training_speed.SIZES:
        (tmp_path / "results" / f"train_step_{size}.json").write_text(json.dumps(newer))
    monkeypatch.chdir(tmp_path)
    benchmark.cache_clear()
    try:
        head, _, first, second = training_speed.step_of("llama_125m").splitlines()
        said = training_speed.of_steps("bf16, inductor", "peak_over_bf16"), training_speed.mfu("llama_1b")
    finally:
        benchmark.cache_clear()
    assert head.count("least / median / largest") == 3
    assert "| bf16, in the same kernels | " in first
    assert first.count("| 1 |") == 2
    assert " 1.041 +- " in second
    assert "1400 / 1400 / 1980" in second
    assert said == ("1.12 to 1.12", f"{base['mfu']:.3f}")

"""Zero-shot tables and figure from evaluations written by hand have the right numbers, signs, refusals and export."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from test_analysis import drawn
from tracked import make_folder, training_row, write_rows

from analysis import export, style
from analysis.mxnorm import table02_zero_shot
from mxstudy import results
from mxstudy.tracking.folder import RunFolder

ASKED_IN = {"a": "rmsnorm", "b": "mxnorm p=1", "c": "mxnorm p=2"}
GROUPS = {"boolq": ["boolq"] * 4, "mmlu": ["mmlu_law"] + ["mmlu_virology"] * 3, "piqa": ["piqa"] * 4}
# For each arm and form: whether each task's four questions were answered right, and the bits per character of the
# first. The bits of the others are 1, 2 and 3 more.
RIGHT = {
    ("a", "cf"): {"boolq": [1, 0, 0, 0], "mmlu": [1, 0, 0, 0], "piqa": [1, 1, 0, 0]},
    ("a", "mcf"): {"boolq": [1, 1, 1, 0], "mmlu": [0, 0, 0, 0], "piqa": [0, 0, 0, 0]},
    ("b", "cf"): {"boolq": [1, 1, 1, 0], "mmlu": [0, 0, 0, 1], "piqa": [1, 0, 0, 0]},
    ("b", "mcf"): {"boolq": [0, 0, 0, 0], "mmlu": [0, 0, 0, 0], "piqa": [1, 1, 1, 1]},
}
RIGHT |= {("c", form): RIGHT["a", form] for form in ("cf", "mcf")}
BITS = {"a": 1.0, "b": 1.25, "c": 0.5}


def evaluated(runs: Path, arm: str, questions: int = 4, forms: tuple[str, ...] = ("cf", "mcf")) -> RunFolder:
    """Write a run of the study as it leaves its tables."""
    from mxstudy.evaluation.suite import scores_of

    config = {"study": "evaluate", "experiment": "olmes", "checkpoint": f"/runs/{arm}/step_10"}
    folder = make_folder(runs, arm * 64, f"checkpoint={arm}", **config)
    results.table_path(folder, "scores").parent.mkdir()
    for form in forms:
        for task, right in RIGHT[arm, form].items():
            samples = pd.DataFrame({"group": GROUPS[task], "document": range(4), "gold": 0, "right": right})
            bits = [BITS[arm] + one for one in range(4)]
            texts = {"contexts": [["Question?"]] * 4, "continuations": [[" yes", " no"]] * 4}
            known = {"bits_per_char": bits, "truncated_requests": 0, "nats": [[-1.0, -2.0]] * 4}
            samples = samples.assign(task=task, form=form, **known, **texts)
            path = results.table_path(folder, f"samples_{task}_{form}")
            results.write_table(samples[:questions], path, folder.provenance())
    about = {"checkpoint": f"{arm}/step_10", "asked_in": f"{ASKED_IN[arm]}, mxfp8, compute bf16"}
    scores = scores_of(results.load_samples([folder])).assign(**about)
    results.write_table(scores, results.table_path(folder, "scores"), folder.provenance())
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("olmes")
    for arm in ASKED_IN:
        evaluated(folder, arm)
    return folder


def page(where: Path, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> dict[str, list[list[str]]]:
    """Return the cells of each of the page's tables, by title."""
    monkeypatch.chdir(where)
    table02_zero_shot.main(["--runs", *map(str, arguments)])
    text = (where / "figures" / "mxnorm_table02_zero_shot.md").read_text()
    parts = [part.split("**", 1) for part in text.split("\n**")[1:]]
    return {title: [line.strip("| ").split(" | ") for line in body.split("\n") if line] for title, body in parts}


def column(table: list[list[str]], name: str) -> dict[str, str]:
    place = table[0].index(name)
    return {row[0]: row[place] for row in table[2:]}


@pytest.fixture(scope="module")
def tables(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return page(tmp_path_factory.mktemp("page"), monkeypatch, runs)


@pytest.mark.integration
def test_a_task_has_its_score_in_its_better_form(tables: dict[str, list[list[str]]]) -> None:
    scores = tables["Score in the better form"]
    assert scores[0][1:3] == ["questions", "by guessing, %"]
    assert set(column(scores, "by guessing, %").values()) == {"50.0"}
    assert scores[0][3:] == [*(f"{arm}: right, % (form)" for arm in ("rmsnorm", "mxnorm_p1", "mxnorm_p2"))]
    # The standard error of 3 in 4 is sqrt(3/4 * 1/4 / 3) = 0.25. An average's is the root of the sum of squares, and
    # less.
    assert column(scores, "rmsnorm: right, % (form)") == {
        "boolq": "75.0 +- 25.0 (mcf)",
        "mmlu": "50.0 (cf)",  # no standard error: it is a mean over subjects, and one of them has one question
        "piqa": "50.0 +- 28.9 (cf)",
        "average of 2": "62.5 +- 19.1 (best)",
    }
    assert column(scores, "mxnorm_p1: right, % (form)")["piqa"] == "100.0 +- 0.0 (mcf)"
    assert column(scores, "questions") == {"boolq": "4", "mmlu": "4", "piqa": "4", "average of 2": "8"}


@pytest.mark.integration
def test_bits_are_those_of_the_cloze_form(tables: dict[str, list[list[str]]]) -> None:
    bits = column(tables["Bits per character of the right answer (cf), lower is better"], "mxnorm_p2: bits")
    # 0.5, 1.5, 2.5, 3.5; of mmlu the mean of 0.5 and of 1.5, 2.5, 3.5
    assert bits == {
        "boolq": "2.000 +- 0.645",
        "mmlu": "1.500",
        "piqa": "2.000 +- 0.645",
        "average of 2": "2.000 +- 0.456",
    }


@pytest.mark.integration
def test_differences_are_arm_less_baseline_on_the_same_questions(tables: dict[str, list[list[str]]]) -> None:
    ours = tables["mxnorm_p1 minus rmsnorm [95 % interval]"]
    scores = column(ours, "cf: score, percentage points")
    assert {task: cell.partition(" ")[0] for task, cell in scores.items()} == {
        "boolq": "+50.0",
        "mmlu": "-33.3",  # -1 from law, +1/3 from virology
        "piqa": "-25.0",
        "average of 2": "-",
    }
    assert column(ours, "cf: p") == {"boolq": "0.500", "mmlu": "1.000", "piqa": "1.000", "average of 2": "-"}
    assert column(ours, "mcf: p") == {"boolq": "0.250", "mmlu": "1.000", "piqa": "0.125", "average of 2": "-"}
    same = "+0.2500 [+0.2500, +0.2500]"  # but MMLU has a subject with one question, and so no interval
    bits = dict.fromkeys(["boolq", "mmlu", "piqa", "average of 2"], same) | {"mmlu": "+0.2500"}
    assert column(ours, "cf: bits per character") == bits
    theirs = tables["mxnorm_p2 minus rmsnorm [95 % interval]"]
    assert column(theirs, "mcf: score, percentage points")["boolq"] == "+0.0 [+0.0, +0.0]"
    assert column(theirs, "cf: bits per character")["average of 2"] == "-0.5000 [-0.5000, -0.5000]"


@pytest.mark.integration
def test_intervals_are_those_of_a_paired_bootstrap(tables: dict[str, list[list[str]]]) -> None:
    found = results.difference([([1, 1, 1, 0], [1, 0, 0, 0])])
    cell = column(tables["mxnorm_p1 minus rmsnorm [95 % interval]"], "cf: score, percentage points")["boolq"]
    assert cell == f"+50.0 [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
    assert found.low < 0.5 < found.high


@pytest.mark.integration
@pytest.mark.parametrize("words", ["asked_in=mxnorm p=2", "arm=checkpoint=c", "checkpoint=c/step_10"])
def test_the_baseline_can_be_chosen(words: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = page(tmp_path, monkeypatch, runs, "--baseline", words)
    bits = column(tables["rmsnorm minus mxnorm_p2 [95 % interval]"], "cf: bits per character")
    assert bits["boolq"] == "+0.5000 [+0.5000, +0.5000]"
    assert "mxnorm_p1 minus mxnorm_p2 [95 % interval]" in tables


def test_the_figure_has_an_arm_a_colour_and_a_task_a_row(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (axes,) = drawn(table02_zero_shot, monkeypatch, "--runs", str(runs)).axes
    first, second, zero = axes.lines
    assert [line.get_label() for line in (first, second)] == ["mxnorm_p1", "mxnorm_p2"]
    assert first.get_color() != second.get_color()
    assert [set(line.get_xdata()) for line in (first, second, zero)] == [{0.25}, {-0.5}, {0}]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["boolq", "mmlu", "piqa", "average of 2"]
    assert list(axes.get_yticks()) == sorted(axes.get_yticks(), reverse=True)


def test_one_arm_has_no_differences_and_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = evaluated(tmp_path, "a", forms=("mcf",))
    tables = page(tmp_path, monkeypatch, folder.path)
    arm = "rmsnorm mxfp8 compute=bf16"
    scores = column(tables.pop("Score in the better form"), f"{arm}: right, % (form)")
    assert (scores["boolq"], scores["average of 2"]) == ("75.0 +- 25.0 (mcf)", "37.5 +- 12.5 (mcf)")
    assert tables.keys() == {"Bits per character of the right answer (mcf), lower is better"}
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["mxnorm_table02_zero_shot.md"]


def test_arms_that_were_asked_in_the_same_are_named_by_what_differs(runs: Path) -> None:
    scores = style.of_runs(results.load([runs], "scores"), results.with_arms(results.load([runs], "runs")))
    scores = scores.assign(asked_in="rmsnorm, mxfp8, compute bf16")
    names = table02_zero_shot.named(scores)
    assert names == {arm * 64: f"checkpoint={arm}" for arm in ASKED_IN}


def test_unequal_questions_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluated(tmp_path, "a")
    evaluated(tmp_path, "b", questions=3)
    with pytest.raises(SystemExit):
        table02_zero_shot.main(["--runs", str(tmp_path)])
    assert "6 questions of boolq, mmlu, piqa were not asked of every arm" in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("norm=rmsnorm", "--baseline: 'norm' is not one of asked_in, arm"),
        ("asked_in=mxnorm", "asked_in=mxnorm matches 2 arms"),
        ("asked_in=layernorm", "asked_in=layernorm matches 0 arms"),
    ],
)
def test_a_baseline_that_is_not_one_arm_is_refused(
    words: str, message: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        table02_zero_shot.main(["--runs", str(runs), "--baseline", words])
    assert message in capsys.readouterr().err


def exported(runs: Path, to: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.setattr("sys.argv", ["export", "--runs", str(runs), "--name", "kept", "--to", str(to)])
    export.main()
    return {path.name.removeprefix("kept_").removesuffix(".parquet") for path in to.iterdir()}


@pytest.mark.integration
def test_an_export_draws_the_same_without_the_texts(
    runs: Path, tables: dict[str, list[list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exported(runs, tmp_path / "results", monkeypatch) == {"runs", "scores", "samples"}
    samples = results.load([tmp_path / "results" / "kept"], "samples")
    assert not {"contexts", "continuations"} & {*samples.columns}
    assert len(samples) == 3 * 2 * 3 * 4
    assert page(tmp_path, monkeypatch, tmp_path / "results" / "kept") == tables


def test_a_training_run_has_no_samples_and_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path)
    write_rows(folder, [training_row(step) for step in range(3)])
    assert results.load_samples([folder]).empty
    results.table_path(folder, "quality").parent.mkdir()
    results.write_table(pd.DataFrame({"gain": [0.9993]}), results.table_path(folder, "quality"), {})
    assert exported(folder.path, tmp_path / "results", monkeypatch) == {"runs", "metrics", "quality"}
    assert results.load([tmp_path / "results" / "kept"], "quality")["gain"].tolist() == [0.9993]


def test_a_run_given_twice_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        table02_zero_shot.main(["--runs", str(runs), str(next((runs / "olmes").iterdir()))])
    assert "a run is given twice" in capsys.readouterr().err

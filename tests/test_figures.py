"""The list of figures is complete and true to results/, and its figures are drawn from there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pandas as pd
import pytest
from figure_rules import check_saved
from PIL import Image, ImageChops, ImageStat

from analysis import figures, loss_curves
from analysis.figures import FIGURES, Figure
from analysis.ledger.tables import RESULTS
from analysis.style import caption

ROOT = Path(__file__).parents[1]
NO_FIGURES = {"command", "style", "figure", "figures", "export", "statistics", "units", "report", "stated"}
NO_FIGURES |= {"markup", "difference_plot", "fp4.arms", "fp4.contradictions", "fp4.questions", "recipe.arms_23m"}
NO_FIGURES |= {f"ledger.{path.stem}" for path in (ROOT / "analysis/ledger").glob("*.py")}
NO_FIGURES |= {f"instability.{name}" for name in ("chinchilla", "claims", "scaling_runs")}
NO_FIGURES |= {f"students.{name}" for name in ("arms", "curves", "measures")}
BACKED = [figure for figure in FIGURES if figure.results]


def test_every_script_is_in_the_list_and_every_name_once() -> None:
    paths = (path.relative_to(ROOT / "analysis").with_suffix("") for path in (ROOT / "analysis").rglob("*.py"))
    scripts = {".".join(path.parts) for path in paths} - NO_FIGURES
    scripts -= {script for script in scripts if script.startswith("pages.")}
    assert {figure.module.removeprefix("analysis.") for figure in FIGURES} == scripts
    names = [figure.name for figure in FIGURES]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_a_figure_is_true(figure: Figure, capsys) -> None:
    the_commands_that_make_its_runs_are_there(figure)
    script = importlib.import_module(figure.module)
    assert f"python -m {figure.module} --runs {figure.runs.partition('/')[0]}" in script.__doc__
    with pytest.raises(SystemExit):
        script.main(figure.options("nowhere"))
    assert "nowhere" in capsys.readouterr().err  # the script accepts its arguments, so only the runs are wrong
    if figure.results:
        assert figure.backing()
        assert [path for path in figure.backing() if not (ROOT / path).exists()] == []


def the_commands_that_make_its_runs_are_there(figure: Figure) -> None:
    made = re.findall(r"\+(sweep|experiment)=(\w+)", figure.command)
    for group, name in made:
        folder = ROOT / {"sweep": "sweeps", "experiment": "conf/experiment"}[group]
        assert (folder / f"{name}.yaml").exists()
    benchmarks = re.findall(r"benchmarks\.(\w+)", figure.command)
    assert all((ROOT / "benchmarks" / f"{name}.py").exists() for name in benchmarks)
    places = {f"runs/{name}" for _, name in made} | {f"runs/{name}.json" for name in benchmarks}
    assert {*figure.runs.split()} <= places


def test_published_files_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in (ROOT / RESULTS).iterdir()}
    assert [name for name, size in sizes.items() if size > 1_000_000] == []
    assert sum(sizes.values()) < 15_000_000


@pytest.mark.slow
def test_a_fresh_clone_draws_what_is_backed_and_lists_the_rest(tmp_path: Path, monkeypatch, capsys) -> None:
    """It is drawn once. Other tests check that a figure becomes a PNG and a PDF."""
    rules = check_saved(monkeypatch)
    (tmp_path / RESULTS).symlink_to(ROOT / RESULTS)
    monkeypatch.chdir(tmp_path)
    assert figures.main([]) == 0
    printed = capsys.readouterr().out
    for figure in FIGURES:
        assert (tmp_path / "figures" / "published" / f"{figure.name}.pdf").exists() == (figure in BACKED)
        assert (figure.command in printed) or figure in BACKED
    assert {name: found for name, found in rules.items() if found} == {}
    text = (tmp_path / "figures" / "published" / "mxnorm_fig06_norm_rms.md").read_text()
    assert "- mxnorm_p2: 2 runs (8601e0ddfdd1, ff176e87b17a)" in text
    assert "python -m" not in text


@pytest.mark.integration
def test_one_that_fails_is_named_and_the_others_are_drawn(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / RESULTS).symlink_to(ROOT / RESULTS)
    monkeypatch.chdir(tmp_path)
    broken = importlib.import_module("analysis.mxnorm.figa3_spike_scores")
    monkeypatch.setattr(broken, "draw", lambda runs: 1 / 0)
    assert figures.main(["mxnorm_figa3_spike_scores", "loss_curves"]) == 1
    assert "could not be drawn: mxnorm_figa3_spike_scores" in capsys.readouterr().err
    assert (tmp_path / "figures" / "published" / "loss_curves.png").exists()


@pytest.mark.integration
def test_what_a_user_drew_stays_and_a_page_gets_its_image_when_asked(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "results").mkdir()
    own, image = tmp_path / "figures" / "loss_curves.png", tmp_path / "results" / "mxnorm_pretrain_losses.png"
    own.write_text("mine")
    for path in next(figure for figure in FIGURES if figure.name == "loss_curves").backing():
        (tmp_path / path).symlink_to(ROOT / path)
    monkeypatch.chdir(tmp_path)
    assert figures.main(["loss_curves"]) == 0
    assert not image.exists()
    assert figures.main(["loss_curves", "--pages"]) == 0
    drawn = tmp_path / "figures" / "published" / "loss_curves.png"
    with Image.open(image) as on_page, Image.open(drawn) as whole:
        difference = ImageChops.difference(on_page.convert("RGB"), whole.convert("RGB"))
    assert max(ImageStat.Stat(difference).mean) < 0.5  # of 255
    assert image.stat().st_size < drawn.stat().st_size / 2
    assert own.read_text() == "mine"


def test_an_unknown_name_is_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        figures.main(["loss_curve"])
    assert "no figure is called loss_curve; choose from loss_curves" in capsys.readouterr().err


def test_a_caption_names_arms_seeds_and_runs() -> None:
    rows = pd.DataFrame({"arm": ["rmsnorm", "rmsnorm", "mxnorm_p2"] * 2, "fingerprint": [c * 64 for c in "abc"] * 2})
    rows["color"] = "#000000"
    assert caption(rows, "What it shows.\n\npython -m analysis.x").splitlines() == [
        "What it shows.",
        "",
        f"- rmsnorm: 2 runs ({'a' * 12}, {'b' * 12})",
        f"- mxnorm_p2: 1 run ({'c' * 12})",
    ]
    twice = rows.assign(commit=list("xxxyyy"))
    assert f"- mxnorm_p2: 2 runs ({'c' * 12}, {'c' * 12})" in caption(twice, None).splitlines()


def test_curves_of_two_runs_with_one_fingerprint_are_not_drawn_as_one(monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        loss_curves.main(["--runs", "results/mxnorm_pretrain", "results/mxnorm_pretrain_faaaffd"])
    said = "error: --runs: runs of several commits have the fingerprint 46b5a129726b; give one of them at a time"
    assert said in capsys.readouterr().err

"""Each figure is drawn from runs written by hand, shows what the journal says, and is not empty."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from each import slow_but
from figure_rules import broken
from matplotlib.figure import Figure
from tracked import make_folder, training_row, write_rows

from analysis import loss_curves, style
from analysis.figures import FIGURES as ALL
from analysis.mxnorm import fig06_norm_rms, fig07_histograms, figa3_spike_scores
from mxstudy.probes import spike_score
from mxstudy.results import KNOWN, bin_edges, folders_of, load_metrics, load_probe, load_runs, with_arms, write_table
from mxstudy.studies.pretrain.tables import draw_losses
from mxstudy.tracking.folder import RunFolder

FIGURES = [loss_curves, fig06_norm_rms, fig07_histograms, figa3_spike_scores]
LABELS = ["precision=bf16 norm=rmsnorm", "precision=mxfp8 norm=rmsnorm", "precision=mxfp8 norm=mxnorm_p2"]
ARMS = ["bf16 rmsnorm", "mxfp8 rmsnorm", "mxfp8 mxnorm_p2"]
NORMS = ["layers.0.attention_norm", "layers.0.ffn_norm", "layers.1.attention_norm", "layers.1.ffn_norm", "norm"]


def training(runs: Path, arm: int) -> RunFolder:
    """Write a run with both probes on at every tenth step."""
    choices = dict(word.split("=") for word in LABELS[arm].split())
    norm = {"kind": "mxnorm", "p": 2.0} if choices["norm"] == "mxnorm_p2" else {"kind": choices["norm"]}
    plan = {"schedule": [{"plan": {"layers.*": choices["precision"]}}]}
    draw = random.Random(arm)
    folder = make_folder(runs, f"{arm}" * 64, LABELS[arm], norm=norm, precision=plan)
    normal = np.random.default_rng(arm).normal(size=5000)
    counts = {
        "input": np.histogram(3 * normal, bin_edges())[0].tolist(),
        "output": np.histogram(normal, bin_edges())[0].tolist(),
    }
    rows = []
    for step in range(100):
        if step % 10 == 9:
            rms = {f"{norm}/{name}": draw.gauss(1, 0.01) for norm in NORMS for name in ("rms", "rms_true")}
            rows.append({"step": step, "probe": "norm_output_rms", "values": rms})
            sides = {f"{norm}/{side}": c for norm in NORMS for side, c in counts.items()}
            bounds = {f"{norm}/bound": 17.0 for norm in NORMS}
            rows.append({"step": step, "probe": "activation_histograms", "values": sides | bounds})
        rows.append(training_row(step, loss=2 + 3 * math.exp(-step / 20) + draw.gauss(0, 0.05)))
    write_rows(folder, rows)
    folder.update(state="finished")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    for arm in range(len(LABELS)):
        training(path, arm)
    return path


def name_of(script: ModuleType) -> str:
    """Return the figure's name: the only one of this script, or the one named after it."""
    own = [figure for figure in ALL if figure.module == script.__name__]
    (name,) = (figure.name for figure in own if len(own) == 1 or not figure.script)
    return name


def drawn(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Figure:
    """Return the figure that the script would save, which breaks no rule."""
    figures: list[Figure] = []
    for module in (style, script):  # a script that only calls style.make_figure has no save of its own
        monkeypatch.setattr(module, "save", lambda figure, chosen, caption: figures.append(figure), raising=False)
    script.main(arguments)
    assert broken(figures[0]) == []
    return figures[0]


@pytest.mark.integration
@pytest.mark.parametrize("script", slow_but(FIGURES[:1], FIGURES))
def test_a_figure_is_saved_twice_and_its_path_is_printed(
    script: ModuleType, runs: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    check_saved_twice(script, runs, capsys)


def check_saved_twice(script: ModuleType, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Draw the figure of these runs into a new folder, and check its PNG, whose path is printed, and its PDF."""
    script.main(["--runs", str(runs)])
    name = name_of(script)
    assert capsys.readouterr().out == f"figures/{name}.png\n"
    assert Path("figures", f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert Path("figures", f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_a_figure_may_be_a_pdf_alone_as_wide_as_a_column(runs: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    loss_curves.main(["--runs", str(runs), "--format", "pdf", "--name", "at_1.5"])
    assert capsys.readouterr().out == "figures/at_1.5.pdf\n"
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"at_1.5.pdf", "at_1.5.md"}
    assert b"/MediaBox [ 0 0 234 " in (tmp_path / "figures" / "at_1.5.pdf").read_bytes()  # 3.25 inches, in points


def test_names_with_dollars_are_drawn_by_a_sweep_and_by_a_script(tmp_path: Path, monkeypatch, capsys) -> None:
    """matplotlib takes text between two dollars for a formula, and raises an error where it is none."""
    monkeypatch.chdir(tmp_path)
    data = {"kind": "files", "format": "jsonl", "paths": ["p.jsonl"]}
    for number, field in enumerate(("plain", "price_$_in_$", r"a$\q{$<b>x")):
        folder = make_folder(tmp_path / "runs", f"{number}" * 64, LABELS[0], data=data | {"text_field": field})
        write_rows(folder, [training_row(step, loss=2.0 + number) for step in range(3)])
        folder.update(state="finished")
    loss_curves.main(["--runs", "runs"])
    assert capsys.readouterr().out == "figures/loss_curves.png\n"
    folders = folders_of([tmp_path / "runs"])
    runs = with_arms(load_runs(folders))
    assert sum(name.count("$") for name in runs["arm"]) == 4
    assert draw_losses(folders, runs, tmp_path / "of_the_sweep.png").exists()


def test_loss_curves_are_raw_and_smoothed(runs: Path, monkeypatch) -> None:
    axes, less = drawn(loss_curves, monkeypatch, "--runs", str(runs)).axes
    raw, smooth = axes.lines[0::2], axes.lines[1::2]
    assert [line.get_color() for line in less.lines[1:]] == [line.get_color() for line in smooth[1:]]
    assert [line.get_label() for line in smooth] == ARMS
    for folder, line, front in zip(folders_of([runs]), raw, smooth, strict=True):
        metrics = load_metrics([folder])
        assert list(line.get_xdata()) == list(metrics["tokens"])
        assert list(line.get_ydata()) == list(metrics["loss"])
        assert 0 < np.abs(np.diff(front.get_ydata())).sum() < np.abs(np.diff(line.get_ydata())).sum()
        assert line.get_color() == front.get_color()


@pytest.mark.integration
def test_curves_from_a_table_are_those_of_the_folders(runs: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    for kind, load in {"metrics": load_metrics, "runs": load_runs}.items():
        write_table(load(folders_of([runs])), tmp_path / f"curves_{kind}.parquet", {})
    lines = [
        drawn(loss_curves, monkeypatch, "--runs", str(source)).axes[0].lines for source in (runs, tmp_path / "curves")
    ]
    for ours, theirs in zip(*lines, strict=True):
        assert np.array_equal(ours.get_xydata(), theirs.get_xydata())
    with pytest.raises(SystemExit):
        loss_curves.main(["--runs", str(tmp_path / "curves_metrics.parquet")])
    assert "has rows but no configs; give the folder of runs" in capsys.readouterr().err


def test_every_norm_of_every_run_has_its_rms(runs: Path, monkeypatch) -> None:
    *panels, bar = drawn(fig06_norm_rms, monkeypatch, "--runs", str(runs)).axes
    assert [axes.get_title().replace("\n", " ") for axes in panels] == ARMS
    for axes, folder in zip(panels, folders_of([runs]), strict=True):
        rows = load_probe([folder], "norm_output_rms")
        for norm, true, estimate in zip(NORMS, axes.lines[0::2], axes.lines[1::2], strict=True):
            assert list(true.get_ydata()) == list(rows[f"{norm}/rms_true"])
            assert list(estimate.get_ydata()) == list(rows[f"{norm}/rms"])
            assert list(estimate.get_xdata()) == list(range(320, 3201, 320))  # tokens
    assert [text.get_text() for text in bar.get_yticklabels()] == [NORMS[0], NORMS[-1]]


@pytest.mark.integration
def test_histograms_are_shares_between_the_bins_edges_with_the_bound(runs: Path, monkeypatch) -> None:
    panels = drawn(fig07_histograms, monkeypatch, "--runs", str(runs)).axes
    assert [axes.get_title() for axes in panels] == [
        f"{norm}: {side}" for norm in (NORMS[0], NORMS[2], NORMS[4]) for side in ("input", "output")
    ]
    for axes in panels:
        assert [stairs.get_label() for stairs in axes.patches] == ARMS
        for stairs in axes.patches:
            values, edges, _ = stairs.get_data()
            assert values.sum() == pytest.approx(1)
            assert list(edges[1:-1]) == list(bin_edges()[1:-1])
            assert np.isfinite(edges).all()
        assert axes.get_xlim()[1] > 17.0
    bounds = [sorted({line.get_xdata()[0] for line in axes.lines}) for axes in panels]
    assert bounds == [[], [-17.0, 17.0]] * 3


def test_spike_scores_are_a_point_a_run_by_arm(runs: Path, monkeypatch) -> None:
    (axes,) = drawn(figa3_spike_scores, monkeypatch, "--runs", str(runs)).axes
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == ["bf16 rmsnorm\n1 run", "mxfp8 rmsnorm\n1 run", "mxfp8 mxnorm_p2\n1 run"]
    points = [line.get_xdata() for line in axes.lines if line.get_marker() == "o"]
    scores = [spike_score(list(load_metrics([folder])["loss"])) for folder in folders_of([runs])]
    assert [list(point) for point in points] == [[score] for score in scores]


def test_spike_scores_of_runs_that_go_on_are_no_results(tmp_path: Path, monkeypatch, capsys) -> None:
    training(tmp_path, 0).update(state="running")
    with pytest.raises(SystemExit):
        figa3_spike_scores.main(["--runs", str(tmp_path)])
    assert "--runs: none of these runs has ended" in capsys.readouterr().err
    training(tmp_path, 1)
    (axes,) = drawn(figa3_spike_scores, monkeypatch, "--runs", str(tmp_path)).axes
    assert len(axes.get_yticklabels()) == 1


def test_an_arm_has_a_box_from_five_runs_on() -> None:
    few, many = (
        pd.DataFrame({"arm": arm, "color": "red", "spike_score": np.arange(count) + 1.0})
        for arm, count in (("few", 4), ("many", 5))
    )
    (axes,) = figa3_spike_scores.draw(pd.concat([few, many])).axes
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    boxes = {round(np.mean(line.get_ydata())) for line in axes.lines if line not in dots}
    assert ([len(line.get_xdata()) for line in dots], boxes) == ([4, 5], {1})


@pytest.mark.integration
def test_norms_can_be_chosen_by_name(runs: Path, monkeypatch, capsys) -> None:
    arguments = ["--runs", str(runs), "--norms", "norm"]
    assert len(drawn(fig07_histograms, monkeypatch, *arguments).axes) == 2
    with pytest.raises(SystemExit):
        fig07_histograms.main([*arguments, "nrom"])
    assert "--norms: no norm is called nrom; choose from layers.0.attention_norm" in capsys.readouterr().err


def test_runs_that_cannot_be_drawn_end_in_a_line(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        loss_curves.main(["--runs", str(tmp_path / "nothing")])
    assert "nothing: has no runs; give a run's folder" in capsys.readouterr().err
    write_rows(make_folder(tmp_path), [training_row(0)])
    with pytest.raises(SystemExit):
        fig06_norm_rms.main(["--runs", str(tmp_path)])
    assert "no run there has any norm_output_rms; was the probe on?" in capsys.readouterr().err


def test_norms_and_recipes_keep_their_colour_and_other_names_share_the_rest() -> None:
    known = ["bf16 rmsnorm", "mxfp8 rmsnorm", "mxnorm_p2"]
    assert list(style.colors(known).values()) == [KNOWN[word] for word in ("bf16", "rmsnorm", "mxnorm_p2")]
    strangers = style.colors(["a", "b", "a", "c"])
    assert list(strangers) == ["a", "b", "c"]
    assert len(set(strangers.values()) - set(KNOWN.values())) == 3
    assert style.colors(["mxfp8"])["mxfp8"] == style.colors(["fp32", "mxfp8"])["mxfp8"]
    assert len(set(style.colors(map(str, range(20))).values())) == 20

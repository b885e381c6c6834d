"""The report shows arms, paired differences, and the claims' verdicts."""

from __future__ import annotations

import math
import re
from datetime import date
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import difference_plot, report
from analysis.style import plt
from analysis.units import differing, paired
from mxstudy.results import KNOWN, estimate, load, with_arms

ROOT = Path(__file__).parents[1]


def runs(rows: list[dict[str, object]]) -> pd.DataFrame:
    """Return one run per row: norm, seed, loss and what else differs."""
    frame = pd.DataFrame(rows).rename(columns={"loss": "validation_loss"})
    frame["choice.norm"], frame["choice.precision"] = frame["norm"], frame.get("precision", "mxfp8")
    frame["config.norm.kind"], frame["config.seed"] = frame["norm"], frame["seed"]
    frame["config.data_seed"], frame["fingerprint"] = frame["seed"], [f"{i:064x}" for i in range(len(frame))]
    frame["state"] = frame.get("state", "finished")
    return frame.assign(
        spike_score=frame.get("spike_score", 0.0),
        spikes=frame.get("spikes", 1),
        **{"config.runs_dir": frame["fingerprint"]},
    )


def arms(norm: str, losses: list[float], **others: object) -> list[dict[str, object]]:
    return [{"norm": norm, "seed": seed, "loss": loss} | others for seed, loss in enumerate(losses)]


# --------------------------------------------------------------------------------------------------- intervals


def test_the_interval_is_students_t() -> None:
    found = estimate(pd.Series([1.0, 2.0, 3.0, 4.0, math.nan, math.inf]))
    assert (found.value, found.count, found.counted(".4f")) == (2.5, 4, "2.5000 ± 2.0543 (4 of 6)")
    assert found.half_width == pytest.approx(3.18245 * math.sqrt(5 / 3) / 2, rel=1e-5)
    assert estimate(pd.Series([1.0])).counted(".4f") == "1.0000 (1)"
    assert estimate(pd.Series([math.nan])).counted(".4f") == "- (0 of 1)"
    assert estimate(pd.Series([], dtype=float)).counted(".4f") == "-"


@pytest.mark.integration
def test_the_interval_holds_what_it_says() -> None:
    draw = np.random.default_rng(0)
    held = [abs((m := estimate(pd.Series(draw.normal(3, 1, 4)))).value - 3) < m.half_width for _ in range(2000)]
    assert np.mean(held) == pytest.approx(0.95, abs=0.02)


def test_pairs_share_seed_and_everything_but_what_is_compared() -> None:
    frame = runs(
        [
            *arms("rmsnorm", [1.0, 2.0, 3.0], rate=1),
            *arms("mxnorm_p2", [1.1, 2.1, 9.0], rate=1)[:2],
            *arms("mxnorm_p2", [50.0], rate=2),
        ]
    )
    frame["config.optimizer.lr"] = frame["rate"]
    one, other = frame["norm"] == "mxnorm_p2", frame["norm"] == "rmsnorm"
    found = paired(frame, "validation_loss", one, other, varied=["config.norm"])
    assert (round(found.value, 12), found.count) == (0.1, 2)
    assert differing(frame) == ["config.norm.kind", "config.optimizer.lr"]


def test_what_changes_no_number_parts_no_pairs() -> None:
    """This covers all that is cosmetic in a run's schema, and nothing that only begins like it."""
    frame = runs([*arms("rmsnorm", [1.0, 2.0]), *arms("mxnorm_p2", [1.1, 2.1])])
    elsewhere = frame["norm"].map({"rmsnorm": "here", "mxnorm_p2": "there"})
    names = ("evaluation.limit", "data.mirror", "data.paths.0", "data.revision", "tokenizer.name", "dry_run")
    frame = frame.assign(**{f"config.{name}": elsewhere for name in (*names, "probe.weights.every_steps")})
    one, other = frame["norm"] == "mxnorm_p2", frame["norm"] == "rmsnorm"
    assert paired(frame, "validation_loss", one, other, varied=["config.norm"]).count == 2
    frame = frame.assign(**{"config.data.named": elsewhere})
    assert differing(frame) == ["config.norm.kind", "config.data.named"]
    assert paired(frame, "validation_loss", one, other, varied=["config.norm"]).count == 0


# --------------------------------------------------------------------------------------------------------- page


def shown(frame: pd.DataFrame) -> tuple[str, dict[str, str]]:
    """Return what the table of differences compares with, and each arm's cell."""
    rows = re.findall(
        r"<tr><td>(.*?)</td><td>(.*?)</td><td class=\"number\">(.*?)</td>", report.differences(with_arms(frame))
    )
    (against,) = {partner for _, partner, _ in rows}
    return against, {arm: difference for arm, _, difference in rows}


def swept(*norms: str) -> pd.DataFrame:
    """Return two seeds of each norm, all a tenth of a nat apart, from a sweep that names its baseline."""
    frame = runs([row for i, norm in enumerate(norms) for row in arms(norm, [2 + i / 10, 3 + i / 10], label=norm)])
    return frame.assign(**{"config.baseline.precision": "mxfp8", "config.baseline.norm": "rmsnorm"})


def test_differences_are_to_the_arm_that_the_sweep_names() -> None:
    against, found = shown(swept("mxnorm_p1", "rmsnorm", "mxnorm_p2"))
    assert against == "rmsnorm"
    assert {arm: text.split()[0] for arm, text in found.items()} == {"mxnorm_p1": "-0.1000", "mxnorm_p2": "+0.1000"}


@pytest.mark.parametrize("others", [{}, {"rate": [1, 1, 2, 2], "head": [1, 1, 2, 2]}])
def test_where_the_baseline_was_not_run_the_first_arm_is_named(others: dict[str, list[int]]) -> None:
    """This holds however many groups the arms differ in, and for a group that no run has."""
    frame = swept("mxnorm_p1", "mxnorm_p2").assign(**{f"config.{name}.n": values for name, values in others.items()})
    for asked in (frame, frame.assign(**{"config.baseline.nrom": "rmsnorm"})):
        against, found = shown(asked)
        assert against.startswith("mxnorm_p1") or not others
        assert [text.split()[0] for text in found.values()] == ["+0.1000"]


def on_corpora(*entropies: float) -> pd.DataFrame:
    frame = swept("rmsnorm", "mxnorm_p2").assign(command="", unigram_entropy_nats=entropies)
    frame["config.experiment"] = frame["commit"] = frame["torch"] = frame["gpu"] = frame["config.data.paths"] = "a"
    return frame.assign(dirty=False, **dict.fromkeys(("tokens_per_s", "mfu", "memory_gib"), 1.0))


def test_runs_on_two_corpora_are_no_pairs() -> None:
    """The corpora's names do not matter: a name is cosmetic, and the content is not."""
    page = report.page(report.in_arms(on_corpora(6.5, 6.5, 6.5, 7.0)), {})
    same = "unigram_entropy_nats=6.5</td><td>rmsnorm unigram_entropy_nats=6.5</td>"
    assert f'<td>mxnorm_p2 {same}<td class="number">+0.1000 (1)</td>' in page
    assert '<td>mxnorm_p2 unigram_entropy_nats=7</td><td>-</td><td class="number">-</td>' in page
    assert "<th>data.unigram_entropy_nats</th>" in page


def test_runs_on_corpora_of_two_kinds_have_arms() -> None:
    """Each kind has keys that the other has not, such as the files of a text."""
    frame = on_corpora(6.5, 6.5, 6.5, 7.0).assign(**{"config.data.format": ["text"] * 3 + [math.nan]})
    assert report.in_arms(frame)["arm"].nunique() == 3


def test_where_a_corpus_of_a_blend_lies_parts_no_arms() -> None:
    frame = on_corpora(*[6.5] * 4)
    elsewhere = frame.assign(**{"config.data.corpora.own.paths.0": ["a", "b", "c", "d"]})
    assert report.page(report.in_arms(elsewhere), {}) == report.page(report.in_arms(frame), {})


def test_the_head_has_the_day_and_the_commit_and_a_phone_shows_it_in_its_own_width() -> None:
    page = report.page(report.in_arms(on_corpora(*[6.5] * 4).assign(commit="c" * 40, dirty=[True] * 4)), {})
    assert f"Written on {date.today():%d %B %Y}; commit of the runs: <code>{'c' * 12}</code> (changed)<" in page
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page


def test_figures_that_the_runs_are_too_many_for_are_named() -> None:
    many = report.in_arms(on_corpora(*[6.5] * 4)).assign(fingerprint=list("abcd"))
    assert "Not drawn" not in report.page(many, {})
    crowded = dict.fromkeys(("Training loss", "RMS of the norms' outputs"))
    said = f"Not drawn of more than {report.MOST} runs or arms: Training loss, RMS of the norms&#x27; outputs;"
    assert said in report.page(many, crowded)


@pytest.mark.integration
def test_too_many_runs_for_a_figure_leave_its_place_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [ROOT / "results/mxnorm_pretrain"]
    runs = report.in_arms(load(tables, "runs"))
    assert None not in report.drawn(tables, runs).values()
    monkeypatch.setattr(report, "MOST", 1)
    crowded = [title for title, figure in report.drawn(tables, runs).items() if figure is None]
    assert crowded == ["Training loss", "RMS of the norms' outputs", "Norms at the last step"]


def test_runs_are_grouped_by_arm_and_what_they_say_nothing_of_is_folded() -> None:
    frame = report.in_arms(on_corpora(*[6.5] * 4)).iloc[[0, 2, 1, 3]]
    groups = re.split(r'<th class="group" colspan="7">(.*?)</th>', report.environment(frame))[1:]
    named = {arm: re.findall(r"<td>(\w+ seed=\d)</td>", rows) for arm, rows in zip(*[iter(groups)] * 2, strict=True)}
    assert named == {arm: [f"{arm} seed={seed}" for seed in (0, 1)] for arm in ("rmsnorm", "mxnorm_p2")}
    folded = re.search(r"<details><summary>(\d+) claims need other runs</summary>(.*)</details>", report.claims(frame))
    assert folded
    assert folded[2].count("<tr>") == int(folded[1]) + 1
    many = frame.assign(command=list("abcd"))
    assert "<details><summary>4 commands</summary>" in report.commands(many)
    assert "<details>" not in report.commands(many[:3])


def test_a_verdict_stands_beside_the_scale_of_its_claim_and_that_of_the_runs() -> None:
    """A verdict holds only at the scale of its runs, which a report of 0.2M tokens once did not say."""
    rows = arms("rmsnorm", [2.0, 2.1, 2.2, 2.3]) + arms("mxnorm", [2.1, 2.2, 2.3, 2.4])
    model = {"num_layers": 3, "hidden_size": 256, "num_heads": 4}
    train = {"steps": 100, "batch_size": 8, "sequence_length": 256}
    groups = {"model": model, "train": train, "norm": {"p": 2.0}, "optimizer": {"lr": 1e-3}}
    config = {f"config.{group}.{key}": value for group, own in groups.items() for key, value in own.items()}
    frame = runs(rows).assign(**config)
    frame = frame.assign(commit="a", loss=2.0, tokens_per_s=1.0)
    told, _ = report.claims(frame).split("<details>")
    cells = "<td>125M, 2.6B tokens</td><td>3 x 256, 0.2M tokens</td>"
    assert f"around the best learning rate p=2 and RMSNorm differ little</td>{cells}" in told


@pytest.mark.usefixtures("figure_rules")
def test_differences_are_drawn_with_their_signs_and_the_arms_colours() -> None:
    frame = with_arms(swept("mxnorm_p1", "rmsnorm", "mxnorm_p2"))
    (axes,) = difference_plot.draw(frame).axes
    points = {line.get_color(): line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"}
    assert points == {KNOWN["mxnorm_p1"]: pytest.approx(-0.1), KNOWN["mxnorm_p2"]: pytest.approx(0.1)}
    assert axes.get_xlabel() == "validation loss minus that of\nrmsnorm, nats"
    assert not difference_plot.suits(frame[frame["arm"] == "rmsnorm"])


@pytest.mark.integration
def test_the_baseline_the_runs_and_the_name_can_be_chosen(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "drawn", lambda *_: {})
    asked = ["--runs", str(ROOT / "results" / "mxnorm_equivalence"), "--only", "norm=rmsnorm", "norm=mxnorm_p2"]
    report.main([*asked, "--baseline", "norm=mxnorm_p2", "--name", "mine"])
    assert capsys.readouterr().out == "figures/mine.html\n"
    text = (tmp_path / "figures" / "mine.html").read_text()
    assert "16 runs in 2 arms" in text
    assert '<td>rmsnorm</td><td>mxnorm_p2</td><td class="number">-0.0' in text
    with pytest.raises(SystemExit):
        report.main([*asked, "--baseline", "norm=layernorm"])
    assert "--baseline: no run has norm=layernorm; there are mxnorm_p2; rmsnorm" in capsys.readouterr().err


def test_a_run_that_never_started_does_not_differ_by_its_corpus() -> None:
    assert "unigram_entropy_nats" not in report.page(report.in_arms(on_corpora(6.5, 6.5, 6.5, math.nan)), {})


@pytest.mark.integration
def test_arms_on_different_backends_are_named_below_their_table() -> None:
    frame = report.in_arms(on_corpora(*[6.5] * 4))
    assert "different backends" not in report.page(frame, {})  # nothing says on which they ran
    same, others = (frame.assign(backend=[first, first, "fused", "fused"]) for first in ("fused", "reference"))
    assert "different backends" not in report.page(same, {})
    page = report.page(others, {})
    assert "run on different backends (rmsnorm: reference; mxnorm_p2: fused), which differ in the order" in page
    assert "precision.backend=reference puts all on one" in page
    assert "<td>CPU</td><td>fused</td>" in report.page(others.assign(gpu=None), {})


HOSTILE = "</td><script>alert('x')</script><img src=x onerror=\"alert(1)\">&amp; price_$_in_$ a$\\q{$"


@pytest.mark.slow
def test_text_of_a_run_is_text_on_the_page_wherever_it_stands() -> None:
    """Hostile text stands in every column that a run folder fills: configs, choices, names, commands, machines."""
    frame = report.in_arms(on_corpora(*[6.5] * 4)).assign(backend="fused", code="a", label="b", name="c")
    frame["config.data.text_field"] = ["text", "text", "others", "others"]  # so that the page shows the column
    plain_tags = re.findall(r"<[^>]*>", report.page(frame, {}))
    words = [column for column in frame if frame[column].map(lambda value: isinstance(value, str)).all()]
    assert {"state", "gpu", "commit", "arm", "command", "backend", "config.data.text_field"} <= set(words)
    for column in {*words} - {"state", "fingerprint", "color"}:
        page = report.page(frame.assign(**{column: frame[column] + HOSTILE}), {})
        assert set(re.findall(r"<[^>]*>", page)) <= set(plain_tags), column
    asked = frame.assign(**{f"config.{HOSTILE}": ["a", "a", "b", "b"], "fingerprint": HOSTILE})
    shown = [report.page(asked, {}), report.environment(frame.assign(state=HOSTILE))]
    figure = plt.figure()
    figure.suptitle(HOSTILE)
    shown.append(report.embedded(HOSTILE, figure))
    for part in shown:
        assert re.findall(r"<script|<img src=x|onerror=\"", part) == []


@pytest.mark.integration
def test_the_page_of_committed_runs_holds_all_of_itself(tmp_path: Path, capsys) -> None:
    tables = [str(ROOT / "results" / name) for name in ("mxnorm_pretrain", "mxnorm_pretrain_seed1")]
    report.main(["--runs", *tables, "--to", str(tmp_path / "report.html")])
    text = (tmp_path / "report.html").read_text()
    assert capsys.readouterr().out.strip().endswith("report.html")
    assert text.count("data:image/png;base64,") == 5
    assert not re.search(r"(src|href)=\"(?!data:)", text)
    assert "1.7911 ± 0.0164 (2)" in text
    assert "of p=1, RMSNorm" not in text
    assert "around the best learning rate p=2 and RMSNorm differ little" in text  # as two seeds cannot tell
    for name in ("46b5a129726b", "7c38a9fcf00a", "NVIDIA H200", "+experiment=mxnorm_pretrain"):
        assert name in text


def test_runs_that_are_not_there_end_in_a_line(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        report.main(["--runs", str(tmp_path / "nothing")])
    assert "nothing: has no runs" in capsys.readouterr().err


def test_runs_that_trained_nothing_end_in_a_line(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(
        report.results,
        "load",
        lambda *_: pd.DataFrame({"config.study": ["pretrain", "evaluate"], "fingerprint": ["a", "b"]}),
    )
    with pytest.raises(SystemExit):
        report.main(["--runs", "runs/olmes", "--to", str(tmp_path / "report.html")])
    assert "training runs only; --without study=evaluate leaves out the others" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()

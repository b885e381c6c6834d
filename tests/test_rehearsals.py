"""Every experiment runs end to end on a laptop, with +debug=tiny through the command line, in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from commands import call, run_here
from composing import compose_job, handed_over, validated
from each import each, slow_but

from analysis import loss_curves, report
from mxstudy.cli import composing
from mxstudy.config import AnyRun, PySource
from mxstudy.config.conf_folders import CONF
from mxstudy.reader import ConfigError, flatten, plain
from mxstudy.rehearsal import rehearse_data
from mxstudy.tracking.found_runs import find_runs
from mxstudy.tracking.mlflow_store import connect

EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
IN_MAKE_TEST = ("quickstart", "student_teacher", "olmes")


@pytest.mark.integration
@pytest.mark.parametrize("name", slow_but(IN_MAKE_TEST, EXPERIMENTS))
def test_a_rehearsal_finishes(name: str, tmp_path: Path, cache: str, given_to: Callable[[str], list[str]]) -> None:
    run_here(tmp_path, f"+experiment={name}", "+debug=tiny", "tracking=none", cache, *given_to(name))
    assert find_runs(tmp_path / "runs") == []
    (run,) = find_runs(tmp_path / "runs" / "rehearsals")
    assert run.is_rehearsal
    assert run.status().state == "finished"
    assert run.config().experiment == name
    assert run.status().step == run.status().steps


@pytest.mark.slow
def test_a_rehearsal_leaves_no_trace_among_the_real_runs(tmp_path: Path, monkeypatch, capsys) -> None:
    """It is neither in runs/, nor in the experiment that leads the dashboard, nor among the figures."""
    store = f"sqlite:///{tmp_path}/mlflow.db"
    cache = tmp_path.parent / "cache"
    run_here(
        tmp_path, "+experiment=quickstart", "+debug=tiny", "seed=0,1", f"tracking.uri={store}", f"cache_dir={cache}"
    )
    client = connect(store)
    (ours,) = [found for found in client.search_experiments() if found.name != "Default"]
    assert ours.name == "rehearsals"
    runs = client.search_runs([ours.experiment_id])
    assert [run.data.tags["debug"] for run in runs] == ["tiny"] * 3  # the sweep and its two runs
    assert {run.data.tags["experiment"] for run in runs} == {"quickstart"}
    monkeypatch.chdir(tmp_path)
    loss_curves.main(["--runs", "runs/rehearsals/quickstart"])
    loss_curves.main(["--runs", "runs/rehearsals", "--name", "mine"])
    report.main(["--runs", "runs/rehearsals/quickstart"])
    assert not find_runs(tmp_path / "runs")
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["rehearsals"]
    drawn = {path.name for path in (tmp_path / "figures" / "rehearsals").iterdir() if path.suffix != ".pdf"}
    assert drawn == {"quickstart.png", "loss_curves.png", "loss_curves.md", "mine.png", "mine.md", "report.html"}


def test_a_rehearsal_may_be_put_elsewhere() -> None:
    asked = composed("+experiment=quickstart", "+debug=tiny", "runs_dir=here", "tracking.experiment=mine")
    assert (asked.runs_dir, asked.mlflow_experiment) == ("here", "mine")
    real = composed("+experiment=quickstart")
    assert (real.runs_dir, real.mlflow_experiment) == ("runs", "quickstart")


BLEND = "data.phases=[{weights: {text: 1}}]"


@pytest.mark.integration
@each(
    ("experiment", "words", "paths"),
    [
        ("quickstart", ["data=text", "data.paths=[a.txt]"], "data.paths"),
        ("perplexity", ["data=text", "data.paths=[a.txt]", "checkpoint=x"], "data.paths"),
        ("mxnorm_pretrain", ["data=blend", BLEND, "+data.corpora.text.paths=[a.txt]"], "data.corpora.text.paths"),
        ("prepare_data", ["data=blend", BLEND, "+data.corpora.text.paths=[a.txt]"], "data.corpora.text.paths"),
        ("mxfp8_vs_bf16", [BLEND, "+data.corpora.text.paths=[a.txt]"], "data.corpora.text.paths"),
    ],
)
def test_a_rehearsal_keeps_the_corpus_of_the_command(experiment: str, words: list[str], paths: str) -> None:
    """It once used Python's source silently, or said that there is no key data.paths."""
    job = compose_job(f"+experiment={experiment}", "+debug=tiny", *words)
    assert not isinstance(job.values, ConfigError)
    assert flatten(job.values)[f"{paths}.0"] == "a.txt"
    assert job.notes == ()


def test_a_rehearsal_keeps_the_files_of_an_experiment() -> None:
    """They once gave way to Python's source. A choice of data that names no file still does."""
    own, stand_in = {"kind": "files", "format": "text", "paths": ["a.txt"]}, {"kind": "pysource"}
    debug = {"in_place_of": {"data": stand_in}}
    for given, kept in ((own, own), (own | {"paths": "???"}, stand_in)):
        values = debug | {"data": given}
        assert rehearse_data(values, ["+experiment=mine"]) == ()
        assert values["data"] == kept
    blend = {"kind": "blend", "corpora": {"mine": own, "other": {"kind": "hugging_face"}}}
    values = debug | {"data": blend}
    (note,) = rehearse_data(values, [])
    assert note == "debug: pysource stands in for each corpus of the blend: other"
    assert values["data"]["corpora"] == {"mine": own, "other": stand_in}


@pytest.mark.integration
def test_a_rehearsal_has_the_phases_of_the_experiments_blend() -> None:
    """It once read one corpus, so that no rehearsal changed its phase."""
    job, real = (compose_job("+experiment=mxfp8_vs_bf16", *words) for words in (["+debug=tiny"], []))
    small, whole = validated(job).data, real.values["data"]
    assert [phase.from_fraction for phase in small.phases] == [0.0, 0.6]
    assert plain(small.phases[1].weights) == whole["phases"][1]["weights"]
    assert small.corpora.keys() == whole["corpora"].keys()
    assert set(small.corpora.values()) == {PySource()}
    assert job.notes == ("debug: pysource stands in for each corpus of the blend: pysource, pysource_packages",)
    read = [job.choices[group] for group in ("data", "tokenizer")]  # by which it is found and named
    assert read == ["pysource_phases", "bytes"] != [real.choices[group] for group in ("data", "tokenizer")]


@pytest.mark.integration
def test_a_rehearsal_reads_a_little_of_the_hub_and_says_so() -> None:
    many = compose_job("+experiment=quickstart", "+debug=tiny", "data=slimpajama_fineweb_edu")
    assert [corpus["max_documents"] for corpus in many.values["data"]["corpora"].values()] == [500, 500]
    assert many.notes == tuple(
        f"debug: {name}, its first 500 documents; data.max_documents takes others"
        for name in ("cerebras/SlimPajama-627B", "HuggingFaceFW/fineweb-edu")
    )
    loader, master, jobs = handed_over("+experiment=quickstart", "+debug=tiny", "data=fineweb_edu", "seed=0,1")
    both = list(composing.compose(loader, master, jobs))  # jobs that share a composition
    assert [(one.values["data"]["max_documents"], len(one.notes)) for one in both] == [(500, 1), (500, 1)]
    few = compose_job("+experiment=quickstart", "+debug=tiny", "data=fineweb_edu", "data.max_documents=7")
    assert (few.values["data"]["max_documents"], few.notes) == (7, ())


@pytest.mark.integration
def test_a_tokenizer_that_gives_way_is_said_once_before_the_plan(here: Path, capsys) -> None:
    words = ("+experiment=mxnorm_pretrain", "+debug=tiny", "tracking=none", "dry_run=true", "seed=0,1")
    assert call(*words) == (0, "")
    assert "debug:" not in capsys.readouterr().out  # the experiment's own give way silently
    assert call(*words, "tokenizer=bpe_2k") == (0, "")
    (said,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("debug:"))
    assert said == "debug: tokenizer=bpe_2k is not used; a rehearsal has tokenizer=bytes"
    job = compose_job("+experiment=quickstart", "+debug=tiny", "tokenizer=bytes")
    assert (validated(job).data.kind, job.notes) == ("pysource", ())


def composed(*words: str) -> AnyRun:
    return validated(compose_job(*words))

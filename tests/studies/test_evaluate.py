"""The evaluation of a checkpoint, as a kind of run, leaves its tables and report, and survives a kill."""

from __future__ import annotations

import json
import math
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from commands import Fault, run, run_here
from composing import compose
from tracked import make_folder

from mxstudy import results
from mxstudy.config import read_run
from mxstudy.evaluation.export import main as export_main
from mxstudy.launch.plan import plan
from mxstudy.studies import trained_model as of_checkpoint
from mxstudy.studies.evaluate import study as checks
from mxstudy.studies.evaluate.tables import score_rows, show_scores
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.found_runs import find_runs
from mxstudy.tracking.journal import read_journal
from mxstudy.tracking.mlflow_store import connect

pytestmark = pytest.mark.integration
TASKS = "evaluation.tasks=[csqa,mmlu,winogrande]"


@pytest.fixture(scope="module")
def asked(trained: RunFolder, evaluation_sets: Path) -> list[str]:
    return ["+experiment=olmes", f"checkpoint={trained.path}", f"evaluation.data_dir={evaluation_sets}", TASKS]


@pytest.fixture(scope="module")
def evaluated(asked: list[str], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("olmes")
    run_here(folder, *asked, "tracking=none")
    (found,) = find_runs(folder / "runs")
    return found


@pytest.mark.slow
def test_every_question_is_asked_in_both_forms(evaluated: RunFolder) -> None:
    samples = results.load([evaluated.path], "samples")
    counts = samples.groupby(["task", "form"]).size()
    assert counts.to_dict() == {
        (task, form): count
        for task, count in {"csqa": 5, "mmlu": 10, "winogrande": 5}.items()
        for form in ("cf", "mcf")
    }
    assert set(samples["group"]) == {"csqa", "mmlu_abstract_algebra", "mmlu_law", "winogrande"}
    for row in samples.to_dict("records"):
        options = len(row["continuations"])
        assert len(row["nats"]) == options > row["gold"]
        assert len(row["alone"]) == (options if (row["task"], row["form"]) == ("csqa", "cf") else 0)
        assert row["bits_per_char"] == pytest.approx(
            -row["nats"][row["gold"]] / math.log(2) / len(row["continuations"][row["gold"]])
        )
        assert set(row["contexts"])
        assert len(row["contexts"]) == (2 if row["form"] == "cf" and options == 2 else 1)


def test_scores_are_means_of_samples(evaluated: RunFolder) -> None:
    samples, scores = (results.load([evaluated.path], kind) for kind in ("samples", "scores"))
    assert json.loads((evaluated.path / "scores.json").read_text())[0]["score"] == scores["score"][0]
    by_row = scores.set_index(["task", "form"])
    for (task, form), own in samples.groupby(["task", "form"]):
        expected = own.groupby("group")[["right", "bits_per_char"]].mean().mean()  # a subject counts once
        assert by_row.loc[(task, form), ["score", "bits_per_char"]].tolist() == pytest.approx(expected.tolist())
        assert by_row.loc[(task, form), "documents"] == len(own)
    chances = by_row["chance"].xs("cf", level="form").to_dict()
    assert chances == pytest.approx({"csqa": 1 / 5, "mmlu": 1 / 4, "winogrande": 1 / 2, "average of 2": 0.35})
    assert by_row.loc[("mmlu", "cf"), "truncated_requests"] == 40  # bytes, in a model of 64 of them
    assert by_row.loc[("winogrande", "cf"), "truncated_requests"] == 0
    pair = by_row.loc[[("csqa", "cf"), ("winogrande", "cf")]]
    average = by_row.loc[("average of 2", "cf")]
    assert average["score"] == pytest.approx(pair["score"].mean())
    assert average["stderr"] == pytest.approx(math.hypot(*pair["stderr"]) / 2)
    best = by_row[by_row["best"] & (by_row.index.get_level_values(0) != "average of 2")]
    assert (
        best["score"].tolist()
        == scores[~scores["task"].str.startswith("average")].groupby("task")["score"].max().tolist()
    )


@pytest.mark.parametrize(
    ("asked", "starred"),
    [
        ({"piqa": ["cf"], "mmlu": ["mcf"]}, set()),
        ({"piqa": ["mcf", "cf"], "mmlu": ["mcf"]}, {("piqa", "mcf*")}),
    ],
)
def test_a_star_marks_the_better_of_the_two_forms_of_a_task(
    asked: dict[str, list[str]],
    starred: set[tuple[str, str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = make_folder(tmp_path, "a" * 64, "checkpoint=a", study="evaluate", checkpoint="/a/checkpoints/step_10")
    pairs = [(task, form) for task, forms in asked.items() for form in forms]
    scores = pd.DataFrame(pairs, columns=["task", "form"]).assign(
        best=[form == asked[task][0] for task, form in pairs], documents=4, chance=0.5
    )
    numbers = dict.fromkeys(("score", "stderr", "bits_per_char", "bits_per_char_stderr"), 0.5)
    results.save_table(folder, "scores", scores.assign(**numbers))
    assert {(task, form) for task, form, *_ in score_rows(folder) if form.endswith("*")} == starred
    show_scores(folder)
    assert ("the better form of a task" in capsys.readouterr().out) == bool(starred)


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_with_the_next_task(asked: list[str], evaluated: RunFolder, tmp_path: Path) -> None:
    kill = Fault(r"os.rename .*samples_mmlu_cf", signal.SIGKILL)
    code, said = run(tmp_path, *asked, "tracking=none", fault=kill)
    assert code == -signal.SIGKILL, said
    (begun,) = find_runs(tmp_path / "runs")
    kept = {path.name: path.stat().st_mtime_ns for path in (begun.path / "tables").glob("samples_*")}
    assert kept.keys() == {"samples_csqa_cf.parquet", "samples_csqa_mcf.parquet", "samples_mmlu_mcf.parquet"}
    code, said = run(tmp_path, *asked, "tracking=none")
    assert code == 0, said
    assert "goes on" in said
    linears = r"linears in mxfp8: forward E4M3 x E4M3\n.*linear in bf16: no operand is cast\n"
    assert re.search(linears + r".*those of X's cast\n\d blocks: fused\n", said)
    plan, _ = read_journal(begun.journal_path)
    assert plan["precision"]["layers.0.attention.wo"] == "mxfp8"
    assert set(plan["backends"].values()) == {"fused"}
    assert {name: (begun.path / "tables" / name).stat().st_mtime_ns for name in kept} == kept
    for kind in ("samples", "scores"):
        pd.testing.assert_frame_equal(
            *(results.load([one.path], kind).drop(columns="label") for one in (begun, evaluated))
        )


@pytest.mark.slow
def test_two_processes_find_what_one_finds(asked: list[str], evaluated: RunFolder, tmp_path: Path) -> None:
    run_here(tmp_path, *asked, "tracking=none", "processes=2", "device=cpu")
    (found,) = find_runs(tmp_path / "runs")
    assert found.status().fingerprint == evaluated.status().fingerprint
    samples = (results.load([one.path], "samples").drop(columns="label") for one in (found, evaluated))
    pd.testing.assert_frame_equal(*samples)


@pytest.mark.slow
def test_another_norm_and_precision_are_another_run(
    asked: list[str], evaluated: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(tmp_path, *asked, "tracking=none", "norm=rmsnorm,rmsnorm_folded,mxnorm_p2", "precision=mxfp4")
    said = capsys.readouterr().out
    assert "rmsnorm, mxfp4, compute bf16" in said
    assert "mxnorm p=2, mxfp4, compute bf16" in said
    assert "95 % paired bootstrap interval" in " ".join(said.split())  # a title may wrap
    found = find_runs(tmp_path / "runs")
    assert len({one.status().fingerprint for one in [*found, evaluated]}) == 4
    nats = [tuple(map(tuple, results.load([one.path], "samples")["nats"])) for one in [*found, evaluated]]
    assert len(set(nats)) == 4


def test_what_was_evaluated_is_skipped_wherever_its_data_comes_from(
    asked: list[str], evaluated: RunFolder, evaluation_sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "sets"
    copy.mkdir()
    for path in evaluation_sets.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    elsewhere = [word for word in asked if "data_dir" not in word] + [f"evaluation.data_dir={copy}"]
    runs_dir = f"runs_dir={evaluated.path.parents[1]}"
    run_here(tmp_path, *elsewhere, "tracking=none", runs_dir)
    assert "skipped: finished" in capsys.readouterr().out
    (copy / "csqa.validation.jsonl").write_text((evaluation_sets / "csqa.validation.jsonl").read_text() * 2)
    assert checks.STUDY.identity(settings(*elsewhere)) != checks.STUDY.identity(settings(*asked))


@pytest.mark.slow
def test_the_training_run_has_the_scores_in_mlflow(
    asked: list[str], uri: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(tmp_path, "+experiment=quickstart", "+debug=tiny", "runs_dir=runs", f"tracking.uri={uri}", cache)
    (training,) = find_runs(tmp_path / "runs")
    here = [word for word in asked if not word.startswith("checkpoint=")] + [
        f"checkpoint={training.status().fingerprint[:8]}"
    ]
    run_here(tmp_path, *here, f"tracking.uri={uri}")
    run_here(tmp_path, *here, f"tracking.uri={uri}", "precision=mxfp4")  # not the model that was trained
    own, _ = sorted(find_runs(tmp_path / "runs", "olmes/*"), key=lambda one: one.status().started_s)
    scores = results.load([own.path], "scores").set_index(["task", "form"])["score"]
    client = connect(uri)
    monkeypatch.chdir(tmp_path)  # checkpoints are named from there on
    digest = of_checkpoint.digest_of_questions(own)
    for one, probe in ((training, f"evaluation_{digest}"), (own, "evaluation")):
        found = client.get_run(one.status().mlflow_run_id).data.metrics
        assert found[f"{probe}/score.csqa.cf"] == scores["csqa", "cf"]
        assert found[f"{probe}/score.average_of_2.best"] == scores["average of 2", "best"]


@pytest.mark.slow
def test_what_the_training_run_was_not_told_it_is_told_by_the_same_command(
    asked: list[str],
    uri: str,
    cache: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_here(tmp_path, "+experiment=quickstart", "+debug=tiny", "runs_dir=runs", f"tracking.uri={uri}", cache)
    (training,) = find_runs(tmp_path / "runs")
    here = [word for word in asked if not word.startswith("checkpoint=")] + [f"checkpoint={training.path}"]
    with monkeypatch.context() as away:
        away.setattr(of_checkpoint, "add_rows", lambda *_: "the server is away")
        run_here(tmp_path, *here, f"tracking.uri={uri}")
    assert "tracking: the server is away" in capsys.readouterr().out
    run_here(tmp_path, *here, f"tracking.uri={uri}")
    assert "skipped: finished" in capsys.readouterr().out
    metrics = connect(uri).get_run(training.status().mlflow_run_id).data.metrics
    assert any(re.fullmatch(r"evaluation_[0-9a-f]{6}/score\.csqa\.cf", name) for name in metrics)


def test_a_run_names_its_newest_checkpoint_when_it_is_planned(asked: list[str], tmp_path: Path) -> None:
    """When it runs, training may have written another."""
    (one,) = compose(*asked, f"runs_dir={tmp_path}")
    (job,) = plan([one])
    assert job.config.checkpoint.endswith("/checkpoints/step_00000010")
    assert (
        job.fingerprint
        == plan([replace(one, values=one.values | {"checkpoint": job.config.checkpoint})])[0].fingerprint
    )


def settings(*arguments: str) -> Any:
    (one,) = compose(*arguments)
    return read_run(one.values)


@pytest.mark.slow
def test_missing_data_is_left_out_on_request(asked: list[str], evaluation_sets: Path, tmp_path: Path) -> None:
    some = tmp_path / "some"
    some.mkdir()
    (some / "csqa.validation.jsonl").write_bytes((evaluation_sets / "csqa.validation.jsonl").read_bytes())
    elsewhere = [word for word in asked if "data_dir" not in word] + [f"evaluation.data_dir={some}"]
    code, said = run(tmp_path, *elsewhere, "tracking=none", "evaluation.skip_missing=true")
    assert code == 0, said
    assert "left out: mmlu: evaluation.data_dir:" in said
    (found,) = find_runs(tmp_path / "runs")
    assert set(results.load([found.path], "scores")["task"]) == {"csqa"}


@pytest.mark.slow
def test_a_hugging_face_llama_with_our_norm_in_our_formats(
    asked: list[str], trained: RunFolder, evaluated: RunFolder, tmp_path: Path
) -> None:
    """Exported and evaluated in the norm and precision that it was trained in, the model has the scores it had."""
    export_main(["--checkpoint", str(trained.path), "--to", str(tmp_path / "hf")])
    here = [word for word in asked if not word.startswith("checkpoint=")] + [f"checkpoint={tmp_path}/hf"]
    run_here(tmp_path, *here, "tracking=none", "norm=mxnorm_p2", "precision=mxfp8")
    (found,) = find_runs(tmp_path / "runs")
    theirs, ours = (results.load([one.path], "samples") for one in (found, evaluated))
    assert theirs["nats"].map(list).tolist() == ours["nats"].map(list).tolist()
    assert results.load([found.path], "scores")["checkpoint"][0] == "hf"

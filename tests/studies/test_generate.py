"""Texts of a checkpoint, as a kind of run, are right, and so are those that a training writes as it goes on."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from commands import call, run_here
from composing import compose_job, validated
from each import each

from mxstudy import config, results
from mxstudy.config import read_run
from mxstudy.evaluation import checkpoints
from mxstudy.evaluation.hugging_face import export
from mxstudy.reader import ConfigError
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.found_runs import find_runs
from mxstudy.tracking.journal import read_journal

ASK = ("+experiment=generate", "prompt=def quicksort(", "max_new_tokens=8", "tracking=none", "runs_dir=runs")
TRAIN = ("+experiment=quickstart", "norm=mxnorm_p2", "precision=mxfp8", "+debug=tiny", "runs_dir=runs", "tracking=none")
SAMPLE = ("sample.every_steps=4", 'sample.prompts=["def f(",""]', "sample.max_new_tokens=6")


@pytest.mark.integration
def test_a_checkpoint_continues_a_prompt_and_shows_it_again(
    trained: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        run_here(tmp_path, *ASK, f"checkpoint={trained.path}", "samples=2")
    (run,) = find_runs(tmp_path / "runs")
    rows = results.load([run.path], "texts")
    assert rows[["prompt", "tokens", "ended"]].to_numpy().tolist() == [["def quicksort(", 8, "max_new_tokens"]] * 2
    assert rows["text"].nunique() == 2
    begun, again = capsys.readouterr().out.split("skipped: finished")
    assert begun.count("--- 8 tokens, as many as asked\ndef quicksort(") == again.count("def quicksort(") == 2
    assert (run.path / "texts.txt").read_text().count("def quicksort(") == 2
    assert run.path / "texts.txt" in run.artifacts()
    plan, journal = read_journal(run.journal_path)
    assert (plan["step"], set(plan["precision"].values())) == (10, {"mxfp8", "bf16"})
    assert list(journal["values"]) == ["tokens_per_s"]
    assert (run.status().state, run.status().step) == ("finished", 2)


@pytest.mark.integration
def test_a_dry_run_says_in_which_precision_the_checkpoint_is_evaluated(
    trained: RunFolder, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*ASK, f"checkpoint={trained.path}", "dry_run=true")
    assert call(*words) == (0, "")
    assert "12 linears in mxfp8: forward E4M3 x E4M3\n1 linear in bf16: no operand is cast" in capsys.readouterr().out
    assert call(*words, "norm=rmsnorm", "precision=mxfp4") == (0, "")
    assert "12 linears in mxfp4: forward E2M1 x E2M1\n" in capsys.readouterr().out
    assert list(here.iterdir()) == []


@pytest.mark.slow
def test_checkpoints_are_shown_side_by_side_in_any_precision(
    trained: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One is in Hugging Face's format and runs in bf16. Draws and cached keys are on or off."""
    folder = tmp_path / "exported"
    path = checkpoints.find(str(trained.path), Path("runs"))
    what = checkpoints.describe(path)
    model = checkpoints.load(path, what, torch.device("cpu"))
    export(model, config.RMSNorm(), what.tokenizer, what.max_length, folder)
    asked = (f"checkpoint={trained.path},{folder}", "norm=rmsnorm", "precision=mxfp6_e2m3")
    run_here(tmp_path, *ASK, *asked, "temperature=0")
    assert re.search(r"step_00000010 +\S*exported", capsys.readouterr().out)  # the heads of two columns
    run_here(tmp_path, *ASK, *asked, "temperature=0", "keep=false")
    rows = results.load([tmp_path / "runs"], "texts")
    assert len(rows) == 4
    assert rows["text"].nunique() == 1  # the same weights, in the same norm and precision


@each(
    ("values", "message"),
    [
        ({"samples": 0}, "samples: must be positive, not 0"),
        ({"samples": 2, "temperature": 0.0}, "samples: all 2 would be the same with temperature=0; leave it out, or"),
        ({"processes": 2}, "processes: generate runs in one process, not in 2; leave it out"),
        ({"temperature": -1.0}, "temperature: must not be negative, not -1; 0 is greedy"),
        ({"baseline": {"norm": "rmsnorm"}}, "baseline: generate does not compare arms; leave it out"),
    ],
)
def test_what_means_nothing_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_run({"study": "generate", "checkpoint": "RUN", "prompt": "a"} | values)
    assert str(caught.value).startswith(message)


@pytest.mark.integration
@each(
    ("words", "message"),
    [
        (["prompt=" + "x" * 64], r"^prompt: 64 tokens and the EOS before them are more than the 64 of the training's"),
        (["checkpoint=nowhere"], r"^checkpoint: 'nowhere' is not a run's folder"),
        (["precision=fp32"], r"asks for fp32"),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_refused(words: list[str], message: str, trained: RunFolder) -> None:
    given = {"checkpoint": str(trained.path), "prompt": "a"} | dict(word.split("=", 1) for word in words)
    with pytest.raises(ConfigError, match=message):
        validated(compose_job("+experiment=generate", *(f"{key}={value}" for key, value in given.items())))


@pytest.mark.integration
def test_a_checkpoint_without_its_tokenizer_is_refused(trained: RunFolder, tmp_path: Path) -> None:
    copied = shutil.copytree(trained.path, tmp_path / "copied")
    (copied / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"^checkpoint: its tokenizer is missing: .*/tokenizer\.json; copy the"):
        validated(compose_job("+experiment=generate", f"checkpoint={copied}", "prompt=a"))


# ------------------------------------------------------------------------------------------------ during a training


def numbers(run: RunFolder) -> list[tuple[object, ...]]:
    rows = [row for row in read_journal(run.journal_path) if "probe" not in row and "texts" not in row]
    return [tuple(row.get(key) for key in ("step", "loss", "grad_norm", "validation_loss")) for row in rows]


@pytest.mark.integration
def test_a_training_that_writes_is_the_same_training(
    trained: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(tmp_path, *TRAIN, *SAMPLE)
    (run,) = find_runs(tmp_path / "runs")
    assert numbers(run) == numbers(trained)
    assert run.status().fingerprint == trained.status().fingerprint
    texts = results.load([run.path], "texts")
    assert texts[["step", "prompt", "tokens"]].to_numpy().tolist() == [
        [step, prompt, 6] for step in (3, 7, 9) for prompt in ("def f(", "")
    ]
    assert capsys.readouterr().out.count("written after 8 steps\n--- 6 tokens, as many as asked\ndef f(") == 1
    last = (*ASK, "prompt=def f(", f"checkpoint={run.path}", "max_new_tokens=6")
    run_here(tmp_path, *last)
    (after,) = results.load([tmp_path / "runs" / "generate"], "texts")["text"]
    assert after == texts["text"].tolist()[-2]  # that of the last checkpoint
    assert call(*TRAIN, *SAMPLE[:2], "sample.max_new_tokens=7", f"runs_dir={tmp_path}/runs")[1].startswith(
        "sample.max_new_tokens: differs in "
    )


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_so_is_a_compiled_one(tmp_path: Path) -> None:
    for name, own in {"off": (), "on": SAMPLE}.items():
        (tmp_path / name).mkdir()
        run_here(tmp_path / name, *TRAIN, "train.compile=true", "model.num_layers=1", *own)
    off, on = (find_runs(tmp_path / name / "runs")[0] for name in ("off", "on"))
    assert numbers(off) == numbers(on)
    assert len(results.load([on.path], "texts")) == 6


@pytest.mark.integration
@each(
    ("words", "message"),
    [
        (["sample.prompts=[a]"], r"^sample\.prompts: has no effect while sample is off; set sample\.every_steps too"),
        (["sample.every_steps=1", "sample.prompts=[]"], r"^sample\.prompts: must have one or more"),
        (["sample.every_steps=1", "sample.top_p=2"], r"^sample\.top_p: must lie above 0"),
        (["sample.every_steps=1", f"sample.prompts=[{'x' * 64}]"], r"^sample\.prompts\[0\]: 64 tokens and the EOS"),
    ],
)
def test_texts_that_cannot_be_written_are_refused_before_the_training(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validated(compose_job(*TRAIN, *words))

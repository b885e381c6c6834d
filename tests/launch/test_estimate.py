"""The estimate of what a sweep costs equals numbers counted by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from commands import call
from fake_study import FakeStudy, seeds

from mxstudy.config import Inline, Slurm
from mxstudy.launch import estimate
from mxstudy.launch.plan import plan
from mxstudy.studies.protocol import Cost
from mxstudy.train.runtime import planned_for

WORDS = ("+experiment=mxnorm_pretrain", "dry_run=true", "tracking=none")


def shown(
    patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, *words: str
) -> dict[str, list[str]]:
    """Return the words of each line, by the first word; of several lines with the same one, those of the first."""
    patch.chdir(folder)
    assert call(*words) == (0, "")
    assert list(folder.iterdir()) == []
    return {line.split()[0]: line.split()[1:] for line in reversed(capsys.readouterr().out.splitlines())}


@pytest.mark.integration
def test_of_pretraining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Llama has 2 layers of 64, heads of 32, FFN of 128, vocabulary 320, and 1000 steps of 4 sequences of 128."""
    sizes = ["hidden_size=64", "ffn_size=128", "num_layers=2", "num_heads=2", "num_kv_heads=1", "vocab_size=320"]
    lines = shown(
        *(monkeypatch, capsys, tmp_path, *WORDS, "precision=bf16,mxfp8", *(f"model.{size}" for size in sizes)),
        *("train.sequence_length=128", "train.batch_size=4", "train.micro_batch_size=null", "train.steps=1000"),
        *("data=pysource", "tokenizer=bytes", "train.compute=bf16"),
        *("hydra/launcher=slurm", "hydra.launcher.nodes=2", "hydra.launcher.gpus_per_node=4"),
    )
    attention = 64 * 64 * (1 + 1 + 0.5 + 0.5)  # Q, O, and K and V of half the heads
    weights = 2 * (attention + 3 * 64 * 128) + 64 * 320
    tokens = 1000 * 4 * 128
    flops = tokens * (6 * weights + 6 * 2 * 64 * 128)
    assert lines["precision=bf16"][:4] == ["new", "8", f"{tokens:.3g}", f"{flops:.3g}"]
    assert lines["precision=mxfp8"][:4] == ["new", "8", f"{tokens:.3g}", f"{flops:.3g}"]
    assert lines["2"][:8] == ["of", "2", "jobs", "to", "run", "16", f"{2 * tokens:.3g}", f"{2 * flops:.3g}"]


@pytest.mark.integration
def test_parameters_are_said_for_each_model_and_the_active_ones_of_a_mixture(here: Path, capsys) -> None:
    """tests/test_conf.py has both counts of the mixture."""
    words = ("model=llama_tiny,moe_tiny", "precision=bf16,mxfp8", "data=pysource", "tokenizer=bytes")
    assert call(*WORDS, *words, "model.vocab_size=2048", "train.compile=false") == (0, "")
    assert [line for line in capsys.readouterr().out.splitlines() if "M parameters" in line] == [
        "2 jobs: 3.4 M parameters",
        "2 jobs: 7.0 M parameters (2.9 M active in matrix products)",
    ]


@pytest.mark.integration
def test_one_job_has_its_precision_plan(here: Path, capsys) -> None:
    words = ("model=llama_tiny", "data=pysource", "tokenizer=bytes", "model.vocab_size=2048", "train.compile=false")
    schedule = "precision.schedule=[{plan: {layers.*: mxfp8}}, {from_step: 2, plan: {layers.*: mxfp4}}]"
    assert call(*WORDS, *words, "precision=mxfp8", schedule) == (0, "")
    said = capsys.readouterr().out.splitlines()
    first, second = said.index("from step 0:"), said.index("from step 2:")
    assert "linears in mxfp8: forward E4M3 x E4M3" in said[first + 1]
    assert "linears in mxfp4: forward E2M1 x E2M1" in said[second + 1]
    assert call(*WORDS, *words, "precision=mxfp8,bf16") == (0, "")
    assert "linears in" not in capsys.readouterr().out


@pytest.mark.integration
@pytest.mark.parametrize(
    ("asked", "what", "again"),
    [
        ("recompute_mlp=1", "the product of the MLP's first linear in 1 of 2 blocks", 2 * 64 * 256),
        (
            "activation_checkpointing=full",
            "the whole forward of all blocks",
            2 * 2 * (64 * 64 * 3 + 3 * 64 * 128) + 2 * 2 * 64 * 128,
        ),
    ],
)
def test_what_the_backward_computes_again_is_said_with_its_cost(
    asked: str, what: str, again: int, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It counts for no FLOPs of a job."""
    sizes = ["hidden_size=64", "ffn_size=128", "num_layers=2", "num_heads=2", "num_kv_heads=1", "vocab_size=320"]
    words = [*WORDS, *(f"model.{size}" for size in sizes), "train.sequence_length=128", "train.compile=false"]
    words += ["precision=bf16", "train.compute=bf16", "data=pysource", "tokenizer=bytes"]
    assert call(*words) == (0, "")
    kept = capsys.readouterr().out.splitlines()
    assert call(*words, f"train.{asked}") == (0, "")
    said = capsys.readouterr().out.splitlines()
    flops = 6 * (2 * (64 * 64 * 3 + 3 * 64 * 128) + 64 * 320) + 6 * 2 * 64 * 128
    assert (
        f"train.{asked}: the backward computes {what} again, {again / flops:.1%} more FLOPs, which MFU does not count"
        in said
    )
    assert said[-1].startswith("train.")
    assert said[1].split()[3:5] == kept[1].split()[3:5]


@pytest.mark.integration
def test_gpu_hours_are_those_that_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In results/mxnorm_pretrain.md, 1,049 million tokens at 375,907 and 387,946 tokens/s take 0.77 and 0.75 hours."""
    lines = shown(
        *(monkeypatch, capsys, tmp_path, *WORDS, "precision=bf16,mxfp8", "data=pysource", "tokenizer=bytes"),
        *("train.compute=bf16", "train.steps=8000"),
    )
    for arm, tokens_per_s in (("precision=bf16", 375_907), ("precision=mxfp8", 387_946)):
        _, _, tokens, _, hours, _ = lines[arm]
        assert float(hours) == pytest.approx(float(tokens) / tokens_per_s / 3600, rel=0.05)


@pytest.mark.integration
def test_gpu_hours_of_nvfp4_are_those_of_mxfp8_times_the_ratio_of_measured_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads((Path(__file__).parents[2] / "results/train_step_h200_llama_125m.json").read_text())["rows"]
    step_ms = {row["arm"]: row["step_ms"] for row in rows}
    words = (*WORDS, "precision=mxfp8,nvfp4", "data=pysource", "tokenizer=bytes", "train.compute=bf16")
    lines = shown(monkeypatch, capsys, tmp_path, *words, "train.steps=8000")
    hours = [float(lines[f"precision={name}"][4]) for name in ("mxfp8", "nvfp4")]
    assert hours[1] / hours[0] == pytest.approx(step_ms["nvfp4, rmsnorm"] / step_ms["mxfp8, rmsnorm"], rel=0.05)


@pytest.mark.integration
def test_gpu_hours_of_a_mixture_are_those_of_its_measured_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads((Path(__file__).parents[2] / "results/experts.json").read_text())["rows"]
    tokens_per_s = {row["arm"]: row["tokens_per_s"] for row in rows}
    words = ("+experiment=moe", "dry_run=true", "tracking=none", "precision=bf16,mxfp8", "train.compute=bf16")
    lines = shown(monkeypatch, capsys, tmp_path, *words, "data=pysource", "tokenizer=bytes")
    for name in ("bf16", "mxfp8"):
        _, _, tokens, _, hours, _ = lines[f"precision={name}"]
        assert float(hours) == pytest.approx(float(tokens) / tokens_per_s[f"experts, {name}"] / 3600, rel=0.05)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("+experiment=moe", "model=moe_tiny", "precision=mxfp4"), "a mixture of experts in mxfp4"),
        (("+experiment=moe", "model=moe_tiny", "precision=fp32", "train.compute=fp32"), "train.compute=fp32"),
        (("+experiment=mxnorm_pretrain", "precision=fp32", "train.compute=fp32"), "train.compute=fp32"),
        (("+experiment=fp4_recipes", "precision=quartet"), "the recipe quartet"),
    ],
)
def test_a_run_without_gpu_hours_says_why(words: tuple[str, ...], what: str, here: Path, capsys) -> None:
    assert call(*words, "data=pysource", "tokenizer=bytes", "dry_run=true", "tracking=none") == (0, "")
    said = capsys.readouterr().out.splitlines()
    assert "GPU hours" not in said[0]
    assert said[-1] == f"GPU hours: no rate was measured for {what}."


@pytest.mark.integration
def test_of_students(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Four replicas have two layers of 64, with 256 inside, and 10 steps of 32 inputs."""
    words = ["+experiment=student_teacher", "dry_run=true", "seeds=[0,1]", "lrs=[1e-3,2e-3]", "train.steps=10"]
    words += ["train.batch_size=32", "model.hidden_size=64", "model.num_layers=2"]
    lines = shown(monkeypatch, capsys, tmp_path, *words)
    line = lines["1"]
    assert line[:4] == ["of", "1", "jobs", "to"]
    assert line[6:] == [f"{10 * 32 * 4:.3g}", f"{6 * 4 * (2 * 2 * 64 * 256) * 320:.3g}"]


def test_a_total_without_the_unknown_costs_is_a_lower_bound(
    tmp_path: Path, study: FakeStudy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = {1: Cost(2e6, 3e15, 1.25), 2: Cost(2e6, 3e15), 3: Cost(2e6, None)}
    monkeypatch.setattr(study, "cost", lambda config, done: costs[config.seed])

    def last(*numbers: int) -> list[str]:
        estimate.show(plan(seeds(tmp_path, *numbers)), Slurm())
        lines = capsys.readouterr().out.splitlines()
        return re.split("  +", next(line for line in lines if "jobs to run" in line))[1:]

    assert last(1) == ["1", "2e+06", "3e+15", "1.25"]
    assert last(1, 1, 2) == ["2", "4e+06", "6e+15", "at least 1.25"]
    assert last(1, 2, 3) == ["3", "6e+06", "at least 6e+15", "at least 1.25"]
    assert last(3) == ["1", "2e+06"]


def test_inline_every_process_has_a_gpu_where_there_are_any(
    tmp_path: Path, study: FakeStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = plan(seeds(tmp_path, 1))
    for processes in (1, 8):
        monkeypatch.setattr(estimate, "world_size", lambda n=processes: n)
        for has_gpus in (False, True):
            monkeypatch.setattr(torch.cuda, "is_available", lambda has=has_gpus: has)
            assert estimate.gpus_of(job, Inline()) == processes * has_gpus


@pytest.mark.slow
def test_a_run_is_named_after_the_device_that_its_job_will_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name is not that of the device of the machine that submits it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def folder(*words: str) -> str:
        assert call("+experiment=student_teacher", "precision=bf16", "fidelity=none", "dry_run=true", *words) == (0, "")
        return next(w for w in capsys.readouterr().out.split() if w.startswith("runs/"))

    on_slurm = "hydra/launcher=slurm"
    on_gpu = folder(on_slurm)
    on_cpu = folder()
    assert on_gpu == folder(on_slurm, "train.device=cuda") != on_cpu
    assert on_cpu == folder(on_slurm, "hydra.launcher.gpus_per_node=0") == folder(on_slurm, "train.device=cpu")
    code, said = call("+experiment=student_teacher", on_slurm, "hydra.launcher.gpus_per_node=0", "train.device=cuda")
    assert code == 1
    assert said.startswith(
        "train.device: cuda was asked for, but there is no GPU; train.device=cpu runs without; hydra."
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert folder() == on_gpu


def test_a_submitted_job_has_no_other_device_than_it_was_planned_for(tmp_path: Path, study: FakeStudy) -> None:
    for gpus, device in ((None, "auto"), (0, "cpu"), (2, "cuda")):
        with planned_for(gpus):
            (job,) = plan(seeds(tmp_path, 1))
        assert job.config.train.device == device


@pytest.mark.integration
def test_a_launcher_that_does_not_suit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("+experiment=student_teacher", "dry_run=true", "hydra/launcher=slurm", "hydra.launcher.gpus_per_node=2")
    assert call(*words) == (1, "hydra.launcher.gpus_per_node: student_teacher uses one GPU; give 1, not 2")

"""A run over several processes works from its folder alone.

It has checkpoints and a journal, and ends well when one of the processes ends.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import gang
import pytest
import torch
from composing import compose_job
from each import each, slow_but
from safetensors.torch import load_file

from mxstudy.config import read_run
from mxstudy.data import blends
from mxstudy.data.batches import Batches
from mxstudy.evaluation.checkpoints import describe, load, newest
from mxstudy.probes.ring_file import read_ring
from mxstudy.reader import ConfigError
from mxstudy.studies import study_of
from mxstudy.studies.pretrain.built import sampling_of
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.journal import read_journal
from mxstudy.train import watch

pytestmark = pytest.mark.integration

STEPS = 12
TINY = (
    *("+experiment=quickstart", "+debug=tiny", "runs_dir=runs", "tracking=none", "precision=mxfp8", "norm=mxnorm_p2"),
    *("train.deterministic=true", f"train.steps={STEPS}", "checkpoint.every_steps=4", "validation.every_steps=2"),
    *("optimizer.lr=1e-3", "schedule=constant", "validation.sequences=6", "model.num_layers=1"),
)
MICRO = "train.micro_batch_size=1"  # so that any number of ranks has the same micro-batches


def made(folder: Path, cache: str, *overrides: str) -> Path:
    values: Any = compose_job(*TINY, cache, *overrides).values
    settings = read_run(values)
    RunFolder.create(folder / "run", settings, "f" * 64, {"label": "test"})
    return folder / "run"


def ran(folder: Path, run: Path, ranks: int) -> None:
    """Train the run with so many ranks, or in this process with one."""
    if ranks == 1:
        assert study_of("pretrain").run(RunFolder(run).config(), RunFolder(run), "test") == "finished"
    else:
        assert gang.together(folder / "processes", ranks, gang.train, run) == ["finished"] * ranks


def rows(run: Path, key: str) -> list[dict[str, Any]]:
    return [row for row in read_journal(run / "metrics.jsonl") if key in row]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in rows(run, "loss")]


def validations(run: Path) -> list[float]:
    return [row["validation_loss"] for row in rows(run, "validation_loss")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cache: str) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run = made(folder, cache, MICRO)
    ran(folder, run, 1)
    return run


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, cache: str) -> Path:
    folder = tmp_path_factory.mktemp("two")
    run = made(folder, cache, MICRO, "checkpoint.keep_last=3")
    ran(folder, run, 2)
    return run


def test_two_ranks_train_what_one_does(two: Path, undisturbed: Path) -> None:
    assert losses(two) == pytest.approx(losses(undisturbed), abs=2e-3)
    assert losses(two)[0] == pytest.approx(losses(undisturbed)[0], rel=1e-6)
    assert validations(two) == pytest.approx(validations(undisturbed), abs=2e-3)
    assert RunFolder(two).status().state == "finished"


def test_the_first_rank_alone_writes(two: Path) -> None:
    steps = [row["step"] for row in map(json.loads, (two / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    assert steps == list(range(STEPS))
    said = [(two.parent / "processes" / f"output-{rank}").read_text() for rank in range(2)]
    assert "validation loss" in said[0]
    assert "M parameters on 2 x cpu" in said[0]
    assert "loss" not in said[1]


def test_the_journal_has_every_ranks_pace(two: Path) -> None:
    (row,) = [row for row in rows(two, "probe") if row["probe"] == "ranks"]
    values = row["values"]
    assert row["step"] == 10
    for name in ("step_ms", "tokens_per_s", "memory_gib", "own_ms", "matmul_ms"):
        assert len(values[name]) == 2
        assert min(values[name]) > 0
    assert all(own < step for own, step in zip(values["own_ms"], values["step_ms"], strict=True))
    tokens = sum(rate * ms / 1e3 for rate, ms in zip(values["tokens_per_s"], values["step_ms"], strict=True))
    assert tokens == pytest.approx(4 * 64)  # the rate was rounded
    assert len(rows(two, "hosts")[0]["hosts"]) == 2


@pytest.mark.parametrize("lives", [(1, 2), pytest.param((4, 1, 2), marks=pytest.mark.slow)])
def test_a_checkpoint_of_two_ranks_is_read_by_any_number(lives: tuple[int, ...], tmp_path: Path, two: Path) -> None:
    """The second life continues from what 2 ranks wrote at step 4.

    The later ones continue from what another number of ranks wrote at 8.
    """
    run = gang.killed_after(two, 4, tmp_path)
    ran(tmp_path, run, lives[0])
    for ranks in lives[1:]:
        run = gang.killed_after(run, 8, tmp_path / str(ranks))
        ran(tmp_path / str(ranks), run, ranks)
    assert losses(run) == pytest.approx(losses(two), abs=1e-4)
    assert RunFolder(run).status().state == "finished"


@pytest.mark.slow
def test_the_same_ranks_go_on_to_the_same_bits(tmp_path: Path, two: Path) -> None:
    run = gang.killed_after(two, 4, tmp_path)
    ran(tmp_path, run, 2)
    assert losses(run) == losses(two)
    assert validations(run) == validations(two)


@pytest.mark.slow
def test_recomputed_mlps_change_no_bit_and_are_said(
    tmp_path: Path, cache: str, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path, cache, MICRO, "train.recompute_mlp=1")
    assert run.name == undisturbed.name
    ran(tmp_path, run, 1)
    assert losses(run) == losses(undisturbed)
    assert validations(run) == validations(undisturbed)
    assert "train.recompute_mlp=1: the backward computes the product of the MLP's" in capsys.readouterr().out


@pytest.mark.slow
def test_weights_gathered_in_mx_change_no_bit_and_one_process_goes_on(
    tmp_path: Path, cache: str, two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path, cache, MICRO, "checkpoint.keep_last=3", "train.all_gather=mx")
    ran(tmp_path, run, 2)
    assert losses(run) == losses(two)
    assert validations(run) == validations(two)
    run = gang.killed_after(run, 8, tmp_path / "alone")
    capsys.readouterr()
    ran(tmp_path, run, 1)
    assert "train.all_gather=mx: one process has all weights, so nothing is gathered\n" in capsys.readouterr().out
    assert losses(run) == pytest.approx(losses(two), abs=1e-4)


def test_a_checkpoint_of_two_ranks_is_a_model_for_whoever_reads_it(two: Path) -> None:
    """Its loss is the one that the run had."""
    folder = RunFolder(two)
    settings, checkpoint = folder.config(), newest(folder)
    model = load(checkpoint, describe(checkpoint), torch.device("cpu"))
    shards = dict(blends.prepare(settings.data, settings.tokenizer, Path(settings.cache_dir), print))
    tokens, targets = Batches(shards, sampling_of(settings), 64).validation(6)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(tokens).double().flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(validations(two)[-1], rel=1e-6)


def test_checkpoints_of_two_ranks_and_of_one_hold_the_same(two: Path, undisturbed: Path) -> None:
    """All of it is in FP32, also after a validation, which leaves gathered weights behind."""

    def held(run: Path) -> dict[str, tuple[torch.dtype, int]]:
        found: dict[str, tuple[torch.dtype, int]] = {}
        for file in newest(RunFolder(run)).glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                found[name] = (tensor.dtype, tensor.numel() + found.get(name, (None, 0))[1])
        return found

    assert held(two) == held(undisturbed)
    assert {dtype for dtype, _ in held(two).values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("mishap", slow_but(["raises"], ["raises", "first raises"]))
def test_what_one_rank_raises_ends_the_job_with_its_traceback(mishap: str, tmp_path: Path, cache: str) -> None:
    run = made(tmp_path, cache)
    began_s = time.monotonic()
    with gang.started(tmp_path / "processes", 2, gang.train, run, mishap) as processes:
        assert gang.ended(processes, 90) == [1, 1], gang.said(tmp_path / "processes")
    assert time.monotonic() - began_s < 60
    status, log = RunFolder(run).status(), (run / "error.log").read_text()
    assert (status.state, status.reason) == ("failed", "ValueError: a bad batch")
    assert log.startswith("Traceback")
    assert 'raise ValueError("a bad batch")' in log
    assert len(losses(run)) == 5
    other = (tmp_path / "processes" / f"output-{1 if mishap.startswith('first') else 0}").read_text()
    assert "ends because another rank has failed" in other
    assert "a bad batch" in other


@pytest.mark.slow
@pytest.mark.parametrize("mishap", ["SIGKILL", "first SIGKILL", "SIGSTOP", "first SIGSTOP"])
def test_a_rank_that_says_nothing_is_found_out(mishap: str, tmp_path: Path, cache: str) -> None:
    run = made(tmp_path, cache)
    with gang.started(tmp_path / "processes", 2, gang.train, run, mishap, 3.0) as processes:
        survivor = processes[1 if "first" in mishap else 0]
        survivor.join(60)
        assert survivor.exitcode == 1, gang.said(tmp_path / "processes")
    since_its_last_step_s = time.time() - (run / "metrics.jsonl").stat().st_mtime
    assert since_its_last_step_s < 25  # it has waited for 3 s, and not for the 30 s of a real run
    status = RunFolder(run).status()
    assert status.state == "failed"
    assert f"rank {0 if 'first' in mishap else 1} of 2 ended" in (status.reason or "")
    assert "without an error" in (run / "error.log").read_text()


def test_a_killed_rank_ends_the_job_within_a_minute() -> None:
    """The longest waits of a survivor, one after the other. They pass in the test above, shortened, and on Slurm."""
    assert watch.DEAD_AFTER_S + 5 * watch.BEAT_S + 2 * watch.GRACE_S < 60


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all_after_their_step(tmp_path: Path, cache: str, two: Path) -> None:
    run = made(tmp_path, cache, MICRO, "checkpoint.keep_last=3")
    assert gang.together(tmp_path / "processes", 2, gang.train, run, "SIGUSR2") == ["preempted", "preempted"]
    status = RunFolder(run).status()
    assert (status.state, status.reason, status.step) == ("preempted", signal.SIGUSR2.name, 6)
    ran(tmp_path, run, 2)
    assert losses(run) == losses(two)


@pytest.mark.slow
def test_a_straggler_is_named(tmp_path: Path, cache: str) -> None:
    run = made(tmp_path, cache)
    assert gang.together(tmp_path / "processes", 2, gang.train, run, "sleeps") == ["finished", "finished"]
    (row,) = [row for row in rows(run, "probe") if row["probe"] == "ranks"]
    assert 1 in row["values"]["stragglers"]
    assert row["values"]["slowdown"] > 1.1
    assert row["values"]["own_ms"][1] > 200 > row["values"]["own_ms"][0]
    assert "step 10: rank 1 on" in (tmp_path / "processes" / "output-0").read_text()


@each(
    ("changes", "says"),
    [
        (["probe.gradient_bias.every_steps=1"], "probe.gradient_bias.every_steps: it needs all weights"),
        (["probe.saturation.every_steps=1"], "probe.saturation.every_steps: it needs all weights"),
        (["evaluation.every_steps=1"], "evaluation.every_steps: it needs all weights"),
        (["train.batch_size=6"], "train.batch_size: 6 sequences do not divide over 4 ranks"),
        (["train.sequence_length=48", "train.batch_size=4"], "48 tokens do not divide into blocks of 32"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(changes: list[str], says: str) -> None:
    values: Any = compose_job(*TINY, *changes).values
    settings = read_run(values)
    with pytest.raises(ConfigError, match=says):
        study_of("pretrain").check(settings, 4)


def test_a_divergence_of_two_ranks_is_a_result_with_its_ring(tmp_path: Path, cache: str) -> None:
    watched = [f"probe.{name}.every_steps=1" for name in ("spikes", "outlier_features", "timing", "memory")]
    run = made(tmp_path, cache, "optimizer.lr=1e20", "checkpoint.every_steps=1", *watched)
    assert gang.together(tmp_path / "processes", 2, gang.train, run) == ["diverged", "diverged"]
    status = RunFolder(run).status()
    assert status.state == "diverged"
    (spike,) = rows(run, "spike")
    steps, norms = read_ring(run / spike["spike"]["ring"])
    assert steps == list(range(status.step + 1))
    assert not all(absmax[-1].max() < float("inf") for absmax in norms.values())
    assert (run / "checkpoints" / spike["spike"]["checkpoint"] / "pinned").exists()
    seen = {(row["probe"], row["step"]) for row in rows(run, "probe")}
    assert {(name, step) for name in ("timing", "memory", "outlier_features") for step in steps} <= seen

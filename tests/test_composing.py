"""A command becomes jobs: sweeps, cases, choices, and compositions that jobs share."""

from __future__ import annotations

from pathlib import Path

import pytest
from composing import compose, handed_over, value
from each import slow_but
from omegaconf import OmegaConf

from mxstudy.cli import composing, registered, through_hydra
from mxstudy.compat.hydra import unmoved
from mxstudy.config.conf_folders import SWEEPS
from mxstudy.reader import ConfigError

QUICK = "+experiment=quickstart"
SIZED = ["convergence", "post_round", "element_formats", "olmo_precision_grid"]  # sweeps that set steps or sizes


@pytest.mark.integration
def test_one_bad_choice_leaves_the_other_jobs_composed() -> None:
    good, bad, other = compose(QUICK, "norm=rmsnorm,mxnorm_p3,mxnorm_p1")
    assert isinstance(bad.values, ConfigError)
    assert (value(good, "norm.kind"), value(other, "norm.p")) == ("rmsnorm", 1)


@pytest.mark.integration
def test_an_experiment_of_the_users_own_is_found_and_named(tmp_path: Path) -> None:
    folder = tmp_path / "experiment" / "mine"
    folder.mkdir(parents=True)
    (folder / "long.yaml").write_text(
        "# @package _global_\ndefaults:\n  - /study: pretrain\n  - _self_\ntrain:\n  steps: 7\n"
    )
    (one,) = compose("+experiment=mine/long", f"--config-dir={tmp_path}")
    assert value(one, "experiment") == "mine/long"
    assert value(one, "train.steps") == 7


@pytest.mark.integration
def test_options_may_stand_anywhere() -> None:
    jobs = compose(QUICK, "-m", "seed=1,2", "--multirun", "norm=mxnorm_p1")
    assert [(value(job, "seed"), value(job, "norm.p")) for job in jobs] == [(1, 1), (2, 1)]


@pytest.mark.integration
def test_the_command_line_beats_the_sweep_file() -> None:
    jobs = compose("+sweep=quickstart", "norm=rmsnorm_folded", "optimizer.lr=1e-3,4e-3")
    assert [(job.choices["precision"], value(job, "optimizer.lr")) for job in jobs] == [
        ("bf16", 1e-3),
        ("bf16", 4e-3),
        ("mxfp8", 1e-3),
        ("mxfp8", 4e-3),
    ]
    assert {job.choices["norm"] for job in jobs} == {"rmsnorm_folded"}


@pytest.mark.integration
def test_a_choice_that_has_cases_of_its_own_runs_these_alone() -> None:
    """Rate and batch belong to the size. A size that has no case takes those of all cases."""
    jobs = compose("+sweep=element_formats", "model=nemotron_843m")
    assert {(value(job, "optimizer.lr"), value(job, "train.batch_size")) for job in jobs} == {(2.5e-4, 256)}
    assert len(jobs) == 5
    (one,) = compose("+sweep=element_formats", "model=nemotron_8b", "precision=mxfp8")
    assert (value(one, "optimizer.lr"), one.choices["precision"]) == (3e-4, "mxfp8")
    assert len(compose("+sweep=element_formats", "model=llama_1b")) == 10


@pytest.mark.integration
def test_a_sweep_runs_on_another_experiment() -> None:
    (one, *_) = compose("+sweep=quickstart", "experiment=mxnorm_pretrain")
    assert value(one, "experiment") == "mxnorm_pretrain"


@pytest.mark.integration
def test_a_sweep_multiplies_its_axes_for_each_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - /experiment: quickstart\n  - _self_\n"
        "hydra:\n  sweeper:\n"
        "    params: {seed: range(2), train.micro_batch_size: [null, 4]}\n"
        "    cases: [{norm: rmsnorm}, {norm: mxnorm_p1, norm.p: [0.5, 3]}]\n"
    )
    monkeypatch.setattr(through_hydra, "SWEEPS", tmp_path)
    jobs = compose("+sweep=mine")
    assert len(jobs) == 2 * 2 * (1 + 2)
    keys = ("seed", "train.micro_batch_size", "norm.kind", "norm.p")
    assert [tuple(value(job, key) for key in keys) for job in jobs[:5]] == [
        (0, None, "rmsnorm", None),
        (0, 4, "rmsnorm", None),
        (1, None, "rmsnorm", None),
        (1, 4, "rmsnorm", None),
        (0, None, "mxnorm", 0.5),
    ]


@pytest.mark.integration
def test_shared_compositions_equal_full_ones() -> None:
    """Files that are read once give the same as files that are read for each job."""
    words = (
        QUICK,
        "norm=rmsnorm,mxnorm_p2",
        "optimizer.lr=1e-3,2e-3",
        "optimizer.betas=[0.8,0.9],[0.9,0.95]",
        "precision.schedule.0.from_step=0",
        "runs_dir='${cache_dir}/runs'",
        "cache_dir=a,b",
    )
    loader, master, jobs = handed_over(*words)
    shared = list(composing.compose(loader, master, jobs))
    loader, master, _ = handed_over(*words)
    assert len(shared) == 16
    for job, one in list(zip(jobs, shared, strict=True))[::3]:  # any two values of two neighbours meet
        config, choices = composing.compose_fully(loader, master, job)
        assert one == composing.finish(config, choices, one.overrides, {})
    assert {value(one, "runs_dir") for one in shared} == {"a/runs", "b/runs"}


@pytest.mark.integration
def test_choices_that_stand_alone_are_composed_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices that stand alone are composed one at a time.

    The words also have a value in a section that they change, one that refers to another section, and a choice that
    does not stand alone.
    """
    words = (
        "+experiment=student_teacher",
        "fidelity=public_code,paper_text",
        "schedule=cosine,linear,wsd",
        "optimizer=adam,sgd",
        "schedule.warmup_fraction=0.2,0.3",
        "cache_dir='${optimizer.kind}'",
    )
    loader, master, jobs = handed_over(*words)
    composed: list[object] = []
    fully = composing.compose_fully
    monkeypatch.setattr(composing, "compose_fully", lambda *given: [composed.append(given[2]), fully(*given)][1])
    shared = list(composing.compose(loader, master, jobs))
    assert (len(shared), len(composed)) == (24, 2 * (1 + 2 + 1))  # by fidelity: a first one, and the other choices
    loader, master, _ = handed_over(*words)
    for job, one in list(zip(jobs, shared, strict=True))[::7]:
        config, choices = fully(loader, master, job)
        assert one == composing.finish(config, choices, one.overrides, {})
    assert {value(one, "cache_dir") for one in shared} == {"adam", "sgd"}


@pytest.mark.integration
def test_a_choice_that_lacks_a_value_is_refused_alone() -> None:
    composed = compose("+experiment=student_teacher", "optimizer=adam,sgd", "schedule=cosine,wsd", "optimizer.eps=1e-6")
    errors = [str(one.values) for one in composed if isinstance(one.values, ConfigError)]
    assert errors == ["optimizer.eps: no such key here; it belongs to optimizer=adam or optimizer=adamw"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("sweep", slow_but(["element_formats"], SIZED))
def test_a_rehearsal_is_small_whatever_sizes_and_steps_a_sweep_has(sweep: str) -> None:
    jobs = compose(f"+sweep={sweep}", "+debug=tiny", each_value_once=True)
    assert len(jobs) > 1
    assert {(value(job, "train.steps"), value(job, "model.hidden_size")) for job in jobs} == {(10, 64)}
    asked = compose(f"+sweep={sweep}", "+debug=tiny", "train.steps=20", each_value_once=True)
    assert {value(job, "train.steps") for job in asked} == {20}


def test_what_jobs_share_is_resolved_once_and_what_an_override_moves_again() -> None:
    config = OmegaConf.create(
        {"seed": 0, "data_seed": "${seed}", "model": {"sizes": [1, "${seed}"]}, "probe": {"p": [1]}}
    )
    assert unmoved(config, {"seed"}) == {"probe": {"p": [1]}}


def test_sweeps_are_read_only_for_a_command_that_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(registered, "register_sweep", lambda path: read.append(path.stem))
    registered.register(SWEEPS, [QUICK, "seed=0,1"])
    assert read == []
    registered.register(SWEEPS, ["+sweep=mitigations"])
    assert "mitigations" in read
    assert {name for name in read if not name.startswith("base_")} == {"mitigations"}

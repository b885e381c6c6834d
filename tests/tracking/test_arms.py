"""Runs belong to one arm if their configs agree except for seeds, whatever their users typed."""

from __future__ import annotations

from pathlib import Path

import pytest
from arm_configs import evaluate, pretrain, run
from composing import compose
from each import each
from tracked import make_folder

from mxstudy.config import read_run
from mxstudy.tracking.arms import Described, arms_of, describe, described, run_names


def names(*runs: Described) -> list[str]:
    return [arm.name for arm in arms_of(runs)]


def test_seeds_part_no_arms_and_numbers_do() -> None:
    """MXNorm with p=4 was once named, tagged and pooled with p=2, because its choice is the same."""
    seeds = [run("mxnorm_p2", seed=seed, data_seed=seed) for seed in range(3)]
    assert len({*names(*seeds)}) == 1
    assert names(*seeds, run("mxnorm_p2", norm__p=4.0)) == ["mxnorm_p2"] * 3 + ["mxnorm_p2 p=4"]
    assert names(run("mxnorm_p2", norm__p=4.0)) == ["mxfp8 mxnorm_p2 p=4"]


def test_equal_configs_are_one_arm_however_they_were_asked_for() -> None:
    short = Described(pretrain(), {"norm": "rmsnorm"})
    by_value = Described(pretrain("mxnorm_p2"), {"norm": "mxnorm_p1", "precision": "mxfp8"})  # norm.p=2
    found = names(short, run(), run(seed=1), by_value, run("mxnorm_p2"))
    assert found == ["rmsnorm"] * 3 + ["mxnorm_p2"] * 2


def test_what_changes_no_number_parts_no_arms() -> None:
    elsewhere = {"runs_dir": "there", "probe__weights__every_steps": 5, "train__device": "cuda", "baseline__norm": "x"}
    assert len({*names(run(), run(**elsewhere))}) == 1
    assert len({*names(run(), run(precision__rounding="even", optimizer__eps=1e-8))}) == 1  # the schema's defaults


def test_parts_of_two_kinds_part_arms_even_if_both_are_as_their_kinds_default_is() -> None:
    """As in a fingerprint, the kind counts even if it is the default of its class."""
    runs = [run(), run(norm__kind="layernorm"), Described(pretrain() | {"norm.kind": None}, {"norm": "none"})]
    assert len({*names(*runs)}) == 3


def test_learning_rates_are_arms() -> None:
    rates = [run(optimizer__lr=lr, seed=seed) for lr in (1e-3, 2e-3) for seed in (0, 1)]
    assert names(*rates) == ["lr=0.001"] * 2 + ["lr=0.002"] * 2


def test_evaluations_of_two_checkpoints_are_two_arms() -> None:
    found = names(evaluate("/a/runs/pre/abc/checkpoints"), evaluate("/a/runs/pre/def/checkpoints"))
    assert found == ["checkpoint=abc", "checkpoint=def"]
    assert names(evaluate("runs/pre/abc")) == ["runs/pre/abc"]


def names_of_runs(*runs: Described) -> list[str]:
    return run_names(runs, arms_of(runs))


def test_what_a_sweep_calls_replicates_parts_no_arms() -> None:
    runs = [run(optimizer__lr=lr, replicates__0="optimizer.lr") for lr in (1e-3, 2e-3)]
    assert len({*names(*runs)}) == 1
    assert names_of_runs(*runs) == ["mxfp8 rmsnorm optimizer.lr=0.001", "mxfp8 rmsnorm optimizer.lr=0.002"]


@pytest.mark.integration
@each("sweep", ("interventions", "interventions_public_code"))
def test_forks_of_several_parents_with_one_intervention_are_one_arm(sweep: str) -> None:
    jobs = compose(f"+sweep={sweep}", "parent=a,b", "at_step=9", "intervention=none,bf16_act")
    runs = [describe(read_run(job.values), job.choices) for job in jobs]
    assert {*names_of_runs(*runs)} == {
        f"intervention={name} parent={one}" for name in ("none", "bf16_act") for one in "ab"
    }
    arms: dict[str, list[object]] = {}
    for fork, arm in zip(runs, arms_of(runs), strict=True):
        arms.setdefault(arm.name, []).append(fork.config["parent"])
    assert arms == {"intervention=none": ["a", "b"], "intervention=bf16_act": ["a", "b"]}


def test_a_run_has_the_name_of_its_arm_and_its_seeds_where_they_differ() -> None:
    runs = [run(norm, seed=seed, data_seed=seed) for norm in ("rmsnorm", "mxnorm_p2") for seed in (0, 1)]
    assert names_of_runs(*runs) == ["rmsnorm seed=0", "rmsnorm seed=1", "mxnorm_p2 seed=0", "mxnorm_p2 seed=1"]
    assert names_of_runs(run("rmsnorm", data_seed=3), run("mxnorm_p2", data_seed=3)) == ["rmsnorm", "mxnorm_p2"]


def test_an_arm_is_compared_with_the_baseline_that_has_all_else_the_same() -> None:
    asked = {"baseline__norm": "rmsnorm"}
    runs = [run(norm, optimizer__lr=lr, **asked) for lr in (1e-3, 2e-3) for norm in ("mxnorm_p2", "rmsnorm")]
    runs.append(run("mxnorm_p2", optimizer__lr=3e-3, **asked))
    partners = [arm.partner for arm in arms_of(runs)]
    assert partners == ["rmsnorm lr=0.001"] * 2 + ["rmsnorm lr=0.002"] * 2 + [None]
    assert {arm.partner for arm in arms_of([run("mxnorm_p1"), run(), run(seed=1)])} == {"mxnorm_p1"}  # the first


def test_a_folder_says_what_a_table_says(tmp_path: Path) -> None:
    two, four = (
        make_folder(tmp_path, digit * 64, norm={"kind": "mxnorm", "p": p}) for digit, p in (("a", 2), ("b", 4))
    )
    assert names(described(two), described(four)) == ["mxnorm_p2", "mxnorm_p2 p=4"]

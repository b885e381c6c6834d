"""Forks of student-teacher runs begin where they should, the control is its parent, and some runs cannot be forked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each import each, slow_but
from student_runs import trained

from mxstudy import results
from mxstudy.config import Fork, fingerprint, read_run
from mxstudy.reader import ConfigError
from mxstudy.students.fork import run as fork
from mxstudy.students.fork import study as checks
from mxstudy.students.fork.points import ForkPoint, fork_points
from mxstudy.tracking.columnar_journal import part_path, read_columns, write_part
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.journal import read_journal
from mxstudy.tracking.provenance import provenance

pytestmark = pytest.mark.integration

ONE_ROW = {"precision__schedule": [{"plan": {"layers.*": "mxfp8"}}]}


def configured(of: RunFolder, **options: Any) -> Fork:
    values = {"study": "fork", "experiment": "forks", "parent": str(of.path), "tracking": {"uri": None}}
    config = read_run(values | {"steps": 6, "device": "cpu"} | options)
    assert isinstance(config, Fork)
    return config


def forked(path: Path, parent: RunFolder, **options: Any) -> RunFolder:
    config = configured(parent, **options)
    checks.STUDY.check(config)
    digest = fingerprint(config, *checks.STUDY.identity(config))
    about = provenance() | {"label": "fork", "choices": {}}
    folder = RunFolder.create(path / "runs" / "forks" / digest[:12], config, digest, about)
    assert fork.run(config, folder, "fork") == "finished"
    return folder


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(tmp_path_factory.mktemp("parent"), **ONE_ROW)


def test_a_dry_run_has_the_precision_plan_of_the_forks(parent: RunFolder) -> None:
    said = checks.STUDY.precision_plan(configured(parent, intervention={"plan": {"layers.*": "mxfp6_e2m3"}}))
    assert said[0].startswith("4 linears in mxfp6_e2m3: forward E2M3")


# ------------------------------------------------------------------------------------------------------------- bits


@pytest.mark.parametrize("at_step", slow_but([9], [0, 9, 16, 23]))
def test_the_control_is_its_parent(tmp_path: Path, at_step: int) -> None:
    """It is forked from the start, from between two checkpoints, from one, and from the last step on."""
    parent = trained(tmp_path, **ONE_ROW, seeds=[3, 5], lrs=[1e-3, 2e-3])
    recorded = read_columns(parent.columns, 4)
    folder = forked(tmp_path, parent, at_step=at_step)
    forks, metrics = results.load([folder.path], "forks"), results.load([folder.path], "fork_metrics")
    assert forks["equal_steps"].tolist() == [min(6, 24 - at_step)] * 4
    assert forks[["seed", "lr"]].to_numpy().tolist() == [[3, 1e-3], [5, 1e-3], [3, 2e-3], [5, 2e-3]]
    for number, own in metrics.groupby("fork"):
        steps = own["step"].to_numpy()
        assert steps.tolist() == [*range(at_step, at_step + 6)]
        inside = steps < 24
        for quantity, column in enumerate(("loss", "grad_norm")):
            want = recorded[steps[inside], quantity, int(number)]  # type: ignore[call-overload]
            np.testing.assert_array_equal(own[column].to_numpy(np.float32)[inside], want)


@pytest.mark.parametrize(
    ("intervention", "same_first_loss"),
    [
        ({"plan": {"layers.*": "fp32"}, "gain": "fp32", "vector_ops": "fp32", "compute": "fp32"}, False),
        ({"scale_rule": "floor"}, False),
        ({"scale_rule": "code_bump"}, False),
        ({"norm_ops": "code_skipped", "gain": "fp32"}, False),
        ({"targets": "disk"}, False),
        ({"targets": "redrawn"}, False),
        ({"perturbed_weight": 40}, False),
        ({"gain": "fp32"}, True),  # all gains are 1 at step 0
        ({"plan": {"layers.*": "mxfp8_forward_only"}}, True),
    ],
)
def test_an_intervention_changes_what_it_says(
    tmp_path: Path,
    parent: RunFolder,
    intervention: dict[str, Any],
    same_first_loss: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = forked(tmp_path, parent, at_step=0, intervention=intervention)
    metrics, recorded = results.load([folder.path], "fork_metrics"), read_columns(parent.columns, 2)
    losses = metrics["loss"].to_numpy(np.float32).reshape(2, 6).T
    assert ((losses[0] == recorded[0, 0]).all()) == same_first_loss
    assert (losses[-1] != recorded[5, 0]).all()
    recipes = dict(intervention.get("plan", ONE_ROW["precision__schedule"][0]["plan"]))
    plan = read_journal(folder.journal_path)[0]
    assert set(plan["precision"].values()) == set(recipes.values())
    assert set(plan["backends"].values()) == {"reference"}
    assert f"linears in {recipes['layers.*']}" in capsys.readouterr().out


def test_replicas_at_steps_of_their_own(tmp_path: Path) -> None:
    """Two replicas that blow up are each forked at two steps, in waves of the parent's three. The third is not."""
    parent = trained(
        tmp_path, **ONE_ROW, seeds=[0], lrs=[1e-3, 3.0, 30.0], schedule={"kind": "constant", "warmup_fraction": 0.0}
    )
    recorded = read_columns(parent.columns, 3)
    points = fork_points(configured(parent, intervene_before=1, fractions=[0.5]), recorded[:, 0])
    assert {point.replica for point in points} == {1, 2}
    folder = forked(tmp_path, parent, intervene_before=1, fractions=[0.5])
    forks = results.load([folder.path], "forks")
    assert forks[["replica", "step", "point"]].to_numpy().tolist() == [[p.replica, p.step, p.point] for p in points]
    assert (forks["equal_steps"] == 6).all()
    assert forks["rising_at"].tolist() == forks["parent_diverged_at"].tolist()


def test_where_forks_begin() -> None:
    losses = np.ones((700, 3), np.float32)
    losses[100:, 1] = 11.0  # diverges at 100
    losses[600:, 2] = 11.0  # is rising since 600
    config = read_run({"study": "fork", "parent": "x", "fractions": [0.88, 0.5]})
    assert isinstance(config, Fork)
    assert fork_points(config, losses) == [
        *(ForkPoint(1, 90, "before 10", 100), ForkPoint(1, 88, "0.88", 100), ForkPoint(1, 50, "0.5", 100)),
        *(ForkPoint(2, 590, "before 10", 600), ForkPoint(2, 528, "0.88", 600), ForkPoint(2, 300, "0.5", 600)),
    ]


# -------------------------------------------------------------------------------------------------------- bad input


def test_what_cannot_be_forked(parent: RunFolder, tmp_path: Path) -> None:
    refused = {
        "parent: none of its 2 replicas diverges, so there is nothing to fork; give at_step": {},
        "at_step: 24 is after the last step of the parent's 24": {"at_step": 24},
        "intervention: the changed run fails: precision.schedule: plan for layers.0.up: 'mxfp9'": {
            "at_step": 3,
            "intervention": {"plan": {"layers.*": "mxfp9"}},
        },
        "intervention.perturbed_weight: must be from 0 to 4095, the elements of layers.0.up.weight, not 4096": {
            "at_step": 3,
            "intervention": {"perturbed_weight": 4096},
        },
        "parent: 'abcdefabcdef' is not a run's folder": {"parent": "abcdefabcdef"},
    }
    for message, options in refused.items():
        with pytest.raises(ConfigError) as error:
            checks.STUDY.check(configured(parent, **options))
        assert str(error.value).startswith(message)
    for options in ({"intervene_before": 20}, {"fractions": [0.5]}):
        with pytest.raises(ConfigError, match="at_step: replicas are forked at this step only"):
            configured(parent, at_step=3, **options)
    several = trained(tmp_path)
    with pytest.raises(ConfigError, match="several rows; fork a run that has only one"):
        checks.STUDY.check(configured(several, at_step=3))
    control = forked(tmp_path, parent, at_step=3)
    with pytest.raises(ConfigError, match="is not a student-teacher run"):
        checks.STUDY.check(configured(control, at_step=3))


@each("options", [{"steps": 0}, {"intervene_before": 0}, {"fractions": [1.0]}, {"at_step": -1}])
def test_bad_values(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        read_run({"study": "fork", "parent": "x"} | options)


def test_a_replay_with_other_bits_is_no_fork(tmp_path: Path) -> None:
    """As on another GPU, the parent's journal has one bit that the replay does not have."""
    parent = trained(tmp_path, **ONE_ROW)
    recorded = read_columns(parent.columns, 2)
    recorded[10, 0, 1] = np.nextafter(recorded[10, 0, 1], np.float32(9))
    for path in parent.columns.glob("*.parquet"):
        path.unlink()
    write_part(part_path(parent.columns, 0), recorded)
    with pytest.raises(ConfigError, match="the replay differs from the journal at step 10"):
        forked(tmp_path, parent, at_step=12)

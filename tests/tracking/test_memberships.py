"""A run knows its experiments and sweeps, and a reader finds a run while it is trained again."""

from __future__ import annotations

from pathlib import Path

from tracked import FINGERPRINT, make_folder

from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.memberships import Membership
from mxstudy.tracking.named_runs import named_run


def asked(experiment: str, sweep: str | None = None, label: str = "seed=1") -> Membership:
    choices = {"experiment": experiment} | ({"sweep": sweep} if sweep else {})
    return Membership(experiment=experiment, label=label, choices=choices, baseline={})


def labels(folder: RunFolder, *names: str) -> list[str | None]:
    return [found.label if (found := folder.found_by(name)) else None for name in names]


def test_a_folder_of_before_has_the_membership_that_it_was_made_with(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (own,) = folder.memberships()
    assert (own.experiment, own.sweep, own.label, own.choices) == (
        "quick",
        None,
        "norm=mxnorm_p2",
        {"norm": "mxnorm_p2"},
    )
    assert labels(folder, "quick", "other") == ["norm=mxnorm_p2", None]
    assert own.in_config == {"experiment": "quick"}
    folder.join(own)
    assert not (folder.path / "memberships.json").exists()


def test_each_sweep_has_its_own_name_for_a_run(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    folder.join(asked("grid", "small", label="a"))
    folder.join(asked("grid", "large", label="b"))
    assert labels(folder, "quick", "small", "large", "grid", "huge") == ["norm=mxnorm_p2", "a", "b", "b", None]
    folder.join(asked("grid", label="c"), asked("grid", "small", label="d"))
    assert labels(folder, "small", "grid") == ["d", "c"]
    assert [each.label for each in folder.memberships()] == ["norm=mxnorm_p2", "d", "b", "c"]
    assert folder.label == "norm=mxnorm_p2"
    folder.join(asked("grid", "small", label="d seed=1"))
    folder.join(asked("grid", "small", label="alone"))
    assert labels(folder, "small") == ["d seed=1"]


def test_a_sweep_goes_before_the_experiment_of_its_name(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    folder.join(asked("grid", "grid", label="of the sweep"), asked("grid", label="by hand"))
    assert labels(folder, "grid") == ["of the sweep"]


def test_until_a_rerun_has_a_result_the_run_that_it_replaces_is_found(tmp_path: Path) -> None:
    first = make_folder(tmp_path)
    first.update(state="finished")
    for state in ("failed", "finished"):
        number = len(list(first.path.parent.iterdir()))
        aside = first.path.rename(first.path.with_name(f"{first.path.name}.old-{number}"))
        again = make_folder(tmp_path)
        again.join(asked("grid", label="a"))
        found = again.found_by("grid").with_result()  # type: ignore[union-attr]
        assert (found.path.name, found.label) == (f"{again.path.name}.old-1", "a")
        assert named_run(FINGERPRINT[:8], tmp_path, "checkpoint").path == found.path
        assert named_run(str(again.path), tmp_path, "checkpoint").path == found.path
        again.update(state=state)
        assert again.with_result().path == (found.path if state == "failed" else again.path)
        assert aside.exists()

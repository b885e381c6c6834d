"""A sweep has one parent run, whatever was launched again, deleted or away."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mirrored import met_by_another
from tracked import make_folder, training_row, write_rows

from mxstudy import results
from mxstudy.compat.mlflow import NOTE, PARENT, charts_over
from mxstudy.compat.mlflow_views import address_of_view
from mxstudy.tracking import mlflow_parent as module
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.memberships import Membership
from mxstudy.tracking.mlflow_mirror import Position, mirror_of
from mxstudy.tracking.mlflow_parent import SUMMARY, Summary, Sweep
from mxstudy.tracking.mlflow_store import active_run, arm_tag, connect

pytestmark = pytest.mark.integration

TABLE = Summary("| arm | val loss |\n| --- | --- |\n| rmsnorm | 4.5 |", result="val loss: rmsnorm 4.5")


def make(uri: str, runs: Path, digit: str) -> RunFolder:
    folder = make_folder(runs, digit * 64, tracking={"uri": uri})
    write_rows(folder, [training_row(step) for step in range(3)])
    return folder


def sweep_of(uri: str, *folders: RunFolder) -> Sweep:
    named = {folder.status().fingerprint: folder for folder in folders}
    arms = dict.fromkeys(named, "mxfp8 rmsnorm")
    return Sweep(uri, "quick", "quick: seed", {"norm": "rmsnorm", "study": "pretrain"}, named, arms)


def write_provenance(folder: RunFolder, **more: str) -> None:
    (folder.path / "provenance.json").write_text(json.dumps(folder.provenance() | more))


def send(folder: RunFolder, parent_id: str | None = None) -> str:
    folder.update(mlflow_parent_id=parent_id)
    follow = mirror_of(folder.config(), folder, "norm=rmsnorm")
    follow.start()
    assert follow.finish("finished") is None
    return follow.position.run_id


def get(uri: str, run_id: str) -> Any:
    return connect(uri).get_run(run_id)


def test_a_child_knows_its_parent_from_the_start_and_the_parent_what_came_out(uri: str, tmp_path: Path) -> None:
    folders = [make(uri, tmp_path / "runs", digit) for digit in "ab"]
    sweep = sweep_of(uri, *folders)
    parent_id = sweep.begin()
    assert (get(uri, parent_id).info.status, get(uri, parent_id).data.tags["status"]) == ("RUNNING", "running")
    children = [send(folder, parent_id) for folder in folders]
    assert [get(uri, child).data.tags[PARENT] for child in children] == [parent_id] * 2
    figure = tmp_path / "losses.png"
    figure.write_bytes(b"\x89PNG")
    sweep.end("finished", replace(TABLE, figures=[figure]))
    parent = get(uri, parent_id)
    assert (parent.info.run_name, parent.info.status) == (f"quick: seed ({sweep.fingerprint[:6]})", "FINISHED")
    assert parent.info.start_time == int(folders[0].status().started_s * 1000)
    assert parent.info.end_time == int(folders[1].journal_path.stat().st_mtime * 1000)
    said = {"status": "finished", "norm": "rmsnorm", "jobs": "2", "result": "val loss: rmsnorm 4.5"}
    assert said.items() <= parent.data.tags.items()
    link, note = parent.data.tags[NOTE].split("\n\n", 1)
    assert note == TABLE.markdown
    assert link == f"[Charts of its runs]({address_of_view('1', arm_tag(parent_id), charts=True)})"
    assert {file.path for file in connect(uri).list_artifacts(parent_id)} == {SUMMARY, "losses.png"}


def test_a_sweep_has_charts_from_its_start_and_finds_its_runs_by_their_arms(uri: str, tmp_path: Path) -> None:
    folder = make(uri, tmp_path / "runs", "a")
    write_provenance(folder, arm="rmsnorm")
    sweep = sweep_of(uri, folder)
    parent_id = sweep.begin()
    tag, client = arm_tag(parent_id), connect(uri)
    assert get(uri, parent_id).data.tags[NOTE] == f"[Charts of its runs]({address_of_view('1', tag, charts=True)})"
    view = json.loads(client.get_experiment("1").tags[f"mlflow.sharedViewState.{tag}"])
    child = send(folder, parent_id)
    assert get(uri, child).data.tags[tag] == "rmsnorm"  # the parent did not have to end
    assert [run.info.run_id for run in client.search_runs(["1"], view["searchFilter"])] == [child]
    assert view["groupBy"]["groupByKeys"] == [{"mode": "tag", "groupByData": tag}]
    sweep.end("finished", TABLE)
    assert get(uri, child).data.tags[tag] == "mxfp8 rmsnorm"  # its name among the arms of this sweep
    sweep.begin()
    assert TABLE.markdown in get(uri, parent_id).data.tags[NOTE]


def test_a_child_that_began_before_its_parent_joins_it_while_it_runs(uri: str, tmp_path: Path) -> None:
    folder = make(uri, tmp_path / "runs", "a")
    follow = mirror_of(folder.config(), folder, "norm=rmsnorm")
    follow.start()
    follow.covered(1)
    while (follow.position or Position("", "")).next_step < 1:
        time.sleep(0.01)
    child, parent_id = follow.position.run_id, sweep_of(uri, folder).begin()
    assert PARENT not in get(uri, child).data.tags
    folder.update(mlflow_parent_id=parent_id)
    assert follow.finish("finished") is None
    assert get(uri, child).data.tags[PARENT] == parent_id


def test_the_same_sweep_again_in_another_order_adds_nothing(uri: str, tmp_path: Path) -> None:
    first, second = (make(uri, tmp_path / "runs", digit) for digit in "ab")
    parent_id = sweep_of(uri, first, second).begin()
    send(first, parent_id)
    send(second, parent_id)
    for again in ((first, second), (second, first)):
        sweep = sweep_of(uri, *again)
        assert sweep.begin() == parent_id
        sweep.end("finished", TABLE)
    assert len(connect(uri).search_runs(["1"])) == 3
    assert sweep_of(uri, first).fingerprint != sweep_of(uri, first, second).fingerprint


def test_processes_that_begin_a_sweep_at_once_make_one_parent(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [make(uri, tmp_path / "runs", digit) for digit in "ab"]
    monkeypatch.setattr(module, "find_run", met_by_another(module.find_run))
    with ThreadPoolExecutor(2) as pool:
        parents = [*pool.map(lambda sweep: sweep.begin(), [sweep_of(uri, *folders) for _ in range(2)])]
    assert {run.info.run_id for run in connect(uri).search_runs(["1"])} == {*parents}
    assert len({*parents}) == 1


def test_of_two_sweeps_that_end_at_once_one_adopts_a_run_that_both_have(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, other = (make(uri, tmp_path / "runs", digit) for digit in "ab")
    child = send(shared)
    sweeps = [sweep_of(uri, shared), sweep_of(uri, shared, other)]
    monkeypatch.setattr(module, "active_run", met_by_another(module.active_run))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda sweep: sweep.end("finished", TABLE), sweeps))
    monkeypatch.undo()
    parents = [sweep.begin() for sweep in sweeps]
    adopted = [parent_id == get(uri, child).data.tags[PARENT] for parent_id in parents]
    names_another = ["Under the sweeps that trained them" in get(uri, one).data.tags[NOTE] for one in parents]
    assert sorted(adopted) == [False, True]
    assert names_another == [not own for own in adopted]


def test_a_parent_that_could_not_be_made_at_the_start_adopts_at_the_end(uri: str, tmp_path: Path) -> None:
    folders = [make(uri, tmp_path / "runs", digit) for digit in "ab"]
    children = [send(folder) for folder in folders]
    unsent = make(uri, tmp_path / "runs", "c")
    sweep = sweep_of(uri, *folders, unsent)
    sweep.end("running", TABLE)
    (parent_id,) = {get(uri, child).data.tags[PARENT] for child in children}
    assert (get(uri, parent_id).info.status, get(uri, parent_id).data.tags["status"]) == ("RUNNING", "running")
    assert get(uri, parent_id).data.tags["jobs"] == "3"


def test_a_run_stays_with_the_first_sweep_that_asked_for_it(uri: str, tmp_path: Path) -> None:
    shared, other = (make(uri, tmp_path / "runs", digit) for digit in "ab")
    first = sweep_of(uri, shared)
    child = send(shared, first.begin())
    second = sweep_of(uri, shared, other)
    second.end("finished", TABLE)
    assert get(uri, child).data.tags[PARENT] == first.begin()
    connect(uri).delete_run(first.begin())
    second.end("finished", TABLE)
    assert get(uri, child).data.tags[PARENT] == second.begin()


def test_a_sweep_shows_its_runs_whoever_trained_them(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, own = (make(uri, tmp_path / "runs", digit) for digit in "ab")
    first = sweep_of(uri, shared)
    child = send(shared, first.begin())
    shared.update(state="finished")
    choices = {"experiment": "slow", "sweep": "both"}
    for folder in (shared, own):
        folder.join(Membership(experiment="slow", label=f"of {folder.path.name[0]}", choices=choices))
    second = replace(sweep_of(uri, shared, own), experiment="slow", name="both: seed")
    send(own, second.begin())
    assert mirror_of(shared.config(), shared, "norm=rmsnorm").catch_up() is None  # only its memberships
    second.end("finished", TABLE)
    parent = get(uri, second.begin())
    link, table, others = parent.data.tags[NOTE].split("\n\n")
    ids = [parent.info.experiment_id, get(uri, child).info.experiment_id]
    assert link == f"[Charts of its runs]({charts_over(ids, sought(parent), 'metrics.`val/loss`')})"
    assert table == TABLE.markdown
    assert others == f"Under the sweeps that trained them: [norm=rmsnorm](#/experiments/{ids[1]}/runs/{child})"
    found = connect(uri).search_runs(ids, sought(parent))
    assert {run.data.tags["fingerprint"][0] for run in found} == {"a", "b"}
    assert (
        {run.data.tags["in.both"] for run in found} == {run.data.tags["in.slow"] for run in found} == {"of a", "of b"}
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for name, names in (("both", ["of a", "of b"]), ("slow", ["of a", "of b"]), ("quick", ["norm=mxnorm_p2"] * 2)):
        runs = results.load([f"mlflow:{name}"], "runs")
        assert sorted(runs["label"]) == names
    assert set(results.load(["mlflow:both"], "runs")["choice.sweep"]) == {"both"}


def sought(parent: Any) -> str:
    return f"tags.`sweep.{parent.info.run_id[:12]}` LIKE '%'"


def test_sweeps_over_the_same_keys_have_names_of_their_own(uri: str, tmp_path: Path) -> None:
    """All of them were called "quick: seed"."""
    sweeps = [sweep_of(uri, make(uri, tmp_path / "runs", digit)) for digit in "ab"]
    parents = [get(uri, sweep.begin()).info.run_name for sweep in sweeps]
    assert len({*parents}) == 2
    assert all(name.startswith("quick: seed (") for name in parents)
    assert [get(uri, sweep.begin()).info.run_name for sweep in sweeps] == parents


def test_a_parent_of_another_store_is_no_parent(uri: str, tmp_path: Path) -> None:
    child = send(make(uri, tmp_path / "runs", "a"), parent_id="f" * 32)
    assert PARENT not in get(uri, child).data.tags
    assert active_run(connect(uri), "f" * 32) is None


def test_a_parent_that_was_deleted_is_made_anew(uri: str, tmp_path: Path) -> None:
    folder = make(uri, tmp_path / "runs", "a")
    deleted = sweep_of(uri, folder).begin()
    connect(uri).delete_run(deleted)
    assert sweep_of(uri, folder).begin() != deleted


@pytest.mark.parametrize(("state", "status"), [("preempted", "KILLED"), ("failed", "FAILED")])
def test_a_sweep_that_did_not_get_through_says_so(uri: str, tmp_path: Path, state: str, status: str) -> None:
    sweep = sweep_of(uri, make(uri, tmp_path / "runs", "a"))
    sweep.end(state, TABLE)
    parent = get(uri, sweep._parent(connect(uri)).info.run_id)
    assert (parent.info.status, parent.data.tags["status"]) == (status, state)

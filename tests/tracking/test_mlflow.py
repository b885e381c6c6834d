"""Every point of the journal arrives once in real stores of MLflow."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mirrored import ARTIFACTS, losses, mirror, points, send, the_run
from tracked import FINGERPRINT, make_folder, training_row, write_rows

from mxstudy.reader import ConfigError, flatten, plain
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_store import (
    check_uri,
    connect,
    create_run,
    create_store,
    find_run,
    get_experiment,
    member_of,
)

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("uri", "error"),
    [
        ("ftp://host", "does not begin with one of sqlite"),
        ("sqlite://", "is lost when the process ends"),
        *(
            (uri, "is not the address of a server; give one like http://127.0.0.1:5000")
            for uri in (
                "http://host:80000",
                "http://host:port",
                "http:host",
                "https://",
                "http://[::1",
                "http://a b",
                "http://a..b",
            )
        ),
    ],
)
def test_what_cannot_be_mirrored_to_is_refused(uri: str, error: str) -> None:
    with pytest.raises(ConfigError, match=rf"^tracking\.uri: .*{error}"):
        check_uri(uri, "tracking.uri")


@pytest.mark.parametrize("uri", ["http://127.0.0.1:5000", "https://user:word@mlflow.example/path", "http://[::1]:5000"])
def test_addresses_of_servers_are_taken(uri: str) -> None:
    check_uri(uri, "tracking.uri")


def test_a_server_that_is_away_is_one_line() -> None:
    assert create_store("http://127.0.0.1:9") == (
        "http://127.0.0.1:9: ConnectionRefusedError: [Errno 111] Connection refused"
    )


def test_a_file_that_is_no_database_is_one_line_soon(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a database at all, but long enough to be looked at" * 20)
    uri, before_s = f"sqlite:///{tmp_path / 'notes.txt'}", time.monotonic()
    assert create_store(uri) == f"{uri}: DatabaseError: file is not a database"
    assert time.monotonic() - before_s < 20  # MLflow itself would continue for 100


def test_every_number_arrives_with_the_journals_time(uri: str, folder: RunFolder) -> None:
    probe = {"step": 1, "probe": "norm_output_rms", "values": {"layers.0.norm/rms": 0.5, "layers.0.norm/n": [1, 2]}}
    rows = [
        {"step": 0, "precision": [["layers.0", "forward_x", "E4M3"]], "unigram_entropy_nats": 3.5, "time_s": 9.0},
        training_row(0) | {"time_s": 10.0},
        probe | {"time_s": 11.5},
        training_row(1) | {"time_s": 12.0, "mfu": 0.25},
        {"step": 1, "validation_loss": 4.5, "time_s": 13.0},
    ]
    write_rows(folder, rows)
    follower = send(uri, folder)
    client, run_id = connect(uri), the_run(uri).info.run_id
    assert follower.position.run_id == folder.status().mlflow_run_id == run_id
    found = {
        (name, point.step, point.value, point.timestamp)
        for name in the_run(uri).data.metrics
        for point in client.get_metric_history(run_id, name)
    }
    training = {
        (f"train/{key}", row["step"], float(row[key]), int(row["time_s"] * 1000))
        for row in (rows[1], rows[3])
        for key in ("tokens", "loss", "lr", "grad_norm")
    }
    assert found == training | {
        *(("system/tokens_per_s", row["step"], 100.0, int(row["time_s"] * 1000)) for row in (rows[1], rows[3])),
        ("val/unigram_entropy_nats", 0, 3.5, 9000),
        ("norm_rms/rms.layers.0.norm", 1, 0.5, 11500),
        ("system/mfu", 1, 0.25, 12000),
        ("val/loss", 1, 4.5, 13000),
    }


def test_texts_arrive_as_files_before_the_run_has_ended(uri: str, folder: RunFolder) -> None:
    def texts(step: int, *written: str) -> dict[str, Any]:
        return {
            "step": step,
            "texts": [{"prompt": "def ", "text": one, "tokens": 2, "ended": "eos"} for one in written],
        }

    rows = [training_row(0), training_row(1), texts(1, "f(", "é"), training_row(2), texts(2, "g("), training_row(3)]
    write_rows(folder, rows)
    follower = mirror(uri, folder)
    follower.start()
    follower.covered(2)  # a checkpoint: a resumed run may replace what was written after it
    client, found = connect(uri), []
    for _ in range(600):
        run_id = folder.status().mlflow_run_id
        if found := client.list_artifacts(run_id, "texts") if run_id else []:
            break
        time.sleep(0.05)
    assert [file.path for file in found] == ["texts/step_00000001.txt"]
    assert follower.finish("finished") is None
    files = [client.download_artifacts(run_id, f"texts/step_0000000{step}.txt") for step in (1, 2)]
    assert [Path(file).read_text() for file in files] == ["def f(\n\n---\n\ndef é", "def g("]
    assert points(uri) == losses(folder)


def test_a_run_says_what_it_is(uri: str, folder: RunFolder) -> None:
    write_rows(folder, [training_row(0)])
    send(
        uri, folder, params={"precision.plan.layers.*": "mxfp8", "text": "x" * 9000} | {f"p{i}": i for i in range(150)}
    )
    run, origin = the_run(uri), folder.provenance()
    assert run.info.run_name == "norm=mxnorm_p2"
    assert (run.info.status, run.data.tags["status"]) == ("FINISHED", "finished")
    assert run.info.start_time == int(folder.status().started_s * 1000)
    assert len(run.data.params) == 152
    assert run.data.params["precision.plan.layers._"] == "mxfp8"
    assert run.data.params["text"] == "x" * 6000
    assert (run.data.tags["fingerprint"], run.data.tags["norm"]) == (FINGERPRINT, "mxnorm_p2")
    assert run.data.tags["mlflow.source.git.commit"] == str(origin["commit"])
    assert {key: run.data.tags[key] for key in ("dirty", "torch", "gpu")} == {
        key: str(origin[key]) for key in ("dirty", "torch", "gpu")
    }
    assert [file.path for file in connect(uri).list_artifacts(run.info.run_id)] == ARTIFACTS
    assert (Path(uri.removeprefix("sqlite:///")).parent / "mlruns" / "quick").is_dir()


@pytest.mark.parametrize(
    ("state", "status"),
    [("diverged", "FINISHED"), ("failed", "FAILED"), ("preempted", "KILLED"), ("cancelled", "KILLED")],
)
def test_how_a_run_ended(uri: str, folder: RunFolder, state: str, status: str) -> None:
    write_rows(folder, [training_row(0), training_row(1, loss=math.nan)])
    send(uri, folder, state, covered=1)
    assert (the_run(uri).info.status, the_run(uri).data.tags["status"]) == (status, state)
    assert len(points(uri)) == (2 if state == "diverged" else 1)


def test_spikes_are_counted_once_whatever_was_resumed_or_sent_before(uri: str, folder: RunFolder) -> None:
    spike = {"spike": {"loss": 9.0, "mean": 4.0, "std": 0.1}}
    rows = [training_row(step) for step in range(8)]
    write_rows(folder, [*rows[:2], {"step": 1} | spike, *rows[2:6], {"step": 5} | spike])
    send(uri, folder, "preempted", covered=4)
    assert points(uri, "train/spikes") == [(1, 1.0)]
    write_rows(folder, [*rows[4:7], {"step": 6} | spike, rows[7]], resumed_from=4)
    send(uri, folder)
    assert points(uri, "train/spikes") == [(1, 1.0), (6, 2.0)]


def test_the_status_is_kept_up_to_date_and_a_reason_is_given(uri: str, folder: RunFolder) -> None:
    write_rows(folder, [training_row(step) for step in range(3)])
    follower = mirror(uri, folder)
    follower.start()
    follower.covered(3)
    deadline_s = time.time() + 30
    while len(connect(uri).search_runs(["1"])) == 0 or len(points(uri)) < 3:
        assert time.time() < deadline_s
        time.sleep(0.02)
    assert (the_run(uri).info.status, the_run(uri).data.tags["status"]) == ("RUNNING", "running")
    assert follower.finish("diverged", "loss nan at step 3") is None
    tags = the_run(uri).data.tags
    assert (tags["status"], tags["reason"]) == ("diverged", "loss nan at step 3")


def test_non_finite_values_do_not_hold_up_the_others(uri: str, folder: RunFolder) -> None:
    values = [1.0, math.nan, math.inf, -math.inf, 2.0]
    write_rows(folder, [training_row(step, loss) for step, loss in enumerate(values)])
    send(uri, folder)
    found = dict(points(uri))
    largest = sys.float_info.max  # how MLflow stores infinity
    assert math.isnan(found.pop(1))
    assert found == {0: 1.0, 2: largest, 3: -largest, 4: 2.0}
    assert len(points(uri, "train/lr")) == 5


def test_many_more_points_than_fit_a_call(uri: str, folder: RunFolder) -> None:
    write_rows(folder, [training_row(step) for step in range(700)])
    send(uri, folder)
    assert points(uri) == losses(folder)
    assert len(losses(folder)) == 700


def test_a_resumed_run_goes_on_in_the_same_mlflow_run_without_doubled_steps(uri: str, folder: RunFolder) -> None:
    write_rows(folder, [training_row(step) for step in range(8)])
    first = send(uri, folder, "preempted", covered=5).position.run_id
    assert [step for step, _ in points(uri)] == list(range(5))
    write_rows(folder, [training_row(step, loss=1.0) for step in range(5, 10)], resumed_from=5)
    params = flatten(plain(folder.config())) | {"experiment": "renamed", "new": 1}
    assert send(uri, folder, params=params).position.run_id == first
    assert points(uri) == losses(folder)
    assert points(uri)[4:6] == [(4, 4.6), (5, 1.0)]
    assert the_run(uri).info.status == "FINISHED"


def test_an_id_that_was_lost_is_found_by_tag_and_a_position_that_lags_doubles_nothing(
    uri: str, folder: RunFolder
) -> None:
    write_rows(folder, [training_row(step) for step in range(5)])
    first = send(uri, folder).position.run_id
    state = folder.path / "mirror.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"next_step": 2, "state": "running"}))
    write_rows(folder, [training_row(5)])
    assert send(uri, folder).position.run_id == first
    state.unlink()
    write_rows(folder, [training_row(6)])
    assert send(uri, folder).position.run_id == first
    assert points(uri) == losses(folder)
    assert len(points(uri)) == 7


def test_the_same_fingerprint_trained_again_is_another_run(uri: str, folder: RunFolder) -> None:
    write_rows(folder, [training_row(0)])
    send(uri, folder)
    folder.path.rename(folder.path.with_name(f"{folder.path.name}.old-1"))
    again = make_folder(folder.path.parent.parent)
    write_rows(again, [training_row(0, loss=1.0)])
    send(uri, again)
    assert len(connect(uri).search_runs(["1"])) == 2


def test_names_with_marks_are_searched_for_as_they_are(uri: str) -> None:
    client = connect(uri)
    experiment_id = get_experiment(client, 'it\'s "mine" <b>`x`</b>', "pretrain")
    hostile = ("plain", "it's", 'so "said"', "x' OR tags.a LIKE '%")
    made = {text: create_run(client, experiment_id, text, 1.0, {"a": text}).info.run_id for text in hostile}
    found = {text: find_run(client, experiment_id, {"a": text}).info.run_id for text in hostile}
    assert found == made
    with pytest.raises(ValueError, match="cannot be searched for in MLflow"):
        find_run(client, experiment_id, {"a": "'\""})
    tag = "in.it_s _mine_ _b__x__/b_"
    member = create_run(client, experiment_id, "member", 1.0, {"in.it's `mine` <b>`x`</b>": "yes"})
    assert member.data.tags[tag] == "yes"
    found = client.search_runs([experiment_id], member_of("it's `mine` <b>`x`</b>"))
    assert [run.info.run_id for run in found] == [member.info.run_id]


def test_a_run_that_was_deleted_in_mlflow_is_sent_anew(uri: str, folder: RunFolder) -> None:
    write_rows(folder, [training_row(step) for step in range(3)])
    deleted = send(uri, folder, "preempted", covered=3).position.run_id
    connect(uri).delete_run(deleted)
    assert send(uri, folder).position.run_id != deleted
    assert points(uri) == losses(folder)

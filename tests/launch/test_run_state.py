"""A run's real state is found."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from fake_study import FakeStudy, seeds

from mxstudy.config import Slurm
from mxstudy.launch.claiming import claim
from mxstudy.launch.plan import plan
from mxstudy.launch.queues import QueueError, Queues
from mxstudy.launch.run_state import RunState, look, observe
from mxstudy.launch.ticket import Ticket, ticket_of
from mxstudy.tracking.folder import RunFolder


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "bin", monkeypatch)


@pytest.fixture
def folder(tmp_path: Path, study: FakeStudy) -> RunFolder:
    """Return a run that was given to Slurm as job 5_0."""
    made = claim(plan(seeds(tmp_path / "runs", 1))[0])
    Ticket(settings=Slurm(), job_id="5_0", launch="/launch", log="/launch/5_0.out", submitted_s=time.time()).write(made)
    return made


def now(folder: RunFolder) -> tuple[str, str | None, bool]:
    seen = observe(folder, Queues())
    return seen.state, seen.reason, seen.in_flight


def test_a_ticket_is_read_back(folder: RunFolder) -> None:
    ticket = ticket_of(folder)
    assert ticket is not None
    assert (ticket.settings, ticket.job_id, ticket.cancelled) == (Slurm(), "5_0", False)


@pytest.mark.parametrize(
    ("said", "queued", "expected"),
    [
        ("queued", "PENDING", ("queued", None, True)),
        ("queued", "CONFIGURING", ("running", None, True)),
        ("running", "RUNNING", ("running", None, True)),
        ("preempted", "PENDING", ("preempted", "SIGUSR2; waits to continue", True)),
        ("running", "PENDING", ("preempted", "killed; waits to continue", True)),
        ("finished", "COMPLETING", ("finished", "SIGUSR2", False)),
    ],
)
def test_in_the_queue(
    slurm: FakeSlurm, folder: RunFolder, said: str, queued: str, expected: tuple[str, str | None, bool]
) -> None:
    slurm.queue(job5_0=queued, job7="PENDING")
    folder.update(state=said, reason="SIGUSR2")
    assert now(folder) == expected


@pytest.mark.parametrize("heart", [None, 0.0])
def test_what_died_without_a_word_has_failed_at_once(slurm: FakeSlurm, folder: RunFolder, heart: float | None) -> None:
    folder.update(state="running", host="elsewhere", heartbeat_s=heart and time.time() - heart)
    assert now(folder) == ("failed", "died without a message (/launch/5_0.out)", False)


def test_slurm_remembers_for_a_while_how_it_died(slurm: FakeSlurm, folder: RunFolder) -> None:
    folder.update(state="running")
    slurm.say("sacct", "OUT_OF_MEMORY|0:125")
    slurm.say(
        "scontrol", "JobId=6 ArrayJobId=5 ArrayTaskId=0 JobState=FAILED Reason=NonZeroExitCode ExitCode=137:0 X=1"
    )
    assert now(folder)[1] == "died without a message (FAILED, exit code 137:0; /launch/5_0.out)"
    assert slurm.asked("sacct") == []


def test_then_its_accounts_say(slurm: FakeSlurm, folder: RunFolder) -> None:
    folder.update(state="running")
    slurm.say("scontrol", "JobId=5 JobState=RUNNING ExitCode=0:0")
    slurm.say("sacct", "OUT_OF_MEMORY|0:125")
    assert now(folder)[1] == "died without a message (OUT_OF_MEMORY, exit code 0:125; /launch/5_0.out)"
    assert slurm.asked("sacct") == ["sacct --noheader -XP --format=State,ExitCode -j 5_0"]


def test_accounts_that_do_not_answer_are_not_asked_again(slurm: FakeSlurm, folder: RunFolder) -> None:
    folder.update(state="running")
    queues = Queues()
    assert [observe(folder, queues).state for _ in range(3)] == ["failed"] * 3
    assert len(slurm.asked("sacct")) == len(slurm.asked("scontrol")) == len(slurm.asked("squeue")) == 1


def test_what_never_began(slurm: FakeSlurm, folder: RunFolder) -> None:
    assert now(folder) == ("failed", "left the queue before it began (/launch/5_0.out)", False)
    slurm.say("sacct", "CANCELLED by 0|0:0")
    assert now(folder) == ("cancelled", "CANCELLED, exit code 0:0", False)


def test_a_preempted_run_that_no_queue_has_is_for_somebody_to_retry(slurm: FakeSlurm, folder: RunFolder) -> None:
    folder.update(state="preempted", reason="SIGTERM")
    assert now(folder) == ("preempted", "SIGTERM", False)


def test_what_was_cancelled_is_so_whatever_it_said_last(slurm: FakeSlurm, folder: RunFolder) -> None:
    ticket = ticket_of(folder)
    assert ticket is not None
    replace(ticket, cancelled=True).write(folder)
    for said in ("queued", "running", "preempted"):
        folder.update(state=said)
        assert now(folder)[0] == "cancelled"


def test_a_queue_that_cannot_be_asked_stops_a_launch_and_not_a_look(slurm: FakeSlurm, folder: RunFolder) -> None:
    slurm.say("squeue", None)
    with pytest.raises(QueueError, match=r"squeue: cannot be asked .*exit code 1"):
        plan(seeds(folder.path.parent.parent, 1))

    def seen(**status: object) -> RunState:
        folder.update(**status)
        return look(folder, Queues())

    assert seen().state == "queued"
    assert seen(state="running", host="elsewhere", heartbeat_s=time.time()).state == "running"
    dead = seen(heartbeat_s=time.time() - 90)
    assert (dead.state, dead.in_flight) == ("failed", False)
    assert seen(state="finished").state == "finished"


def test_a_run_that_is_over_asks_nobody(slurm: FakeSlurm, folder: RunFolder) -> None:
    folder.update(state="finished")
    plan(seeds(folder.path.parent.parent, 1))
    assert slurm.asked("squeue") == []


def test_of_many_runs_squeue_is_asked_once(slurm: FakeSlurm, study: FakeStudy, tmp_path: Path) -> None:
    jobs = plan(seeds(tmp_path / "many", 1, 2, 3))
    for number, job in enumerate(jobs):
        ticket = Ticket(settings=Slurm(), job_id=f"9_{number}", launch="/l", log="/l/o", submitted_s=0.0)
        ticket.write(claim(job))
    slurm.queue(job9_0="PENDING", job9_1="RUNNING")
    assert [job.state for job in plan(seeds(tmp_path / "many", 1, 2, 3))] == ["queued", "running", "resume"]
    assert slurm.asked("squeue") == ["squeue --me --noheader --array --format=%i %T"]


def test_whoever_takes_a_run_over_takes_its_ticket_away(slurm: FakeSlurm, folder: RunFolder) -> None:
    (job,) = plan(seeds(folder.path.parent.parent, 1))
    assert job.state == "resume"
    claim(job).update(state="running", host=socket.gethostname(), heartbeat_s=time.time())
    assert ticket_of(folder) is None
    with folder.lock():
        assert now(folder)[0] == "running"
    assert now(folder) == ("failed", "killed without a message", False)

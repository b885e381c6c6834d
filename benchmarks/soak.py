"""Disturb commands at random for a while, and compare what each leaves with what an undisturbed one leaves.

A trial takes one kind of command, one way of tracking and one disk. It disturbs the command one to three times (a
signal, or a full disk), and then gives the same command again until it ends well. A trial is lost if it does not end,
if one bit differs at its end (losses, tensors, columns, tokens, scores), or if MLflow lacks a loss or has one twice.
--seed draws what is tried: with the same --only, and on machines that mount the same disks, trial N of a seed is the
same.

A small disk is a tmpfs, which only root can mount. If mounting fails, a line says so and every disk is large.

python -m benchmarks.soak [--seconds 600] [--seed 0] [--only KIND ...] [--json PATH]
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.databases import SQLite
from benchmarks.disturbed import FILLER, FULL_DISK, SIGNALS, Disturbance, Ended, processes_in, run
from benchmarks.mlflow_server import Server
from benchmarks.report import machine, measured, options_of, show
from benchmarks.soak_kinds import KINDS, Inputs, Left, left_in
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.found_runs import find_runs
from mxstudy.tracking.journal import read_journal
from mxstudy.tracking.mlflow_store import connect

NONE, SQLITE, NEW, SERVER = "no tracking", "sqlite", "sqlite, new", "server that comes and goes"
TRACKING = {NONE: 2, SQLITE: 2, NEW: 1, SERVER: 1}  # relative frequencies
LARGE, SMALL = "large disk", "small disk"
DISK_MB = 64
ATTEMPTS = 3  # how often the same command is given after the last disturbance
LEAVE_S = 10.0  # in which processes leave after the last command, such as a queue whose last job has just ended


@dataclass(frozen=True)
class Trial:
    """A trial. Its number, the seed, --only and the disks that can be mounted decide all else."""

    number: int
    kind: str
    tracking: str
    disk: str
    disturbances: tuple[Disturbance, ...]


@dataclass
class Outcome:
    """How a trial ended. `met` are the disturbances that came before the command had ended."""

    trial: Trial
    met: list[str] = field(default_factory=list)
    attempts: int = 0
    seconds: float = 0.0
    lost: list[str] = field(default_factory=list)


def drawn(seed: int, number: int, kinds: Sequence[str], small_disks: bool) -> Trial:
    draw = random.Random(f"{seed} {number}")
    kind = kinds[number % len(kinds)]
    tracking = draw.choices(list(TRACKING), list(TRACKING.values()))[0]
    disk = draw.choice((LARGE, SMALL)) if small_disks else LARGE
    whats = (*SIGNALS, "SIGKILL", *([FULL_DISK] * 2 if disk == SMALL else []))
    share = 0.0 if "launcher" in kind else 0.7  # of moments counted in writes; a launcher's jobs count none
    found = tuple(
        Disturbance(draw.choice(whats), draw.random(), "writes" if draw.random() < share else "seconds", draw.random())
        for _ in range(draw.randint(1, 3))
    )
    return Trial(number, kind, tracking, disk, found)


# ---------------------------------------------------------------------------------------------------- a trial


@dataclass
class Soak:
    """The undisturbed command of each kind, what it left, and the server that the trials share."""

    folder: Path
    inputs: Inputs
    server: Server
    kinds: Sequence[str]
    undisturbed: dict[str, tuple[Ended, Left]] = field(default_factory=dict)

    def prepare(self) -> None:
        """Run each kind once undisturbed. Raises RuntimeError if one does not end well."""
        run(self.inputs.folder, ("+launch=status",))  # loads what all processes share, so that none of them counts it
        for kind in KINDS:
            if kind in self.kinds or kind == "pre-training":  # evaluation needs its model
                home = self.inputs.folder if kind == "pre-training" else self.folder / kind.replace(" ", "_")
                home.mkdir(exist_ok=True)
                ended = run(home, self.command(kind, "tracking=none"))
                if ended.code != 0:
                    raise RuntimeError(f"{kind}: failed undisturbed\n{ended.said}")
                self.undisturbed[kind] = ended, left_in(home)
                print(f"undisturbed: {kind}, {ended.seconds:.1f} s, {ended.writes} writes", flush=True)

    def command(self, kind: str, *tracking: str) -> tuple[str, ...]:
        return (*KINDS[kind](self.inputs), *tracking)

    def tried(self, trial: Trial) -> Outcome:
        """Carry out a trial. The folder of a trial that lost something stays."""
        outcome, began_s = Outcome(trial), time.monotonic()
        home = self.folder / f"trial_{trial.number}"
        home.mkdir()
        with disk_of(trial, home):
            try:
                self._disturb(trial, home, outcome)
            except Exception:
                outcome.lost.append(f"the soak itself failed: {traceback.format_exc()}")
            _, left = psutil.wait_procs(processes_in(home), timeout=LEAVE_S)
            for process in left:
                with suppress(psutil.Error):
                    outcome.lost.append(f"a process is left: {' '.join(process.cmdline())}")
                    process.kill()
            if outcome.lost:
                shutil.copytree(home, self.folder / f"lost_{trial.number}", ignore_dangling_symlinks=True)
        shutil.rmtree(home)
        outcome.seconds = time.monotonic() - began_s
        return outcome

    def _disturb(self, trial: Trial, home: Path, outcome: Outcome) -> None:
        undisturbed, expected = self.undisturbed[trial.kind]
        file = f"sqlite:///{home}/mlflow.db"
        uri = {SQLITE: file, NEW: file, SERVER: self.server.uri}.get(trial.tracking)
        command = self.command(trial.kind, *(["tracking=mlflow", f"tracking.uri={uri}"] if uri else ["tracking=none"]))
        if trial.tracking == SQLITE:
            shutil.copy(self.folder / "empty.db", home / "mlflow.db")
        with comes_and_goes(self.server, trial) if trial.tracking == SERVER else nullcontext():
            for disturbance in trial.disturbances:
                ended = run(home, command, disturbance, undisturbed)
                (home / FILLER).unlink(missing_ok=True)
                outcome.met += [disturbance.what] * ended.disturbed
                if ended.code is None:
                    outcome.lost.append(f"hung after {disturbance}: {ended.said[-500:]}")
        while outcome.attempts < ATTEMPTS:
            outcome.attempts += 1
            ended = run(home, command)
            if ended.code == 0:
                break
        else:
            outcome.lost.append(f"did not end well: exit code {ended.code}: {ended.said[-1500:]}")
            return
        left = left_in(home)
        differs = [name for name in {*expected, *left} if expected.get(name) != left.get(name)]
        outcome.lost += [f"differs: {name}" for name in sorted(differs)]
        if uri:
            run(home, command)  # sends what is missing from a server that was away at the end
            outcome.lost += [line for each in find_runs(home / "runs") for line in missing(uri, each)]


def missing(uri: str, folder: RunFolder) -> Iterator[str]:
    """Yield each loss of a run that MLflow lacks or has twice."""
    client, status = connect(uri), folder.status()
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(ids, f"tags.started_s = '{status.started_s}'")
    if [each.info.run_id for each in found] != [status.mlflow_run_id]:
        yield f"MLflow has {len(found)} runs of {folder.path.name}"
        return
    if found[0].info.status != "FINISHED":
        yield f"MLflow says {found[0].info.status} of {folder.path.name}"
    if (folder.path / "checkpoints").exists():
        for name, key in (("train/loss", "loss"), ("val/loss", "validation_loss")):
            points = client.get_metric_history(status.mlflow_run_id, name)
            rows = [row for row in read_journal(folder.journal_path) if key in row]
            sent, wanted = Counter((p.step, p.value) for p in points), Counter((r["step"], r[key]) for r in rows)
            if rows and sent != wanted:
                lacks, more = (wanted - sent).total(), (sent - wanted).total()
                yield f"MLflow lacks {lacks} and has {more} too many of {folder.path.name}'s {name}"


# ------------------------------------------------------------------------------------------ disks and servers


def can_mount(folder: Path) -> bool:
    """Return whether a tmpfs can be mounted here, and print a line if not."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode:
        print(f"no small disks: a tmpfs cannot be mounted here ({done.stderr.strip()})", flush=True)
        return False
    subprocess.run(["umount", str(folder)], check=True)
    return True


@contextmanager
def disk_of(trial: Trial, home: Path) -> Iterator[None]:
    """Make `home` a disk of DISK_MB within the block, if the trial wants a small one."""
    if trial.disk == LARGE:
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(home)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(home)], check=True)


class comes_and_goes:
    """Kill and restart the server within the block, in a rhythm that the trial's number decides."""

    def __init__(self, server: Server, trial: Trial) -> None:
        self.server, self.draw, self.stop = server, random.Random(trial.number), threading.Event()
        self.thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Self:
        self._be_there()
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop.set()
        self.thread.join()
        self._be_there()

    def _be_there(self) -> None:
        if self.server.process is None:
            self.server.start()

    def _follow(self) -> None:
        while not self.stop.wait(self.draw.uniform(0.0, 4.0)):
            self.server.kill()
            self.stop.wait(self.draw.uniform(0.0, 8.0))
            self.server.start()


# -------------------------------------------------------------------------------------------------- the table


def tell(outcome: Outcome) -> None:
    trial = outcome.trial
    whats = ", ".join(f"{each.what} at {each.at:.2f} of {each.of}" for each in trial.disturbances)
    about = f"{trial.number}: {trial.kind}, {trial.tracking}, {trial.disk}"
    print(f"{about}: {whats} ({outcome.seconds:.0f} s)", flush=True)
    for line in outcome.lost:
        print(f"  LOST: {line}", flush=True)


def rows_of(outcomes: Sequence[Outcome], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each kind and one for all, with the number of trials of each sort, and of lost ones."""
    rows = []
    for kind in (*kinds, "all"):
        own = [outcome for outcome in outcomes if kind in (outcome.trial.kind, "all")]
        whats = Counter(what for outcome in own for what in outcome.met)
        words = Counter(word for outcome in own for word in (outcome.trial.tracking, outcome.trial.disk))
        row: dict[str, Any] = {"kind": kind, "trials": len(own)}
        row |= {what: whats[what] for what in (*SIGNALS, FULL_DISK)}
        row |= {word: words[word] for word in (*TRACKING, SMALL)}
        rows.append(row | {"lost": sum(bool(outcome.lost) for outcome in own)})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options_of("soak", __doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="from the first trial to when no other one begins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    chosen = parser.parse_args(arguments)
    os.environ |= {"OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_OFFLINE": "1"}
    root = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit takes the server and the disks with it
    outcomes = list[Outcome]()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    (folder / "inputs").mkdir()
    with SQLite(folder) as databases, Server(folder, databases.new("server")) as server:
        soak = Soak(folder, Inputs(folder / "inputs"), server, chosen.only)
        small_disks = can_mount(folder / "disk")
        soak.prepare()
        began_s, number = time.monotonic(), chosen.first
        while time.monotonic() - began_s < chosen.seconds:
            outcomes.append(soak.tried(drawn(chosen.seed, number, chosen.only, small_disks)))
            tell(outcomes[-1])
            number += 1
    rows = rows_of(outcomes, chosen.only)
    show(rows)
    settings = {"seconds": chosen.seconds, "seed": chosen.seed, "disk_mb": DISK_MB, "small_disks": small_disks}
    measured(rows, chosen.json, **settings, **machine(), trials=[asdict(outcome) for outcome in outcomes])
    lost = [outcome.trial.number for outcome in outcomes if outcome.lost]
    if lost:
        print(f"what the trials {lost} left is in {folder}")
    else:
        shutil.rmtree(folder)
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())

"""Test the MLflow mirror under load: trainers log to a server while the server, or its database, is killed for a while.

Each trainer is a process with a journal and a mirror, like a run. It writes rows at a fixed rate, and sometimes a
durable checkpoint. When the last mirror is done or has given up, the points in the server's database are compared with
the journals; `arrived_s` is the time from the last row until then. `log_ms` is what a training loop loses per step: the
time to write the row, and to tell the mirror about a checkpoint. `ready_s` is the time from the first row until the
server was back with all its workers started.

PostgreSQL is Debian's package (apt-get install postgresql), started in a folder of its own.

python -m benchmarks.tracking [--databases sqlite postgresql] [--trainers 16] [--seconds 60] [--json PATH]
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import sqlalchemy

from benchmarks.databases import Databases, PostgreSQL, SQLite, make_writable
from benchmarks.mlflow_server import Server
from benchmarks.report import measured, options_of, show
from benchmarks.training import everywhere, pretraining
from mxstudy import config
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.journal import Journal
from mxstudy.tracking.mlflow_mirror import mirror_of
from mxstudy.tracking.mlflow_store import sqlite_file
from mxstudy.tracking.provenance import provenance

WITHIN_S, LOG_LIMIT_MS = 60.0, 1.0  # limits of `arrived_s`, and of the median `log_ms`

Point = tuple[str, str, int, float, int]  # fingerprint, name, step, value, unix time in ms


@dataclass(frozen=True)
class Load:
    """The load of a case. The server is gone, or its database read-only, for `away_s`."""

    trainers: int
    metrics: int
    steps_per_s: float
    seconds: float
    checkpoint_steps: int
    away_s: float
    workers: int

    @property
    def steps(self) -> int:
        return round(self.seconds * self.steps_per_s)


@dataclass(frozen=True)
class Trained:
    """A trainer's report at its end: `log_s` of every step, and `problem` as Mirror.finish returns it."""

    log_s: list[float]
    late_s: float
    arrived_s: float
    cpu_s: float
    warnings: list[str]
    problem: str | None


@dataclass(frozen=True)
class Site:
    """The server, its database, and what serves the database."""

    server: Server
    databases: Databases
    load: Load

    def away(self, kill: Callable[[], None], start: Callable[[], None]) -> None:
        """Call `kill` in the middle of the run, and `start` after `away_s`."""
        time.sleep((self.load.seconds - self.load.away_s) / 2)
        kill()
        time.sleep(self.load.away_s)
        start()


def undisturbed(site: Site) -> None:
    """Leave the server alone."""


def killed(site: Site) -> None:
    """Kill the server with SIGKILL for a while."""
    site.away(site.server.kill, site.server.start)


def database_killed(site: Site) -> None:
    """Kill the server's database with SIGKILL for a while, and leave the server running."""
    site.away(site.databases.kill, site.databases.start)


def read_only(site: Site) -> None:
    """Make the database read-only before the first row, later writable, and then restart the server."""
    time.sleep(site.load.away_s)
    site.server.kill()
    make_writable(file_of(site.server), True)
    site.server.start()


def file_of(server: Server) -> Path:
    """Return the server's SQLite file."""
    path = sqlite_file(server.database)
    assert path is not None
    return path


CASES: dict[str, dict[str, Callable[[Site], None]]] = {
    "sqlite": {f.__name__: f for f in (undisturbed, killed, read_only)},
    "postgresql": {f.__name__: f for f in (undisturbed, killed, database_killed)},
}
DATABASES: dict[str, Callable[[Path], Databases]] = {"sqlite": SQLite, "postgresql": PostgreSQL}


def measure(load: Load, database: str, case: str, databases: Databases, folder: Path) -> dict[str, Any]:
    """Return a case's row of the table."""
    context = multiprocessing.get_context("forkserver")
    # these imports take seconds of CPU time; real runs spend them on machines of their own
    context.set_forkserver_preload(["mlflow", "mxstudy.tracking.mlflow_mirror", "benchmarks.report"])
    begin, reports = context.Barrier(load.trainers + 1), context.Queue()
    folder.mkdir()
    with Server(folder, databases.new(case), load.workers) as server, ExitStack() as stack:
        if case == "read_only":
            make_writable(file_of(server), False)
        server.start()
        runs = [make_run(server.uri, folder / "runs", number) for number in range(load.trainers)]
        for run in runs:
            trainer = context.Process(target=train, args=(load, run, begin, reports))
            trainer.start()
            stack.callback(trainer.kill)
        begin.wait(timeout=120)
        began_s = time.monotonic()
        CASES[database][case](Site(server, databases, load))
        ready_s = time.monotonic() - began_s
        trained: list[Trained] = [reports.get(timeout=load.seconds + 120) for _ in runs]
        stored, written = points_in(server.database), Counter(point for run in runs for point in points_of(run))
    load_average = psutil.getloadavg()[0]  # over the last minute, including other users' processes
    machine = {"ready_s": ready_s, "server_cpu_s": server.cpu_s, "load_average": load_average}
    return {"database": database, "case": case} | judged(trained, written, stored) | machine


def make_run(uri: str, runs: Path, number: int) -> RunFolder:
    model = config.Decoder(hidden_size=64, ffn_size=64, vocab_size=64, num_layers=1, num_heads=1, num_kv_heads=1)
    train = config.Train(steps=1, batch_size=1, sequence_length=64)
    settings = pretraining(model, config.RMSNorm(), everywhere("bf16"), train, lr=1e-3)
    settings = replace(settings, tracking=config.Tracking(uri=uri), experiment="tracking")
    fingerprint = f"{number:012x}" * 5
    return RunFolder.create(runs / fingerprint[:12], settings, fingerprint, provenance() | {"choices": {}})


def train(load: Load, run: RunFolder, begin: Any, reports: Any) -> None:
    """Run a trainer's process: write each row at its scheduled time, which a late step does not shift."""
    warned = Warned()
    logging.getLogger("mxstudy").addHandler(warned)
    journal, mirror = Journal(run.journal_path), mirror_of(run.config(), run, run.path.name)
    assert mirror is not None
    values, log_s, late_s = np.random.default_rng(0).standard_normal((load.steps, load.metrics)), [], 0.0
    begin.wait(timeout=120)
    mirror.start()
    began_s, used_s = time.perf_counter(), time.process_time()
    for step in range(load.steps):
        until_s = began_s + step / load.steps_per_s - time.perf_counter()
        late_s = max(late_s, -until_s)
        time.sleep(max(until_s, 0.0))
        row = {"step": step} | {f"metric_{number}": value for number, value in enumerate(values[step].tolist())}
        before_s = time.perf_counter()
        journal.write(row)
        if (step + 1) % load.checkpoint_steps == 0:
            mirror.covered(step + 1)
        log_s.append(time.perf_counter() - before_s)
    journal.close()
    ended_s = time.perf_counter()
    problem = mirror.finish("finished")
    arrived_s = time.perf_counter() - ended_s
    reports.put(Trained(log_s, late_s, arrived_s, time.process_time() - used_s, warned.lines, problem))


class Warned(logging.Handler):
    """Keeps the warnings that a user would read."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def points_of(run: RunFolder) -> Iterator[Point]:
    """Yield the points of a run's journal, read without the mirror's own reader."""
    for line in run.journal_path.read_text().splitlines():
        row = json.loads(line)
        step, time_ms = row.pop("step"), int(1000 * row.pop("time_s"))
        yield from ((run.path.name, f"train/{name}", step, value, time_ms) for name, value in row.items())


def points_in(database: str) -> Counter[Point]:
    """Return all points that MLflow stored in the database of that URI, with their counts."""
    query = """SELECT substr(tags.value, 1, 12), metrics.key, metrics.step, metrics.value, metrics.timestamp
               FROM metrics JOIN tags ON tags.run_uuid = metrics.run_uuid AND tags.key = 'fingerprint'"""
    with sqlalchemy.create_engine(database).connect() as connection:
        return Counter(tuple(row) for row in connection.execute(sqlalchemy.text(query)))


def version_of(database: str) -> str:
    """Return the version of the database of that URI."""
    with sqlalchemy.create_engine(database).connect() as connection:
        return ".".join(map(str, connection.dialect.server_version_info or ()))


def judged(trained: list[Trained], written: Counter[Point], stored: Counter[Point]) -> dict[str, Any]:
    """Return a case's row: missing and surplus points, times, and whether all limits are kept."""
    log_ms = 1e3 * np.concatenate([each.log_s for each in trained])
    missing, extra = (written - stored).total(), (stored - written).total()
    arrived_s, median_ms = max(each.arrived_s for each in trained), float(np.median(log_ms))
    complete = missing == extra == 0 and not any(each.problem for each in trained)
    return {
        "points": written.total(),
        "missing": missing,
        "extra": extra,
        "arrived_s": arrived_s,
        "log_ms": median_ms,
        "log_p99_ms": float(np.percentile(log_ms, 99)),
        "log_max_ms": float(log_ms.max()),
        "late_s": max(each.late_s for each in trained),
        "warnings": sum(len(each.warnings) for each in trained),
        "gave_up": sum(each.problem is not None for each in trained),
        "trainers_cpu_s": sum(each.cpu_s for each in trained),
        "within_limits": complete and arrived_s <= WITHIN_S and median_ms <= LOG_LIMIT_MS,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of("tracking", __doc__)
    parser.add_argument("--databases", nargs="+", choices=DATABASES, default=["sqlite"])
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=sorted({*chain(*CASES.values())}),
        help="those of the databases' cases that are named here; default: all",
    )
    parser.add_argument("--trainers", type=int, default=16)
    parser.add_argument("--metrics", type=int, default=20, help="metrics per row")
    parser.add_argument("--steps-per-s", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    what = "between checkpoints; above all steps: only at the end"
    parser.add_argument("--checkpoint-steps", type=int, default=50, help=what)
    parser.add_argument("--away-s", type=float, default=20.0)
    what = "workers of the server; each takes seconds of CPU to start"
    parser.add_argument("--workers", type=int, default=1, help=what)
    chosen = vars(parser.parse_args(arguments))
    named, cases, path = chosen.pop("databases"), chosen.pop("cases"), chosen.pop("json")
    load, rows, versions = Load(**chosen), list[dict[str, Any]](), {"mlflow": version("mlflow")}
    for database in named:
        with tempfile.TemporaryDirectory() as name, DATABASES[database](Path(name)) as databases:
            versions[database] = version_of(databases.new("of_nobody"))
            for case in CASES[database]:
                if case in (cases or CASES[database]):
                    rows.append(measure(load, database, case, databases, Path(name) / case))
    show(rows)
    measured(rows, path, **asdict(load), **versions, cores=psutil.cpu_count())


if __name__ == "__main__":
    main()

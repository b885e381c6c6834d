"""Create MLflow's SQLite file completely: under a lock, in a temporary file, renamed when MLflow has filled it.

MLflow itself fills a new file in place, in a hundred migrations. A signal or a second process in the middle of them
leaves a file that no later command can use or complete.
"""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from pathlib import Path

from mxstudy.compat.mlflow import quiet_client
from mxstudy.tracking.locks import waiting_lock
from mxstudy.whole_files import replacing

log = logging.getLogger(__name__)


def make_database(path: Path) -> None:
    """Create MLflow's database unless it exists; move an incomplete one aside, and say so.

    Raises sqlite3.Error for a file that is not a database, and OSError.
    """
    if is_made(path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with waiting_lock(path.with_name(f".{path.name}.lock")):
        if is_made(path):  # made by the process that held the lock
            return
        for unfinished in path.parent.glob(f".{path.name}.[0-9]*"):
            unfinished.unlink()
        if path.exists():
            move_aside(path)
        with replacing(path) as temporary:
            quiet_client(f"sqlite:///{temporary}").search_experiments(max_results=1)


def is_made(path: Path) -> bool:
    """Return whether the file has MLflow's default experiment, which MLflow adds after all tables.

    Raises sqlite3.DatabaseError for a file that is not a database.
    """
    if not path.exists():
        return False
    with closing(sqlite3.connect(path)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE name = 'experiments'").fetchall()
        return bool(tables and connection.execute("SELECT 1 FROM experiments LIMIT 1").fetchall())


def move_aside(path: Path) -> None:
    """Rename an incomplete database, and SQLite's files beside it, to NAME.half-made-N."""
    number = next(n for n in range(1, 1000) if not path.with_name(f"{path.name}.half-made-{n}").exists())
    for part in path.parent.glob(f"{path.name}*"):
        rest = part.name.removeprefix(path.name)
        if rest in ("", "-journal", "-wal", "-shm"):
            part.rename(path.with_name(f"{path.name}.half-made-{number}{rest}"))
    log.warning("%s was left half-made by a command that was stopped; it is %s.half-made-%d now", path, path, number)

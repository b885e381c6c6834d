"""The journal gives back what was written, whatever was killed, cut or resumed in between."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mxstudy.tracking.journal import Journal, last_segments, read_journal, read_rows, replace_journal

WRITES_FOREVER = """
import sys
from pathlib import Path
from mxstudy.tracking.journal import Journal
journal, step = Journal(Path(sys.argv[1])), 0
while True:
    journal.write({"step": step, "padding": "x" * 5000})
    step += 1
"""


def write(path: Path, *rows: dict) -> None:
    journal = Journal(path)
    for row in rows:
        journal.write(row)
    journal.close()


def test_rows_come_back_with_their_time(tmp_path: Path) -> None:
    path, before_s = tmp_path / "metrics.jsonl", time.time()
    counts = {"norm/input": [0, 3, 1], "norm/bound": 16.5}
    write(path, {"step": 0, "loss": 5.5}, {"step": 0, "probe": "histograms", "values": counts, "time_s": 7.0})
    first, second = read_journal(path)
    assert before_s <= first.pop("time_s") <= time.time()
    assert first == {"step": 0, "loss": 5.5}
    assert second == {"step": 0, "probe": "histograms", "values": counts, "time_s": 7.0}


def test_non_finite_values_survive(tmp_path: Path) -> None:
    write(tmp_path / "j", {"step": 0, "loss": math.nan, "grad_norm": math.inf, "least": -math.inf})
    (row,) = read_journal(tmp_path / "j")
    assert math.isnan(row["loss"])
    assert (row["grad_norm"], row["least"]) == (math.inf, -math.inf)


def test_floats_keep_all_their_bits(tmp_path: Path) -> None:
    values = [0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308]
    write(tmp_path / "j", *({"step": step, "loss": value} for step, value in enumerate(values)))
    assert [row["loss"] for row in read_journal(tmp_path / "j")] == values


def test_a_last_line_torn_anywhere_is_no_row_and_the_next_writer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path, {"step": 0, "text": "fine"}, {"step": 1, "text": "\u00e9"})
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for cut in range(start, len(whole)):
        path.write_bytes(whole[:cut])
        assert [row["step"] for row in read_journal(path)] == [0]
        journal = Journal(path)
        journal.resumed_from(1)
        journal.write({"step": 1, "text": "again"})
        journal.close()
        assert [(row["step"], row["text"]) for row in read_journal(path)] == [(0, "fine"), (1, "again")]


def test_a_line_that_is_no_object_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text('{"step": 0, "loss": 1.0}\n[3]\nnull\n')
    assert [row["step"] for row in read_journal(path)] == [0]


def test_a_resume_supersedes_its_step_and_all_later_ones_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path, *({"step": step, "loss": 1.0} for step in range(6)), {"step": 5, "validation_loss": 1.0})
    journal = Journal(path)
    for resumed, loss in ((4, 2.0), (2, 3.0)):
        journal.resumed_from(resumed)
        for step in range(resumed, 6):
            journal.write({"step": step, "loss": loss})
    journal.close()
    assert [(row["step"], row.get("loss")) for row in read_journal(path)] == [
        *((step, 1.0) for step in range(2)),
        *((step, 3.0) for step in range(2, 6)),
    ]


def test_a_journal_can_be_followed_from_where_one_was(tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path, {"step": 0}, {"step": 1})
    rows, offset = read_rows(path)
    assert [row["step"] for row in rows] == [0, 1]
    assert read_rows(path, offset) == ([], offset)
    with path.open("a") as file:
        file.write('{"step": 2}\n{"resumed_from": 1}\n{"step": 1, "ne')
    new, later = read_rows(path, offset)
    assert new == [{"step": 2}, {"resumed_from": 1}]
    assert [row["step"] for row in last_segments(rows + new)] == [0]
    with path.open("a") as file:
        file.write('w": true}\n')
    assert read_rows(path, later)[0] == [{"step": 1, "new": True}]


def test_a_full_disk_is_an_error() -> None:
    journal = Journal(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left"):
        journal.write({"step": 0})


def test_a_writer_that_is_killed_leaves_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "j"
    process = subprocess.Popen([sys.executable, "-c", WRITES_FOREVER, str(path)])
    while not path.exists() or path.stat().st_size < 1_000_000:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    rows = read_journal(path)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert path.read_bytes().count(b"\n") == len(rows) > 100
    write(path, {"step": len(rows)})
    assert len(read_journal(path)) == len(rows) + 1


def test_a_journal_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    replace_journal(path, [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 2.0}])
    assert [row["step"] for row in read_journal(path)] == [0, 1]
    with pytest.raises(TypeError):
        replace_journal(path, [{"step": 7}, {"step": object()}])  # cannot be written
    assert [row["step"] for row in read_journal(path)] == [0, 1]
    assert [*tmp_path.iterdir()] == [path]

"""In the columnar journal, flushed rows survive, resumed rows replace others, and damage is reported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mxstudy.tracking.columnar_journal import ROWS, Columns, ColumnsError, read_columns

S = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "columns"


def values(steps: int, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal((steps, 2, S)).astype(np.float32)
    drawn[::7, 0, 1], drawn[::11, 1, 2] = np.nan, np.inf
    return drawn


def write(folder: Path, written: np.ndarray, chunk: int, start: int = 0) -> None:
    columns = Columns(folder, S, start)
    for first in range(0, len(written), chunk):
        columns.append(written[first : first + chunk])
        if chunk < ROWS:
            columns.flush()


def same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("chunk", [1, 8, ROWS])
def test_every_bit_comes_back(folder: Path, chunk: int) -> None:
    steps = 2 * ROWS if chunk == ROWS else 20
    write(folder, values(steps), chunk)
    assert same(read_columns(folder, S), values(steps))
    assert len(names(folder)) == -(-steps // chunk)


def test_it_is_written_without_a_word_once_there_are_500_steps(folder: Path) -> None:
    columns = Columns(folder, S, 0)
    columns.append(values(499))
    assert names(folder) == []
    columns.append(values(1))
    assert names(folder) == ["steps_00000000.parquet"]
    assert len(read_columns(folder, S)) == 500


def test_a_kill_loses_what_was_not_flushed_and_no_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, values(16), 8)

    def killed(*paths: object) -> None:
        raise SystemExit

    monkeypatch.setattr("os.replace", killed)
    columns = Columns(folder, S, 16)
    columns.append(values(8))
    with pytest.raises(SystemExit):
        columns.flush()
    assert same(read_columns(folder, S), values(16))
    monkeypatch.undo()
    Columns(folder, S, 16)
    assert names(folder) == ["steps_00000000.parquet", "steps_00000008.parquet"]


@pytest.mark.parametrize("start", [0, 3, 8, 11, 16, 20])
def test_what_a_resume_supersedes_is_gone(folder: Path, start: int) -> None:
    before, after = values(20), values(9, seed=1)
    write(folder, before, 8)
    write(folder, after, 4, start)
    assert same(read_columns(folder, S), np.concatenate((before[:start], after)))


def test_nothing_was_written_yet(folder: Path) -> None:
    Columns(folder, S, 0)
    assert read_columns(folder, S).shape == (0, 2, S)
    assert read_columns(folder.parent / "nothing", S).shape == (0, 2, S)


def test_steps_before_the_start_have_to_be_there(folder: Path) -> None:
    write(folder, values(16), 8)
    with pytest.raises(ColumnsError, match="steps 16 to 23 are missing; rerun=true trains them again"):
        Columns(folder, S, 24)


def test_a_gap_is_refused(folder: Path) -> None:
    write(folder, values(24), 8)
    (folder / "steps_00000008.parquet").unlink()
    with pytest.raises(ColumnsError, match=r"steps_00000016\.parquet: steps 8 to 15 before it are missing"):
        read_columns(folder, S)
    with pytest.raises(ColumnsError, match="steps 8 to 15"):
        Columns(folder, S, 24)


def test_another_stack_is_refused(folder: Path) -> None:
    write(folder, values(8), 8)
    with pytest.raises(ColumnsError, match="has 3 replicas, not 4"):
        read_columns(folder, 4)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused(folder: Path, share: float) -> None:
    write(folder, values(ROWS), ROWS)
    path = folder / "steps_00000000.parquet"
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(ColumnsError, match=r"steps_00000000\.parquet: truncated or corrupt .*rerun=true"):
        read_columns(folder, S)


def test_no_flipped_bit_goes_unnoticed(folder: Path) -> None:
    """One bit in every 97 bytes is flipped. The file is refused, or what is read is what was written."""
    write(folder, values(ROWS), ROWS)
    path = folder / "steps_00000000.parquet"
    whole, refused = path.read_bytes(), 0
    for place in range(0, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert same(read_columns(folder, S), values(ROWS)), place
        except ColumnsError:
            refused += 1
    assert refused > 0.9 * len(range(0, len(whole) - 2000, 97))  # nobody reads some parts of the footer

"""A real command that is killed in the middle of a window and started again notices the same spikes."""

from __future__ import annotations

import errno
import signal
from pathlib import Path

import pandas as pd
import pytest
from commands import ONE_BLOCK, TINY, Fault, killed_at, run, the_run

from mxstudy.results import load
from mxstudy.train.checkpoint import PINNED

pytestmark = pytest.mark.slow

COMMAND = (
    *(*TINY, *ONE_BLOCK, "precision=mxfp8", "norm=mxnorm_p2", "train.steps=24", "checkpoint.every_steps=4"),
    *("checkpoint.keep_last=1", "probe=spike_hunt", "probe.spikes.window_steps=3", "probe.spikes.threshold=0.2"),
    "probe.outlier_features.ring_steps=8",
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cache: str) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    code, said = run(folder, *COMMAND, cache)
    assert code == 0, said
    return the_run(folder)


def spikes(folder: Path) -> pd.DataFrame:
    return load([folder], "spikes").drop(columns=["fingerprint", "label"])


def pinned(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob(f"checkpoints/*/{PINNED}"))


def test_each_spike_names_the_checkpoint_before_it_which_stays(undisturbed: Path) -> None:
    frame = spikes(undisturbed)
    before = [f"step_{step // 4 * 4:08d}" if step >= 4 else None for step in frame["step"]]
    assert frame["checkpoint"].tolist() == before
    assert (frame["loss"] > frame["mean"] + 0.2 * frame["std"]).all()
    assert pinned(undisturbed) == sorted(set(before))
    kept = sorted(path.name for path in (undisturbed / "checkpoints").iterdir())
    assert kept == sorted({*before, "step_00000024"})


def test_each_spike_has_its_ring(undisturbed: Path) -> None:
    rings = load([undisturbed], "spike_rings")
    frame = spikes(undisturbed)
    assert rings["spike"].unique().tolist() == frame["step"].tolist()
    for spike, rows in rings.groupby("spike"):
        last = spike + 2 if spike + 2 < 24 else spike  # a quarter of the ring follows if the run continues for so long
        assert rows["step"].unique().tolist() == list(range(max(0, last - 7), last + 1))
        assert set(rows["absmax"].map(len)) == {64}
        assert len(rows["norm"].unique()) == 3


def test_killed_and_resumed_it_notices_the_same_spikes(tmp_path: Path, cache: str, undisturbed: Path) -> None:
    for step in (10, 19):
        fault = killed_at(rf'os\.write .*"step": {step}, "tokens"')
        assert run(tmp_path, *COMMAND, cache, fault=fault)[0] == -signal.SIGKILL
    code, said = run(tmp_path, *COMMAND, cache)
    assert code == 0, said
    folder = the_run(tmp_path)
    pd.testing.assert_frame_equal(spikes(folder), spikes(undisturbed))
    assert pinned(folder) == pinned(undisturbed)
    ours, theirs = load([folder], "spike_rings"), load([undisturbed], "spike_rings")
    key = ["spike", "step", "norm"]
    both = ours.merge(theirs, on=key, suffixes=("", "_undisturbed"))
    assert len(both) == len(ours) < len(theirs)  # what was in the memory of a killed process is lost
    assert (both["absmax"] == both["absmax_undisturbed"]).all()


def test_a_disk_that_is_full_for_the_ring_ends_nothing(tmp_path: Path, cache: str, undisturbed: Path) -> None:
    code, said = run(tmp_path, *COMMAND, cache, fault=Fault(r"open .*/spikes/\.step_", errno=errno.ENOSPC))
    assert code == 0, said
    frame = spikes(the_run(tmp_path))
    assert frame["ring"].isna().all()
    assert frame["ring_error"].str.contains("No space left on device").all()
    kept = [column for column in spikes(undisturbed) if column != "ring"]
    pd.testing.assert_frame_equal(frame[kept], spikes(undisturbed)[kept])

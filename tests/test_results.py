"""Journals become frames, and a Parquet table gives the same frames."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from pandas.testing import assert_frame_equal
from tracked import make_folder, training_row, write_rows

from mxstudy.launch.select import select
from mxstudy.probes.spikes import spike_score
from mxstudy.reader import ConfigError
from mxstudy.results import (
    folders_of,
    load,
    load_metrics,
    load_probe,
    load_runs,
    load_validations,
    markdown,
    mixed_code,
    plus_minus,
    read_table,
    smoothed,
    with_arms,
    write_table,
)
from mxstudy.tracking.folder import RunFolder, RunStatus

NAMES = {"a" * 12: "norm=rmsnorm", "b" * 12: "norm=mxnorm_p2"}


@pytest.fixture
def folders(tmp_path: Path) -> list[RunFolder]:
    made = [make_folder(tmp_path, name + "0" * 52, label) for name, label in NAMES.items()]
    for folder in made:
        write_rows(folder, [{"step": 0, "precision": [["all", "mxfp8"]], "unigram_entropy_nats": 3.5}])
        write_rows(folder, [training_row(step) | {"tokens_per_s": 10.0 * step} for step in range(6)])
        write_rows(folder, [{"step": 5, "validation_loss": 4.25}])
        write_rows(folder, [training_row(6), training_row(6, loss=9.0)])
        write_rows(folder, [training_row(6), training_row(7)], resumed_from=6)
        write_rows(folder, [{"step": 7, "validation_loss": 4.5}])
        values = {"norm/rms": 0.9, "norm/input": [1, 2, 3]}
        write_rows(folder, [{"step": 7, "probe": "histograms", "values": values}])
        folder.update(state="finished", step=8, steps=8, mlflow_run_id=f"run of {folder.path.name}")
    return made


def test_a_row_a_run(folders: list[RunFolder]) -> None:
    runs = load_runs(folders)
    assert list(runs["label"]) == list(NAMES.values())
    first = runs.iloc[0]
    assert (first["fingerprint"], first["folder"]) == ("a" * 12 + "0" * 52, str(folders[0].path))
    assert (first["state"], first["step"], first["mlflow_run_id"]) == ("finished", 8, "run of aaaaaaaaaaaa")
    assert (first["loss"], first["validation_loss"], first["best_validation_loss"]) == (5.0 - 0.1 * 7, 4.5, 4.25)
    assert (first["unigram_entropy_nats"], first["tokens_per_s"]) == (3.5, 35.0)
    assert first["spike_score"] == spike_score([5.0 - 0.1 * step for step in range(8)])
    assert not first["spike_score_cut"]
    assert (first["choice.norm"], first["config.norm.kind"], first["config.optimizer.lr"]) == (
        "rmsnorm",
        "mxnorm",
        1e-3,
    )


def test_a_run_without_a_journal_has_no_numbers(tmp_path: Path, folders: list[RunFolder]) -> None:
    queued = make_folder(tmp_path, "c" * 64)
    run = load_runs([*folders, queued]).iloc[-1]
    assert run["state"] == "queued"
    assert all(math.isnan(run[name]) for name in ("loss", "validation_loss", "best_validation_loss", "tokens_per_s"))
    assert len(load_metrics([*folders, queued])) == 16


def test_a_divergence_is_flagged(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    write_rows(folder, [training_row(0), training_row(1, loss=math.nan)])
    folder.update(state="diverged")
    run = load_runs([folder]).iloc[0]
    assert (run["state"], run["spike_score_cut"], run["spikes"]) == ("diverged", True, 1)
    assert math.isnan(run["loss"])


@pytest.mark.parametrize("state", ["running", "diverged", "failed"])
def test_only_a_finished_run_has_a_final_validation_loss(state: RunStatus, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    write_rows(folder, [training_row(0), {"step": 0, "validation_loss": 4.5}])
    folder.update(state=state)
    run = load_runs([folder]).iloc[0]
    assert math.isnan(run["validation_loss"])
    assert run["best_validation_loss"] == 4.5


def test_metrics_are_each_steps_last_segment(folders: list[RunFolder]) -> None:
    metrics = load_metrics(folders)
    assert list(metrics["step"]) == [*range(8)] * 2
    assert list(metrics["loss"][:8]) == [5.0 - 0.1 * step for step in range(8)]
    assert list(metrics["tokens"][:8]) == [32 * (step + 1) for step in range(8)]
    assert metrics.groupby("fingerprint", sort=False)["label"].first().tolist() == list(NAMES.values())
    assert list(load_validations(folders[:1])["validation_loss"]) == [4.25, 4.5]


def test_a_probe_has_its_values_as_columns(folders: list[RunFolder]) -> None:
    frame = load_probe(folders, "histograms")
    assert list(frame["step"]) == [7, 7]
    assert list(frame["norm/rms"]) == [0.9, 0.9]
    assert frame["norm/input"][0] == [1, 2, 3]
    assert load_probe(folders, "another").empty


def test_a_table_gives_the_same_frame_and_says_where_it_came_from(tmp_path: Path, folders: list[RunFolder]) -> None:
    origin = {"commit": "abc", "command": "python -m mxstudy +sweep=quickstart"}
    frames = {"runs": load_runs(folders), "metrics": load_metrics(folders)}
    for name, frame in frames.items():
        write_table(frame, tmp_path / f"{name}.parquet", origin)
        again, provenance = read_table(tmp_path / f"{name}.parquet")
        assert provenance == origin
        assert_frame_equal(again, frame, check_dtype=False)
    probe = load_probe(folders, "histograms")
    write_table(probe, tmp_path / "probe.parquet", origin)
    again = read_table(tmp_path / "probe.parquet")[0]
    assert [list(counts) for counts in again["norm/input"]] == [[1, 2, 3]] * 2
    both = load([tmp_path / "metrics.parquet", folders[0].path], "metrics")
    assert_frame_equal(both, pd.concat([frames["metrics"], frames["metrics"][:8]], ignore_index=True))
    (tmp_path / "metrics.parquet").rename(tmp_path / "quick_metrics.parquet")
    assert_frame_equal(load([tmp_path / "quick_metrics.parquet"], "metrics"), load([tmp_path / "quick"], "metrics"))


def test_a_column_of_words_and_numbers_comes_back(tmp_path: Path) -> None:
    """A column of words and numbers is read back as it was written.

    `precision.skip_blocks` is such a column: runs of one table have 0, tail, or two numbers in columns of their own.
    """
    frame = pd.DataFrame(
        {"config.precision.skip_blocks": [0, "tail", None], "config.precision.gain": [None, "mx", None]}
    )
    write_table(frame, tmp_path / "runs.parquet", {})
    again = read_table(tmp_path / "runs.parquet")[0]
    assert_frame_equal(again, frame, check_dtype=False)
    assert (again["config.precision.skip_blocks"] == 0).tolist() == [True, False, False]


def test_configs_of_all_runs_are_one_column_of_the_file(tmp_path: Path) -> None:
    keys = {"config.seed": [0, 1], "config.norm.p": [2.0, math.nan], "config.optimizer.betas.0": [0.9, 0.95]}
    frame = pd.DataFrame({"label": ["a", "b"]} | keys | {"loss": [3.5, 3.25]})
    write_table(frame, tmp_path / "runs.parquet", {})
    assert pq.read_schema(tmp_path / "runs.parquet").names == ["label", "config", "loss"]
    assert_frame_equal(read_table(tmp_path / "runs.parquet")[0], frame)


def test_keys_of_later_runs_and_a_replicas_own_are_read_again(tmp_path: Path) -> None:
    later = pd.DataFrame([{"config.x": 1, "loss": 2.0}, {"config.x": 1, "loss": 3.0, "config.norm.p": 2.0}])
    stack = pd.DataFrame({"config.x": [1, 1], "replica": [0, 1], "config.seed": [4, 5], "loss": [2.0, 3.0]})
    none = later[:0]
    for frame, names in ((later, ["config", "loss"]), (stack, ["config", "replica", "config.seed", "loss"])):
        write_table(frame, tmp_path / "runs.parquet", {})
        assert pq.read_schema(tmp_path / "runs.parquet").names == names
        assert_frame_equal(read_table(tmp_path / "runs.parquet")[0], frame, check_like=True)
    write_table(none, tmp_path / "runs.parquet", {})
    assert list(read_table(tmp_path / "runs.parquet")[0]) == list(none)


def test_a_column_that_is_called_config_is_another_one(tmp_path: Path) -> None:
    frame = pd.DataFrame({"config": ["1", "two"], "loss": [2.0, 3.0]})
    write_table(frame, tmp_path / "probe.parquet", {})
    assert_frame_equal(read_table(tmp_path / "probe.parquet")[0], frame)
    with pytest.raises(ConfigError, match=r"a column config beside columns such as config\.x"):
        write_table(frame.assign(**{"config.x": 1}), tmp_path / "probe.parquet", {})


def test_a_probes_numbers_are_a_list_in_each_row_of_the_file(tmp_path: Path) -> None:
    numbers = {"layers.0.w2/sqnr_db": [18.5, math.nan], "layers.1.w2/sqnr_db": [math.inf, -0.0]}
    frame = pd.DataFrame({"step": [0, 200]} | {name: np.float32(values) for name, values in numbers.items()})
    frame["model/cost_ms"] = [1.1, 2.2]  # in double precision
    write_table(frame, tmp_path / "probe.parquet", {})
    assert pq.read_schema(tmp_path / "probe.parquet").names == ["step", "names", "values", "model/cost_ms"]
    again = read_table(tmp_path / "probe.parquet")[0]
    assert_frame_equal(again, frame, check_exact=True)
    assert np.signbit(again["layers.1.w2/sqnr_db"][1])
    write_table(pd.concat([frame] * 501), tmp_path / "long.parquet", {})
    assert pq.read_schema(tmp_path / "long.parquet").names == list(frame)
    for taken in ("names", "values"):
        with pytest.raises(ConfigError, match=f"a column {taken} beside columns such as layers.0.w2/sqnr_db"):
            write_table(frame.assign(**{taken: 1}), tmp_path / "probe.parquet", {})


def test_a_path_is_a_folder_of_runs_or_what_tables_begin_with(tmp_path: Path, folders: list[RunFolder]) -> None:
    write_table(load_probe(folders, "histograms"), tmp_path / "kept_histograms.parquet", {})
    assert list(load([tmp_path / "kept"], "histograms")["step"]) == [7, 7]
    assert list(load([folders[0].path.parent], "histograms")["step"]) == [7, 7]
    assert list(load([folders[0].path], "validation")["validation_loss"]) == [4.25, 4.5]
    with pytest.raises(ConfigError, match="kept: has no runs"):
        load([tmp_path / "kept"], "runs")
    with pytest.raises(ConfigError, match="has any outliers; was the probe on"):
        load([folders[0].path], "outliers")
    (folders[0].path / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"has any metrics; is its journal, metrics\.jsonl, still there\?"):
        load([folders[0].path], "metrics")


def test_a_table_is_compact(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    write_rows(folder, [training_row(step, loss=2 + math.sin(step)) for step in range(5000)])
    write_table(load_metrics([folder]), tmp_path / "t.parquet", {})
    assert (tmp_path / "t.parquet").stat().st_size < 40 * 5000


def test_runs_are_taken_from_any_level_of_folder(tmp_path: Path, folders: list[RunFolder]) -> None:
    aside = make_folder(tmp_path, "c" * 64)
    aside.path.rename(folders[0].path.with_name(f"{folders[0].path.name}.old-1"))
    assert folders_of([tmp_path]) == folders_of([tmp_path / "quick"]) == folders
    assert folders_of([folders[1].path, str(folders[0].path)]) == folders[::-1]
    with pytest.raises(ConfigError, match="nothing: has no runs; give a run's folder"):
        folders_of([tmp_path, tmp_path / "nothing"])


def test_a_run_in_two_folders_is_refused_because_it_would_count_twice(folders: list[RunFolder]) -> None:
    first = folders[0].path
    runs_dir = first.parent.parent
    shutil.copytree(first, runs_dir / "copied" / first.name)
    for path in (runs_dir, first.parent):
        with pytest.raises(ConfigError, match=f"{first.name} are one run; move one of them out of {runs_dir}/$"):
            folders_of([path])
    assert [run.path for run in folders_of([first])] == [first]


def test_who_has_only_rehearsals_is_told_where_they_are(tmp_path: Path, trained: RunFolder) -> None:
    (tmp_path / "rehearsals").symlink_to(trained.path.parents[1])
    there = f" but rehearsals, in {tmp_path}/rehearsals/"
    with pytest.raises(ConfigError, match=f"^{tmp_path}: has no runs{there}; give a run's folder"):
        folders_of([tmp_path])
    name = trained.path.parent.name
    with pytest.raises(ConfigError, match=f"^{tmp_path}/{name}: has no runs{there}{name}/; give a run's folder"):
        folders_of([tmp_path / name])
    with pytest.raises(ConfigError, match=f"^runs_dir: there are no runs in {tmp_path}/{there}$"):
        select([], tmp_path)


def test_a_cell_has_its_standard_error_where_there_is_one() -> None:
    assert plus_minus(50.0, 2.54, ".1f") == "50.0 +- 2.5"
    assert plus_minus(50.0, math.nan, ".1f") == "50.0"


def test_columns_of_words_are_left_of_their_column() -> None:
    rows = [("bf16", 1), ("mxfp8", "-")]
    assert markdown(["arm", "loss"], rows, left=["arm"]) == "| arm | loss |\n|---|---:|\n| bf16 | 1 |\n| mxfp8 | - |"


def test_a_hundredth_of_the_losses_is_the_half_life_of_their_mean() -> None:
    step = pd.Series([0.0] * 500 + [1.0] * 500)
    assert smoothed(step)[509] == pytest.approx(0.5)  # 10 losses after the step


def test_on_which_backends_a_run_ran(tmp_path: Path) -> None:
    """A run that is older than this field has null, in the table as well."""
    old, new = (make_folder(tmp_path, name + "0" * 52, label) for name, label in NAMES.items())
    new.set_provenance(new.provenance() | {"backend": "fused, reference"})
    runs = load_runs([old, new])
    write_table(runs, tmp_path / "two_runs.parquet", {})
    for frame in (runs, load([tmp_path / "two"], "runs")):
        assert frame["backend"].isna().tolist() == [True, False]
        assert frame["backend"].iloc[1] == "fused, reference"


@pytest.mark.filterwarnings("error")
def test_a_wide_frame_is_sorted_into_arms_without_a_word() -> None:
    """The frame has recipes with all their fields, with numbers between words."""
    runs = pd.DataFrame([{f"config.k{i}": "text" if i % 3 else 1.0 for i in range(500)}])
    assert len(with_arms(runs, {"precision": "nvfp4"})) == 1


def test_two_runs_of_one_fingerprint_and_different_code_are_told_apart() -> None:
    replica = {"fingerprint": "f", "commit": "1", "code": "a", "torch": "2.11.0", "config.study": "students"}
    one = pd.DataFrame([replica | {"replica": number} for number in range(3)])
    assert mixed_code(pd.concat([one, one])) is None  # as in two tables that share a baseline
    assert mixed_code(pd.concat([one, one.assign(commit="2")])) is None  # its docstrings changed
    assert "(code a in 1 run, b in 1 run)" in str(mixed_code(pd.concat([one, one.assign(code="b")])))
    assert "(torch 2.11.0 in 1 run, 2.13.0 in 1 run)" in str(mixed_code(pd.concat([one, one.assign(torch="2.13.0")])))
    unknown = one.assign(code="unknown")
    assert mixed_code(unknown) is None  # one run is compared with nothing
    assert "(code unknown in 2 runs)" in str(mixed_code(pd.concat([unknown, unknown.assign(commit="2")])))

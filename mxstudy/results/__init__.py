"""Load runs as DataFrames; this is the only package of mxstudy that analysis/ may import.

The rows come from run folders, or from the compact Parquet tables of results/ that were made from them; the frames are
the same. Each replica of a stack counts as one run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pandas as pd

from mxstudy.config import AnyRun, StudentTeacher
from mxstudy.config.deciding import cosmetic_columns as cosmetic_columns
from mxstudy.evaluation.paired import Difference as Difference
from mxstudy.evaluation.paired import difference as difference
from mxstudy.probes.fractions import Fraction as Fraction
from mxstudy.probes.fractions import fraction as fraction
from mxstudy.probes.histogram_bins import bin_edges as bin_edges
from mxstudy.probes.names import probe_names
from mxstudy.probes.ring_file import read_ring
from mxstudy.probes.spikes import count_spikes, is_cut, spike_score
from mxstudy.reader import ConfigError as ConfigError
from mxstudy.reader import flatten, plain
from mxstudy.reader import one_line as one_line
from mxstudy.results.cells import markdown as markdown
from mxstudy.results.cells import plus_minus as plus_minus
from mxstudy.results.curves import HALF_LIFE as HALF_LIFE
from mxstudy.results.curves import curves_of as curves_of
from mxstudy.results.curves import draw_arm as draw_arm
from mxstudy.results.curves import smoothed as smoothed
from mxstudy.results.estimates import Estimate as Estimate
from mxstudy.results.estimates import estimate as estimate
from mxstudy.results.mixed_code import mixed_code as mixed_code
from mxstudy.results.mixed_code import shared_fingerprint as shared_fingerprint
from mxstudy.results.mixed_code import with_code
from mxstudy.results.panels import draw_arms as draw_arms
from mxstudy.results.panels import in_tokens as in_tokens
from mxstudy.results.panels import legend as legend
from mxstudy.results.panels import save_figure as save_figure
from mxstudy.results.run_arms import arm_rows as arm_rows
from mxstudy.results.run_arms import with_arms as with_arms
from mxstudy.results.stacks import STACK_PROBES as STACK_PROBES
from mxstudy.results.stacks import replica_metrics, replica_probe, replica_rows
from mxstudy.results.tables import read_benchmark
from mxstudy.results.tables import read_table as read_table
from mxstudy.results.tables import write_table as write_table
from mxstudy.tracking.arm_colors import KNOWN as KNOWN
from mxstudy.tracking.arm_colors import OTHERS as OTHERS
from mxstudy.tracking.arm_colors import SHADES as SHADES
from mxstudy.tracking.arm_colors import shaded as shaded
from mxstudy.tracking.code import code_in
from mxstudy.tracking.fetch import SCHEME, fetch
from mxstudy.tracking.folder import REHEARSALS as REHEARSALS
from mxstudy.tracking.folder import RunFolder as RunFolder
from mxstudy.tracking.found_runs import find_runs, none_but_rehearsals, runs_of
from mxstudy.tracking.journal import Row, read_journal
from mxstudy.tracking.mixed_backends import backends_in
from mxstudy.tracking.mixed_backends import different_backends as different_backends

PROBES = probe_names()
STARTS = ("unigram_entropy_nats", "parameters")  # values that a run records once, when it starts
BENCHMARK = "benchmark"  # the kind of rows that are measured without a run
SAMPLES = "samples_"  # prefix of the tables of an evaluation's answers, one table per task and form


class NoRows(ConfigError):
    """Raised if no run in these paths has rows of that kind."""


def folders_of(paths: Iterable[Path | str]) -> list[RunFolder]:
    """Return the run folders of all paths, those of one path in the order in which the runs were started.

    Each path is the folder of a run, or of all experiments, runs/; or runs/NAME, which gives every run that the sweep
    (or else the experiment) NAME asked for, in whichever folder it lies, under the label that it has there; or
    mlflow:NAME, which gives the same from MLflow. Raises NoRows if a path has no run.
    """
    found: list[RunFolder] = []
    for path in map(str, paths):
        inside = fetch(path.removeprefix(SCHEME)) if path.startswith(SCHEME) else runs_in(Path(path))
        if not inside:
            where = f"runs/ or runs/NAME of an experiment or sweep, or {SCHEME}NAME"
            raise NoRows(f"{path}: has no runs{none_but_rehearsals(Path(path))}; give a run's folder, {where}")
        found += sorted(inside, key=lambda run: run.status().started_s)
    return found


def has_rehearsals(paths: Iterable[Path | str]) -> bool:
    """Return whether a run in these folders is a rehearsal, or a path is the experiment of rehearsals in MLflow."""
    folders = [Path(path) for path in paths]
    of_mlflow = Path(f"{SCHEME}{REHEARSALS}")
    return any(path == of_mlflow or any(run.is_rehearsal for run in runs_in(path)) for path in folders)


def runs_in(path: Path) -> list[RunFolder]:
    """Return the runs of a path; a run that is being trained again is returned as the run that it will replace."""
    return _look.get()(path)


def look_for_runs(path: Path) -> list[RunFolder]:
    if (path / "status.json").exists():
        return [RunFolder(path)]
    # runs/, else runs/NAME, else a folder of runs that is not in runs/, such as a copy
    found = find_runs(path) or runs_of(find_runs(path.parent), path.name) or find_runs(path, "*")
    return [run.with_result() for run in each_once(found)]


def each_once(runs: list[RunFolder]) -> list[RunFolder]:
    """Return the runs. Raises ConfigError if one lies in two folders, because each of its numbers would count twice."""
    first: dict[str, RunFolder] = {}
    for run in runs:
        other = first.setdefault(run.own_path.name, run)
        if other is not run:
            raise ConfigError(
                f"{other.path} and {run.path} are one run; move one of them out of {run.path.parents[1]}/"
            )
    return runs


_look: ContextVar[Callable[[Path], list[RunFolder]]] = ContextVar("look", default=look_for_runs)


@contextmanager
def one_look() -> Iterator[None]:
    """Look for the runs of each path only once within the block, so that all frames have the same runs."""
    token = _look.set(functools.cache(look_for_runs))
    try:
        yield
    finally:
        _look.reset(token)


def load(paths: Sequence[Path | str], kind: str) -> pd.DataFrame:
    """Return the rows of one kind: runs, metrics, validation, or the name of a probe or of a study's table.

    A path is as in `folders_of`, or a .parquet file of `write_table`, or the prefix of files in results/: results/NAME
    stands for results/NAME_<kind>.parquet, or for results/NAME.json if the kind is "benchmark". Raises NoRows if there
    are no such rows, and ConfigError for a file that cannot be read.
    """
    frames = [read_file(table) if (table := table_of(path, kind)) else rows_of_kind(path, kind) for path in paths]
    frame = pd.concat(frames, ignore_index=True)
    if not len(frame):
        why = "is its journal, metrics.jsonl, still there?" if kind == "metrics" else "was the probe on?"
        raise NoRows(f"{', '.join(map(str, paths))}: no run there has any {kind}; {why}")
    return frame


def table_of(path: Path | str, kind: str) -> Path | None:
    """Return the table file that a path stands for, or None if it stands for a folder of runs."""
    path = Path(path)
    of_kind, suffix = ("", ".json") if kind == BENCHMARK else (f"_{kind}", ".parquet")
    table = path if path.suffix == suffix else path.with_name(f"{path.name}{of_kind}{suffix}")
    return table if table.exists() else None


def read_file(table: Path) -> pd.DataFrame:
    return read_benchmark(table) if table.suffix == ".json" else with_code(read_table(table)[0])


def load_code(paths: Sequence[Path | str]) -> pd.DataFrame:
    """Return the columns of each run that `mixed_code` reads; a path is as in `load`, and one without runs adds none.

    It reads no journal, so a figure of any kind of rows can name the code of its runs.
    """
    frames = []
    for path in paths:
        with suppress(NoRows):
            table = table_of(path, "runs")
            frames.append(
                read_file(table)
                if table
                else pd.DataFrame([about_row(f, {"study": f.config().study}) for f in folders_of([path])])
            )
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["fingerprint"])


def rows_of_kind(path: Path | str, kind: str) -> pd.DataFrame:
    folders = folders_of([path])
    if kind in KINDS:
        return KINDS[kind](folders)
    probe = load_probe(folders, kind)
    return probe if len(probe) else load_table(folders, kind)


def load_runs(folders: Sequence[RunFolder]) -> pd.DataFrame:
    """Return one row per run: identity, state, final figures, and its config as columns `config.<dotted key>`."""
    return pd.DataFrame([row for folder in folders for row in run_rows(folder)])


def run_rows(folder: RunFolder) -> list[dict[str, Any]]:
    config = folder.config()
    if isinstance(config, StudentTeacher):
        shared = {key: value for key, value in config_of(folder, config).items() if key not in ("seeds", "lrs")}
        return replica_rows(folder, config, about_row(folder, flatten(shared)))
    return [run_row(folder, config)]


def config_of(folder: RunFolder, config: AnyRun) -> dict[str, Any]:
    """Return a run's config as plain data, with experiment and baseline of the sweep that asked for it."""
    return plain(config) | folder.membership().in_config


def run_row(folder: RunFolder, config: AnyRun) -> dict[str, Any]:
    rows = rows_of(folder)
    steps = [row for row in rows if "loss" in row]
    losses = [row["loss"] for row in steps]
    validations = pd.Series([row["validation_loss"] for row in rows if "validation_loss" in row], dtype=float)
    is_finished = folder.status().state == "finished"  # else the last validation is of an earlier step
    figures = {
        "loss": losses[-1] if losses else math.nan,
        "validation_loss": validations.iloc[-1] if is_finished and len(validations) else math.nan,
        "best_validation_loss": validations.min(),
        **{key: next((row[key] for row in rows if key in row), math.nan) for key in STARTS},
        "spike_score": spike_score(losses),
        "spike_score_cut": is_cut(losses),
        "spikes": count_spikes(losses),
        "tokens_per_s": pd.Series([row["tokens_per_s"] for row in steps], dtype=float).median(),
        "mfu": pd.Series([row.get("mfu") for row in steps], dtype=float).median(),
        "memory_gib": pd.Series([row.get("memory_gib") for row in steps], dtype=float).max(),
    }
    return about_row(folder, flatten(config_of(folder, config))) | figures


def about_row(folder: RunFolder, config: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a run that need no journal."""
    status, about, asked = folder.status(), folder.provenance(), folder.membership()
    return {
        "fingerprint": status.fingerprint,
        "label": asked.label,
        "state": status.state,
        "step": status.step,
        "mlflow_run_id": status.mlflow_run_id,
        "folder": str(folder.path),
        "backend": backends_in(about),
        "code": code_in(about, str(config["study"])),
        **{key: about.get(key) for key in ("commit", "dirty", "torch", "triton", "gpu", "command")},
        **{f"choice.{group}": choice for group, choice in asked.choices.items()},
        **{f"config.{key}": value for key, value in config.items()},
    }


def rows_of(folder: RunFolder) -> list[Row]:
    return read_journal(folder.journal_path) if folder.journal_path.exists() else []  # a queued run has no journal yet


def load_metrics(folders: Sequence[RunFolder]) -> pd.DataFrame:
    """Return one row per run and training step: fingerprint, label, step, tokens, loss, lr, grad_norm, ...

    Replicas of a stack have fingerprint, label, replica, seed, step, and loss and grad_norm as float32.
    """
    journals = _frame(folders, lambda row: row if "loss" in row else None)
    return concatenate([journals, *(replica_metrics(folder) for folder in folders if folder.columns.is_dir())])


def load_validations(folders: Sequence[RunFolder]) -> pd.DataFrame:
    """Return one row per run and validation: fingerprint, label, step, validation_loss."""
    return _frame(folders, lambda row: row if "validation_loss" in row else None)


def load_spikes(folders: Sequence[RunFolder]) -> pd.DataFrame:
    """Return one row per spike that the spike watch noticed: fingerprint, label, step, loss, mean, std, ring, ..."""
    return _frame(folders, lambda row: {"step": row["step"]} | row["spike"] if "spike" in row else None)


def load_spike_rings(folders: Sequence[RunFolder]) -> pd.DataFrame:
    """Return one row per norm and step around each spike: fingerprint, label, spike step, step, norm, absmax [size]."""
    rows: list[dict[str, Any]] = []
    for folder in folders:
        for spike in load_spikes([folder]).to_dict("records"):
            if spike["ring"]:
                about = {key: spike[key] for key in ("fingerprint", "label")} | {"spike": spike["step"]}
                steps, norms = read_ring(folder.path / spike["ring"])
                rows += [
                    about | {"step": step, "norm": norm, "absmax": absmax_D.tolist()}
                    for norm, absmax_SD in norms.items()
                    for step, absmax_D in zip(steps, absmax_SD, strict=True)
                ]
    return pd.DataFrame(rows)


def load_samples(folders: Sequence[RunFolder]) -> pd.DataFrame:
    """Return one row per evaluated question: fingerprint, label, task, form, group, document, gold, nats, ..."""
    frames = [load_table(folders, name) for name in table_names(folders) if name.startswith(SAMPLES)]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def load_evaluations(folders: Sequence[RunFolder]) -> pd.DataFrame:
    """Return one row per evaluation during a training: fingerprint, label, step, and TASK.FORM/score and others."""
    return load_probe(folders, "evaluation")


def load_texts(folders: Sequence[RunFolder]) -> pd.DataFrame:
    """Return one row per text that a model wrote, in training or afterwards: fingerprint, label, prompt, text, ..."""
    written = [
        {"fingerprint": folder.status().fingerprint, "label": folder.label, "step": row["step"]} | text
        for folder in folders
        for row in rows_of(folder)
        for text in row.get("texts", ())
    ]
    return concatenate([pd.DataFrame(written), load_table(folders, "texts")])


KINDS: dict[str, Callable[[Sequence[RunFolder]], pd.DataFrame]] = {
    "runs": load_runs,
    "metrics": load_metrics,
    "validation": load_validations,
    "spikes": load_spikes,
    "spike_rings": load_spike_rings,
    "samples": load_samples,
    "evaluation": load_evaluations,
    "texts": load_texts,
}


def load_probe(folders: Sequence[RunFolder], name: str) -> pd.DataFrame:
    """Return one row per measurement of a probe, and per replica of a stack: fingerprint, label, step, its values."""
    stacks = [folder for folder in folders if folder.columns.is_dir() and name in STACK_PROBES]
    single = [folder for folder in folders if folder not in stacks]
    frames = [_frame(single, lambda row: {"step": row["step"]} | row["values"] if row.get("probe") == name else None)]
    frames += [replica_probe(f, [row for row in rows_of(f) if row.get("probe") == name]) for f in stacks]
    return concatenate(frames)


def load_table(folders: Sequence[RunFolder], name: str) -> pd.DataFrame:
    """Return the rows of a study's table of that name, each with fingerprint and label of its run."""
    frames = []
    for folder in folders:
        path = table_path(folder, name)
        if path.exists():
            identity = {"fingerprint": folder.status().fingerprint, "label": folder.label}
            frames.append(read_table(path)[0].assign(**identity))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def table_names(folders: Sequence[RunFolder]) -> list[str]:
    """Return the names of all tables that studies wrote in these folders, sorted."""
    return sorted({path.stem for folder in folders for path in (folder.path / "tables").glob("*.parquet")})


def table_path(folder: RunFolder, name: str) -> Path:
    return folder.path / "tables" / f"{name}.parquet"


def save_table(folder: RunFolder, name: str, frame: pd.DataFrame) -> None:
    """Write a study's table atomically, with the run's provenance in the file's metadata."""
    path = table_path(folder, name)
    path.parent.mkdir(exist_ok=True)
    write_table(frame, path, folder.provenance())


def concatenate(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of all frames that have any, one frame below the other."""
    filled = [frame for frame in frames if len(frame)]
    return pd.concat(filled, ignore_index=True) if filled else pd.DataFrame()


def _frame(folders: Sequence[RunFolder], select: Callable[[Row], Row | None]) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for folder in folders:
        identity = {"fingerprint": folder.status().fingerprint, "label": folder.label}
        selected = (select(row) for row in rows_of(folder))
        rows += [identity | row for row in selected if row is not None]
    return pd.DataFrame(rows)

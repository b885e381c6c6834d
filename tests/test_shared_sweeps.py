"""All sweeps are valid, and share one runs_dir, in two orders: each finds all of its runs, and every figure is drawn.

Nothing is trained. Three runs are rehearsed, one of each kind with all probes, and a sweep's run is made from the rows
of one of them.
"""

from __future__ import annotations

import functools
import importlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from commands import run_here
from composing import compose, covering
from figure_rules import check_saved
from fingerprints import fingerprint_of, recorded

from analysis.figures import FIGURES, Figure
from mxstudy import results
from mxstudy.compat import hydra
from mxstudy.compat.hydra import Remembered
from mxstudy.config import read_run
from mxstudy.help.group_choices import groups
from mxstudy.launch import inline, plan, sweep
from mxstudy.launch.composed import Composed
from mxstudy.reader import ConfigError
from mxstudy.studies import study_of
from mxstudy.studies.protocol import Study, Watched
from mxstudy.tracking import memberships, unchanged
from mxstudy.tracking.columnar_journal import Columns
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.found_runs import find_runs
from mxstudy.tracking.journal import read_journal
from mxstudy.tracking.memberships import Membership
from mxstudy.tracking.mlflow_parent import Summary

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ORDERS = ("forth", "back")
TEMPLATES = {  # {study: the commands of runs that have the rows of all its probes}
    "pretrain": ("+experiment=spike_proxy probe=all",),
    "student_teacher": ("+experiment=overflow", "+experiment=gradient_bias"),
    "fork": ("+experiment=interventions",),
}
STEPS, LOST = 640, 100  # steps of a made stack, and the step at which one of its replicas diverges
OF_SWEEPS = [figure for figure in FIGURES if "+sweep=" in figure.command and "+experiment=" not in figure.command]
SWEEPS = groups()["sweep"]
ASKED = sorted(  # every sweep as it stands, and with what figures need beside it, without runs that a user names
    {f"+sweep={name}" for name in SWEEPS}
    | {
        " ".join(word for word in part.split()[3:] if "FINGERPRINT" not in word)
        for figure in OF_SWEEPS
        for part in figure.command.split(" && ")
    }
)


class Copied(Study[Any]):
    """Replaces all kinds of run, and makes a run from the rows of a template."""

    def __init__(self, templates: dict[str, list[RunFolder]]) -> None:
        self.rows = {
            kind: [row for f in runs for row in read_journal(f.journal_path)] for kind, runs in templates.items()
        }
        self.templates = templates
        self.last = min(row["validation_loss"] for row in self.rows["pretrain"] if "validation_loss" in row)

    def check(self, config: Any, ranks: int = 1) -> None: ...

    def identity(self, config: Any) -> tuple[str, dict[str, Any]]:
        return "cuda", {"parent": getattr(config, "parent", None), "points": str(getattr(config, "fractions", None))}

    def watched(self, config: Any) -> dict[str, Watched]:
        return study_of(config.study).watched(config)

    def check_watched(self, config: Any) -> None:
        study_of(config.study).check_watched(config)

    def newly_on(self, then: Any, now: Any) -> list[str]:
        return study_of(now.study).newly_on(then, now)

    def run(self, config: Any, folder: RunFolder, label: str) -> str:
        rng = np.random.default_rng(int(folder.path.name, 16))
        if config.study == "fork":
            shutil.copytree(self.templates["fork"][0].path / "tables", folder.path / "tables")
        elif config.study == "student_teacher":
            self.write(folder, config, len(config.replicas))
            losses = np.exp(-np.arange(STEPS) / 20)[:, None, None] * rng.uniform(1, 2, (1, 2, len(config.replicas)))
            losses[LOST:, :, 0] = np.nan
            columns = Columns(folder.columns, len(config.replicas), 0)
            columns.append(losses.astype(np.float32))
            columns.flush()
        else:
            size = parameters(config)
            loss = 1.5 + 400 / size**0.34 + 400 / tokens(config) ** 0.28  # so that scaling laws can be fitted
            self.write(folder, config, 1, scale=loss * rng.uniform(0.999, 1.001) / self.last, parameters=size)
        folder.update(state="finished", step=config.train.steps if hasattr(config, "train") else 1)
        return "finished"

    def write(self, folder: RunFolder, config: Any, replicas: int, scale: float = 1.0, **first: Any) -> None:
        on = {key.removeprefix("probe.") for key in probes_of(config)}
        on |= {"coupled_gradient_bias"} if "gradient_bias" in on else set()
        rows = [row for row in self.rows[config.study] if row.get("probe", "replicas") in {*on, "replicas"}]
        lines = [json.dumps(changed(row, replicas, scale) | (first if "parameters" in row else {})) for row in rows]
        folder.journal_path.write_text("\n".join(lines) + "\n")

    def summarise(self, arms: Any, baseline: Any) -> Summary:
        return Summary("")


def parameters(config: Any) -> int:
    return int(
        config.model.vocab_size * config.model.hidden_size + 12 * config.model.num_layers * config.model.hidden_size**2
    )


def tokens(config: Any) -> int:
    return int(config.train.steps * config.train.batch_size * config.train.sequence_length)


def changed(row: dict[str, Any], replicas: int, scale: float) -> dict[str, Any]:
    """Return a template's row with another loss, or with as many values as there are replicas."""
    row = row | {key: row[key] * scale for key in ("loss", "validation_loss") if key in row}
    if replicas > 1 and "probe" in row:
        row = row | {"values": {key: tiled(value, replicas) for key, value in row["values"].items()}}
    return row


def tiled(value: Any, replicas: int) -> Any:
    return [value[number % len(value)] for number in range(replicas)] if isinstance(value, list) else value


class Kept(Remembered):
    """Keeps every config file that was read for all later commands, because no file changes while the test runs."""

    files: ClassVar[tuple[dict[str, bytes], dict[str, str]]] = ({}, {})

    def __init__(self, repository: Any) -> None:
        super().__init__(repository)
        self.loaded, self.names = self.files


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copied]:
    templates: dict[str, list[RunFolder]] = {}
    for kind, commands in TEMPLATES.items():
        for command in commands:
            folder = tmp_path_factory.mktemp(kind)
            given = [f"parent={templates['student_teacher'][0].path}", "at_step=9"] if kind == "fork" else []
            run_here(folder, *command.split(), "+debug=tiny", "runs_dir=runs", "tracking=none", *given)
            templates.setdefault(kind, []).extend(find_runs(folder / "runs"))
    copied = Copied(templates)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hydra, "Remembered", Kept)
        patch.setattr(unchanged, "stored", functools.cache(unchanged.stored.__wrapped__))  # of more runs than it keeps
        for module in (plan, inline, sweep, importlib.import_module("mxstudy.launch.worker")):
            patch.setattr(module, "study_of", lambda kind: copied)
        yield copied


@functools.cache
def composed(command: str, given: str) -> list[Composed]:
    return compose(*command.split(), "tracking=none", *given.split())


def launched(command: str, runs: Path, given: str) -> list[plan.Job]:
    """Return the jobs of a sweep after they ran, trained again if the refusal says so."""
    jobs = [Composed(o, c, values | {"runs_dir": str(runs)}) for o, c, values in map(parts, composed(command, given))]
    try:
        planned = plan.plan(jobs)
    except ConfigError:  # a probe was off in runs that another sweep has trained
        planned = plan.plan([Composed(o, c, values | {"rerun": True}) for o, c, values in map(parts, jobs)])
    assert inline.run_jobs(planned) == 0
    return planned


def sweep_of(command: str) -> str:
    return command.split()[0].removeprefix("+sweep=")


def parts(one: Composed) -> tuple[Any, ...]:
    return one.overrides, one.choices, one.values


def test_sweeps_share_their_runs_in_any_order_and_every_figure_is_drawn(
    study: Copied,
    given_to: Callable[[str], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both orders are in one test because composing all sweeps takes longer than launching them.

    A sweep that has no run in common with another is launched in the first order alone.
    """
    parent = study.templates["student_teacher"][0].path
    given = dict.fromkeys(("interventions", "interventions_public_code"), f"parent={parent}")
    given |= {"shakespeare": "data.paths=[book.txt]"}
    assert [name for name in SWEEPS if not is_valid_and_recorded(name, " ".join(given_to(name)))] == []
    asked, runs = ASKED, Path("runs")
    for name in ORDERS:
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        jobs = {command: launched(command, runs, given.get(sweep_of(command), "")) for command in asked}
        check_shared(jobs, runs)
        asked = sharing(jobs)[::-1]
    monkeypatch.chdir(tmp_path / ORDERS[0])
    capsys.readouterr()
    rules = check_saved(monkeypatch)  # figures read what `folders_of` finds, which is the same in both orders
    with read_once():
        assert [figure.name for figure in OF_SWEEPS if not is_drawn(figure)] == []
    assert {name: found for name, found in rules.items() if found} == {}


def is_valid_and_recorded(name: str, given: str) -> bool:
    """Tell whether a sweep's jobs have their recorded fingerprints, in order, and are valid, each override once."""
    jobs = composed(f"+sweep={name}", given)
    chosen = covering([one.overrides for one in jobs])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "study_of", study_of)
        checked = [*plan.validate([one for one in jobs if one.overrides in chosen])]
    wrong = [one for one in checked if isinstance(one, ConfigError)]
    print(name, *wrong)
    found = [fingerprint_of(read_run(one.values)) for one in jobs]
    return bool(chosen) and not wrong and found == recorded(f"sweep/{name}")


def sharing(jobs: dict[str, list[plan.Job]]) -> list[str]:
    """Return the commands that have a run in common with another command."""
    count = Counter(job.fingerprint for planned in jobs.values() for job in planned)
    return [command for command, planned in jobs.items() if any(count[job.fingerprint] > 1 for job in planned)]


def check_shared(jobs: dict[str, list[plan.Job]], runs: Path) -> None:
    """Check that many runs are shared, and that each sweep finds all of its runs, with all probes that it asked for."""
    with read_once():
        shared = [run for run in find_runs(runs) if len({each.sweep for each in run.memberships()}) > 1]
        assert len(shared) > 100
        for command, planned in jobs.items():
            found = {run.path.name: run for run in results.folders_of([runs / sweep_of(command)])}
            labels = {name: run.label for name, run in found.items()}
            assert {job.fingerprint[:12]: job.label for job in planned}.items() <= labels.items()
            for job in planned:
                assert probes_of(job.config) <= probes_of(found[job.fingerprint[:12]].config())


@contextmanager
def read_once() -> Iterator[None]:
    """Find and read each run only once within the block, in which none changes. Every sweep and figure asks for all."""
    known: dict[Path, list[Membership]] = {}
    frame_of = functools.cache(results.rows_of_kind)

    def once(folder: Path, provenance: Any, read: Any = memberships.read_memberships) -> list[Membership]:
        if folder not in known:
            known[folder] = read(folder, provenance)
        return known[folder]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memberships, "read_memberships", once)
        patch.setattr(results, "look_for_runs", functools.cache(results.look_for_runs))
        patch.setattr(results, "find_runs", functools.cache(find_runs))
        patch.setattr(results, "rows_of_kind", lambda path, kind: frame_of(path, kind).copy())
        yield


def probes_of(config: Any) -> set[str]:
    """Return the keys of what is measured beside the run, where it is on."""
    return {key for key, part in study_of(config.study).watched(config).items() if part.every_steps}


def is_drawn(figure: Figure) -> bool:
    try:
        few = ["--resamples", "2"] if figure.module.endswith("table02_scaling_fits") else []
        importlib.import_module(figure.module).main([*figure.options(figure.runs), *few])
    except (Exception, SystemExit) as error:
        print(figure.name, repr(error))
        return False
    return True

"""A sweep in MLflow: a parent run with its jobs' runs as children and the sweep's summary on its page.

Any process may repeat everything here: a sweep finds its parent run by its set of jobs, and sets the same tags,
artifacts and times again. So after an outage of the server, the same command adds what is missing.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxstudy.compat.mlflow import NOTE, PARENT, charts_over, page_of
from mxstudy.compat.mlflow_views import address_of_view
from mxstudy.tracking.dashboard import LOSS, RESULT, having, runs_by_arm
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.locks import waiting_lock
from mxstudy.tracking.mlflow_mirror import STATES, position_of
from mxstudy.tracking.mlflow_store import (
    TEXT_LENGTH,
    active_run,
    arm_tag,
    connect,
    create_run,
    find_run,
    get_experiment,
    origin,
)
from mxstudy.tracking.provenance import provenance

NAME_DIGITS = 6  # of a sweep's fingerprint, at the end of its run's name
SUMMARY = "summary.md"
CHARTS = "Charts of its runs"
LISTED = 20  # runs of other sweeps that a sweep's page has links to


@dataclass(frozen=True)
class Summary:
    """A study's summary at the end of a sweep: Markdown, figures, and in one line the numbers of every arm."""

    markdown: str
    figures: list[Path] = field(default_factory=list)
    result: str = ""


@dataclass(frozen=True)
class Sweep:
    """A sweep. `folders`: by each job's fingerprint, the folder of its run; the fingerprints identify the sweep.

    `arms`: by each job's fingerprint, the name of its arm. `tags`: of its run; the kind of run, `study`, is one.
    """

    uri: str
    experiment: str
    name: str
    tags: Mapping[str, str]
    folders: Mapping[str, RunFolder]
    arms: Mapping[str, str]

    @property
    def fingerprint(self) -> str:
        """Return a hash of the set of jobs, independent of their order."""
        return hashlib.sha256(" ".join(sorted(self.folders)).encode()).hexdigest()

    def begin(self) -> str:
        """Set the parent run to running, with a link to its charts, and return its id. Raises what MLflow raises."""
        client = connect(self.uri)
        with self._alone():
            parent = self._parent(client)
            parent_id = str(parent.info.run_id)
            if NOTE not in parent.data.tags:
                client.set_tag(parent_id, NOTE, self._link_to_charts(client, parent, []))
            client.set_tag(parent_id, "status", "running")
            client.update_run(parent_id, status="RUNNING")
        return parent_id

    def end(self, state: str, summary: Summary) -> None:
        """Adopt runs without a parent, show all runs and the summary, set the final state. Raises what MLflow raises.

        `state`: the state of a run; "running" leaves the parent open, because another process has some of the jobs.
        """
        client = connect(self.uri)
        sent = {key: run_id_of(folder, self.uri) for key, folder in self._begun().items()}
        with self._alone():
            parent = self._parent(client)
            parent_id = str(parent.info.run_id)
            elsewhere = adopt(client, parent_id, {run_id: self.arms[key] for key, run_id in sent.items() if run_id})
        client.log_text(parent_id, summary.markdown, SUMMARY)
        for path in summary.figures:
            client.log_artifact(parent_id, str(path))
        note = [self._link_to_charts(client, parent, elsewhere), summary.markdown, *links_to_runs(elsewhere)]
        with self._alone():
            client.set_tag(parent_id, NOTE, "\n\n".join(note)[:TEXT_LENGTH])
            if summary.result:
                client.set_tag(parent_id, RESULT, summary.result[:TEXT_LENGTH])
            client.set_tag(parent_id, "status", state)
        if state in STATES:
            journals = [folder.journal_path for folder in self._begun().values()]
            written_s = [path.stat().st_mtime for path in journals if path.exists()]
            client.set_terminated(parent_id, STATES[state], end_time=int(1000 * max(written_s, default=time.time())))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let only one process at a time create a parent, or set tags of parents and of the runs that they adopt.

        Processes that share a sweep or a run begin and end together. MLflow looks for a run, or for a tag, before it
        inserts one. Two processes would insert two runs, and the second tag would be an error.
        """
        runs_dir = next(iter(self.folders.values())).path.parents[1]
        runs_dir.mkdir(parents=True, exist_ok=True)
        with waiting_lock(runs_dir / ".parents.lock"):
            yield

    def _parent(self, client: Any) -> Any:
        """Find or create the parent run and return it."""
        experiment_id = get_experiment(client, self.experiment, self.tags["study"])
        mine = {"sweep_fingerprint": self.fingerprint}
        return find_run(client, experiment_id, mine) or self._create(client, experiment_id, mine)

    def _create(self, client: Any, experiment_id: str, mine: dict[str, str]) -> Any:
        """Create the parent run, which starts with the oldest of its jobs' runs, and return it."""
        tags = origin(provenance()) | dict(self.tags) | mine | {"jobs": str(len(self.folders))}
        started_s = min([time.time(), *(folder.status().started_s for folder in self._begun().values())])
        name = f"{self.name} ({self.fingerprint[:NAME_DIGITS]})"  # the same keys may vary in another sweep
        return create_run(client, experiment_id, name, started_s, tags)

    def _begun(self) -> dict[str, RunFolder]:
        return {key: folder for key, folder in self.folders.items() if folder.status_path.exists()}

    def _link_to_charts(self, client: Any, parent: Any, elsewhere: Sequence[Any]) -> str:
        """Return a Markdown link to the charts of all runs of the sweep, grouped by arm, after storing that view.

        `elsewhere`: those that have another parent. If some are in another experiment, the charts have no view.
        """
        own, tag = parent.info.experiment_id, arm_tag(parent.info.run_id)
        ids = list(dict.fromkeys([own, *(run.info.experiment_id for run in elsewhere)]))
        if len(ids) > 1:
            return f"[{CHARTS}]({charts_over(ids, having(tag), LOSS)})"
        for key, view in runs_by_arm(self.tags["study"], tag).items():
            client.set_experiment_tag(own, key, view)
        return f"[{CHARTS}]({address_of_view(own, tag, charts=True)})"


def links_to_runs(runs: Sequence[Any]) -> list[str]:
    """Return [a paragraph of Markdown with links to runs that other sweeps trained], or [] without such runs."""
    links = [f"[{run.info.run_name}]({page_of(run.info.experiment_id, run.info.run_id)})" for run in runs]
    more = [f"and {len(links) - LISTED} more"] if len(links) > LISTED else []
    return [f"Under the sweeps that trained them: {', '.join(links[:LISTED] + more)}"] if links else []


def adopt(client: Any, parent_id: str, arms: Mapping[str, str]) -> list[Any]:
    """Tag runs with their arms, by run id. A run whose parent is missing or deleted becomes a child of this one.

    Returns the runs that have another parent.
    """
    elsewhere, tag = [], arm_tag(parent_id)
    for run_id, arm in arms.items():
        run = active_run(client, run_id)
        if run is None:
            continue
        if run.data.tags.get(tag) != arm:
            client.set_tag(run_id, tag, arm)
        before = run.data.tags.get(PARENT)
        if before != parent_id and before is not None and active_run(client, before) is not None:
            elsewhere.append(run)
        elif before != parent_id:
            client.set_tag(run_id, PARENT, parent_id)
    return elsewhere


def run_id_of(folder: RunFolder, uri: str) -> str | None:
    """Return the id of a folder's MLflow run in this store, or None if there is none."""
    position = position_of(folder, uri)
    return position.run_id if position else None

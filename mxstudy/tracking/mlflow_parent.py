"""A sweep in MLflow: a parent run with its jobs' runs as children and the sweep's summary on its page.

Any process may repeat everything here: a sweep finds its parent run by its set of jobs, and sets the same tags,
artifacts and times again. So after an outage of the server, the same command adds what is missing.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxstudy.compat.mlflow import NOTE, PARENT, charts_of, page_of
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_mirror import STATES, position_of
from mxstudy.tracking.mlflow_store import (
    TEXT_LENGTH,
    active_run,
    connect,
    create_run,
    find_run,
    get_experiment,
    origin,
)
from mxstudy.tracking.provenance import provenance

SUMMARY = "summary.md"
LISTED = 20  # runs of other sweeps that a sweep's page has links to


@dataclass(frozen=True)
class Summary:
    """A study's summary at the end of a sweep: Markdown and figures."""

    markdown: str
    figures: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class Sweep:
    """A sweep. `folders`: by each job's fingerprint, the folder of its run; the fingerprints identify the sweep."""

    uri: str
    experiment: str
    name: str
    tags: Mapping[str, str]
    folders: Mapping[str, RunFolder]

    @property
    def fingerprint(self) -> str:
        """Return a hash of the set of jobs, independent of their order."""
        return hashlib.sha256(" ".join(sorted(self.folders)).encode()).hexdigest()

    def begin(self) -> str:
        """Set the parent run to running and return its id; raises what MLflow raises."""
        client = connect(self.uri)
        parent_id = self._parent(client)
        client.set_tag(parent_id, "status", "running")
        client.update_run(parent_id, status="RUNNING")
        return parent_id

    def end(self, state: str, summary: Summary) -> None:
        """Adopt runs without a parent, show all runs and the summary, set the final state; raises what MLflow raises.

        `state`: the state of a run; "running" leaves the parent open, because another process has some of the jobs.
        """
        client = connect(self.uri)
        parent_id = self._parent(client)
        ids = [run_id for folder in self._begun() if (run_id := run_id_of(folder, self.uri))]
        elsewhere = adopt(client, parent_id, ids)
        client.log_text(parent_id, summary.markdown, SUMMARY)
        for path in summary.figures:
            client.log_artifact(parent_id, str(path))
        note = [link_to_charts(client, parent_id, elsewhere), summary.markdown, *links_to_runs(elsewhere)]
        client.set_tag(parent_id, NOTE, "\n\n".join(note)[:TEXT_LENGTH])
        client.set_tag(parent_id, "status", state)
        if state in STATES:
            written_s = [f.journal_path.stat().st_mtime for f in self._begun() if f.journal_path.exists()]
            client.set_terminated(parent_id, STATES[state], end_time=int(1000 * max(written_s, default=time.time())))

    def _parent(self, client: Any) -> str:
        """Find or create the parent run and return its id; a new one starts with the oldest of its jobs' runs."""
        experiment_id, mine = get_experiment(client, self.experiment), {"sweep_fingerprint": self.fingerprint}
        found = find_run(client, experiment_id, mine)
        if found is None:
            tags = origin(provenance()) | dict(self.tags) | mine | {"jobs": str(len(self.folders))}
            started_s = min([time.time(), *(folder.status().started_s for folder in self._begun())])
            found = create_run(client, experiment_id, self.name, started_s, tags)
        return str(found.info.run_id)

    def _begun(self) -> list[RunFolder]:
        return [folder for folder in self.folders.values() if folder.status_path.exists()]


def link_to_charts(client: Any, parent_id: str, elsewhere: Sequence[Any]) -> str:
    """Return a Markdown link to the charts that show all runs of a sweep together.

    They are its children, or all runs with its tag if some have another parent and so are `elsewhere`.
    """
    own = client.get_run(parent_id).info.experiment_id
    ids = list(dict.fromkeys([own, *(run.info.experiment_id for run in elsewhere)]))
    search = f"tags.`{tag_of(parent_id)}` = '{parent_id}'" if elsewhere else f"tags.{PARENT}='{parent_id}'"
    return f"[Charts of its runs]({charts_of(ids, search, 'metrics.`val/loss`')})"


def links_to_runs(runs: Sequence[Any]) -> list[str]:
    """Return a paragraph of Markdown with links to runs that are no children of this sweep's, or nothing."""
    links = [f"[{run.info.run_name}]({page_of(run.info.experiment_id, run.info.run_id)})" for run in runs]
    more = [f"and {len(links) - LISTED} more"] if len(links) > LISTED else []
    return [f"Under the sweeps that trained them: {', '.join(links[:LISTED] + more)}"] if links else []


def tag_of(parent_id: str) -> str:
    """Return the tag by which a sweep finds all of its runs: a run has one parent, but may be in many sweeps."""
    return f"sweep.{parent_id[:12]}"


def adopt(client: Any, parent_id: str, run_ids: Sequence[str]) -> list[Any]:
    """Make runs children of the parent if they have no parent, or one that was deleted in MLflow.

    Tags all of them if some have another parent, and returns those.
    """
    runs = [run for run_id in run_ids if (run := active_run(client, run_id))]
    elsewhere = []
    for run in runs:
        before = run.data.tags.get(PARENT)
        if before != parent_id and before is not None and active_run(client, before) is not None:
            elsewhere.append(run)
        elif before != parent_id:
            client.set_tag(run.info.run_id, PARENT, parent_id)
    if elsewhere:
        for run in runs:
            client.set_tag(run.info.run_id, tag_of(parent_id), parent_id)
    return elsewhere


def run_id_of(folder: RunFolder, uri: str) -> str | None:
    """Return the id of a folder's MLflow run in this store; None if there is none."""
    position = position_of(folder, uri)
    return position.run_id if position else None

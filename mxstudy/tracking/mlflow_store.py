"""Open an MLflow store, and find or create its experiments and runs.

This file knows nothing of the journal: `mlflow_mirror` sends it, and `mlflow_parent` makes the parent runs of sweeps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mxstudy.compat.mlflow import NOTE, SOURCE_COMMIT, SOURCE_NAME, quiet_client
from mxstudy.reader import require, root_of
from mxstudy.tracking.dashboard import having, link_to_runs, list_of_runs
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_database import make_database
from mxstudy.tracking.mlflow_metrics import allowed
from mxstudy.tracking.silence import answers_of

SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https")
TEXT_LENGTH = 6000  # MLflow's limit for the value of a param

BACKTICK, QUOTES = "`", "'\""  # the marks around names and values in MLflow's searches
MEMBER = "in."  # prefix of the tags that name the experiments and sweeps of a run


def check_uri(uri: str, key: str) -> None:
    """Raise ConfigError, naming the key, for a URI that MLflow or a second process could not open."""
    scheme = re.split(r"[+:]", uri)[0]
    require(scheme in SCHEMES, f"{key}: {uri!r} does not begin with one of {', '.join(SCHEMES)}")
    in_memory = uri == "sqlite://" or ":memory:" in uri
    require(not in_memory, f"{key}: {uri!r} is lost when the process ends; give a file: sqlite:///mlflow.db")
    is_address = scheme not in ("http", "https") or names_a_host(uri)
    require(is_address, f"{key}: {uri!r} is not the address of a server; give one like http://127.0.0.1:5000")


def names_a_host(uri: str) -> bool:
    """Return whether the URI has a host name and, if it has a port, one up to 65535."""
    try:
        address = urlsplit(uri)
        host, _ = address.hostname or "", address.port
        return not re.search(r"\s", uri) and host.encode("idna") != b""
    except ValueError:  # raised for the port, for brackets without an end, and for labels that are empty or too long
        return False


def connect(uri: str) -> Any:
    """Return an MlflowClient of that store; MLflow is imported only here, because the import takes seconds."""
    database = sqlite_file(uri)
    if database:
        make_database(database)
    return quiet_client(uri)


def create_store(uri: str) -> str | None:
    """Open a store once. Return None, or one line that says why it cannot be used now."""
    try:
        with answers_of(uri).asking():
            connect(uri).search_experiments(max_results=1)
    except Exception as error:
        return one_line(uri, error)
    return None


def one_line(uri: str, error: BaseException) -> str:
    """Return the root cause of an error in one line: 'Connection refused', not the four layers above it."""
    root = root_of(error)
    return f"{uri}: {type(root).__name__}: {' '.join(str(root).split())[:200]}"


def get_experiment(client: Any, name: str, study: str) -> str:
    """Return the id of the experiment of that name; create it if there is none.

    An experiment without a view of its runs gets the one of this kind of run, and a link to it at the head of its page.
    """
    experiment = client.get_experiment_by_name(name) or create_experiment(client, name)
    experiment_id: str = experiment.experiment_id
    view = list_of_runs(study)
    if not view.keys() <= experiment.tags.keys():
        for key, value in ({NOTE: link_to_runs(experiment_id)} | view).items():
            if key not in experiment.tags:
                client.set_experiment_tag(experiment_id, key, value)
    return experiment_id


def create_experiment(client: Any, name: str) -> Any:
    """Create an experiment, unless another process has just done so, and return it."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_experiment(name, artifact_location=artifact_location(client.tracking_uri, name))
    except MlflowException:
        if client.get_experiment_by_name(name) is None:
            raise
    return client.get_experiment_by_name(name)


def artifact_location(uri: str, experiment: str) -> str | None:
    """Return the URI of a folder beside an SQLite file, valid for any job, or None for a server, which has its own."""
    database = sqlite_file(uri)
    return (database.parent / "mlruns" / experiment).as_uri() if database else None


def sqlite_file(uri: str) -> Path | None:
    """Return the file of an SQLite store, or None for any other store."""
    prefix, path = uri[:10], uri[10:].partition("?")[0]
    return Path(path).absolute() if prefix == "sqlite:///" else None


def active_run(client: Any, run_id: str) -> Any | None:
    """Return the run of that id, or None if this store has none, or it was deleted in MLflow."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return run if run.info.lifecycle_stage == "active" else None


def find_run(client: Any, experiment_id: str, tags: Mapping[str, str]) -> Any | None:
    """Return the earliest run with all of these tags that was not deleted in MLflow, or None if there is none."""
    query = " and ".join(f"tags.{quoted(key, BACKTICK)} = {quoted(value, QUOTES)}" for key, value in tags.items())
    found = client.search_runs([experiment_id], query, max_results=1, order_by=["attributes.start_time ASC"])
    return found[0] if found else None


def quoted(text: str, marks: str) -> str:
    """Return a text in the first of these quotation marks that it does not contain, as MLflow's searches read it.

    Raises ValueError for a text that contains all of them: a search has no other way to write it.
    """
    mark = next((mark for mark in marks if mark not in text), None)
    if mark is None:
        raise ValueError(f"{text!r} cannot be searched for in MLflow")
    return f"{mark}{text}{mark}"


def create_run(client: Any, experiment_id: str, run_name: str, started_s: float, tags: Mapping[str, Any]) -> Any:
    """Create a run and return it; `tags` whose values are lists or mappings are left out."""
    texts = {
        allowed(key): str(value)[:TEXT_LENGTH] for key, value in tags.items() if not isinstance(value, dict | list)
    }
    return client.create_run(experiment_id, start_time=int(started_s * 1000), tags=texts, run_name=run_name)


def origin(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return tags with a run's provenance, also under the names that MLflow shows in its own columns."""
    known = {SOURCE_NAME: provenance["command"], SOURCE_COMMIT: provenance["commit"]}
    return dict(provenance) | known


def membership_tags(folder: RunFolder) -> dict[str, str]:
    """Return a tag in.NAME for each experiment and sweep that asked for the run: its label there."""
    return {allowed(f"{MEMBER}{name}"): str(each.label) for each in folder.memberships() for name in sorted(each.names)}


def member_of(name: str) -> str:
    """Return the search for the runs of an experiment or sweep, in whichever experiment of MLflow they are."""
    return having(allowed(MEMBER + name))


def arm_tag(parent_id: str) -> str:
    """Return the tag by which a sweep finds all of its runs and groups them: its value is the run's arm there.

    A run has one parent, but may be in many sweeps.
    """
    return f"sweep.{parent_id[:12]}"


def own_tags(folder: RunFolder) -> dict[str, str]:
    """Return the tags that identify a folder's run.

    The start time is one of them, because `rerun=true` trains the same fingerprint again in a new folder.
    """
    status = folder.status()
    return {"fingerprint": status.fingerprint, "started_s": str(status.started_s)}

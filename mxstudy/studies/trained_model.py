"""The shared part of studies of a trained model: find and load the checkpoint, and record results about it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from mxstudy.config import TrainedModelRun, fingerprint
from mxstudy.evaluation import checkpoints
from mxstudy.evaluation.checkpoints import Trained
from mxstudy.evaluation.pool import Pool, devices_of
from mxstudy.evaluation.scorer import Scorer
from mxstudy.model.backends import backends_of
from mxstudy.model.describe_precision import describe
from mxstudy.reader import ConfigError, changed
from mxstudy.studies import study_of
from mxstudy.studies.protocol import Identity, Keyed, Study, Uses, on_planned_device, unused_messages
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.journal import Row, read_journal, replace_journal
from mxstudy.tracking.mixed_backends import all_backends
from mxstudy.tracking.mlflow_mirror import add_rows
from mxstudy.train.recorder import finish_and_mirror
from mxstudy.train.runtime import configure_torch, resolve_device

C = TypeVar("C", bound=TrainedModelRun)


class TrainedModelStudy(Study[C]):
    """A kind of run that does not train a model but reads one from a checkpoint."""

    uses: ClassVar[Uses] = Uses.ONE_TASK

    def pinned(self, config: C) -> C:
        """Return the config with the checkpoint's folder instead of its name: a run's newest checkpoint may change."""
        path = checkpoints.find(config.checkpoint, Path(config.runs_dir))
        return on_planned_device(changed(config, checkpoint=str(path)), "device")

    def backends(self, config: C) -> str | None:
        return built_backends(by_model(config))

    def unused_settings(self, config: C) -> dict[str, str]:
        if config.precision is None:
            return {}
        norm = config.norm or checkpoints.describe(checkpoints.find(config.checkpoint, Path(config.runs_dir))).norm
        return unused_messages(config.precision, norm, config.precision.gain)

    def precision_plan(self, config: C) -> list[str]:
        return plan_of(config, described(config)[1])[0].splitlines()

    def tell_others(self, config: C, folder: RunFolder) -> str | None:
        return tell_training_run(config, folder)


def described(config: TrainedModelRun) -> tuple[Path, Trained]:
    """Return the checkpoint's path and description; norm, precision and compute of the config replace its own."""
    path = checkpoints.find(config.checkpoint, Path(config.runs_dir))
    trained = checkpoints.describe(path)
    asked = {name: getattr(config, name) for name in ("norm", "precision", "compute")}
    return path, replace(trained, **{name: value for name, value in asked.items() if value is not None})


def identity_of(config: TrainedModelRun, **asked: Any) -> Identity:
    """Return what a fingerprint hashes besides the config: device type, checkpoint's identity, and `asked`."""
    path = checkpoints.find(config.checkpoint, Path(config.runs_dir))
    return resolve_device(config.device, "device").type, {"checkpoint": checkpoints.identity(path), **asked}


def check_model(config: TrainedModelRun) -> Trained:
    """Return the checkpoint's description. Raises ConfigError if it, norm, precision or devices are not available."""
    built_backends(by_model(config))
    devices_of(resolve_device(config.device, "device"), config.processes)
    return described(config)[1]


def by_model(config: TrainedModelRun) -> Keyed[TrainedModelRun]:
    """Return the config, keyed by everything that determines the built model and its device."""
    path, device = checkpoints.find(config.checkpoint, Path(config.runs_dir)), resolve_device(config.device, "device")
    return Keyed(repr((path, config.norm, config.precision, config.compute, device)), config)


@functools.cache  # building a model takes 10 ms, and `check` and `backends` both need it
def built_backends(keyed: Keyed[TrainedModelRun]) -> str | None:
    """Build the evaluated model on the meta device, and return its blocks' backends. Raises ConfigError."""
    model = checkpoints.build(described(keyed.value)[1], resolve_device(keyed.value.device, "device"))
    return all_backends(backends_of(model).values())


def plan_of(config: TrainedModelRun, trained: Trained) -> tuple[str, Row]:
    """Return the precision plan as applied to the evaluated model: as text, and as a row of the journal."""
    device = resolve_device(config.device, "device")
    model = checkpoints.build(trained, device)
    rows = checkpoints.set_precision(model, trained, device)
    return describe(model, rows, forward_only=True), {"precision": rows, "backends": backends_of(model)}


@contextmanager
def scoring(config: TrainedModelRun, path: Path, trained: Trained, tokens_per_batch: int) -> Iterator[Scorer]:
    """Print devices and plan, and yield a scorer: in this process for one device, else one process per device."""
    devices = devices_of(resolve_device(config.device, "device"), config.processes)
    configure_torch()
    print(f"{trained.name} on {', '.join(map(str, devices))}: {checkpoints.title(trained)}")
    print(plan_of(config, trained)[0], flush=True)
    if len(devices) == 1:
        yield Scorer(checkpoints.load(path, trained, devices[0]), trained.max_length, tokens_per_batch)
        return
    pool = Pool(path, trained, devices, tokens_per_batch)
    try:
        yield pool
    finally:
        pool.close()


def write_journal(
    config: TrainedModelRun, folder: RunFolder, path: Path, trained: Trained, probe: str, values: Mapping[str, float]
) -> None:
    """Replace the journal by two rows at the step of the checkpoint in `path`: the plan and the values."""
    at = {"step": checkpoints.step_of(path)}
    _, plan = plan_of(config, trained)
    replace_journal(folder.journal_path, [at | plan, at | {"probe": probe, "values": dict(values)}])


def finish(config: TrainedModelRun, folder: RunFolder, label: str) -> None:
    """Set the run to finished and mirror it; if the model is as it was trained, also add to its training run."""
    finish_and_mirror(config, folder, label, partial(tell_training_run, config, folder))


def tell_training_run(config: TrainedModelRun, folder: RunFolder) -> str | None:
    """Add the journal's rows to the run that trained the model, if the tracking store has that run.

    This is only for the model as it was trained, not with another norm, precision or compute dtype, and never for a
    rehearsal. The probe's name ends with `digest_of_questions`, so that another corpus or number of shots has values of
    its own. Rows that are there already are not added twice. Returns None, or one line that says why it failed.
    """
    if folder.is_rehearsal:
        return None
    as_trained = (config.norm, config.precision, config.compute) == (None, None, None)
    trained_in = RunFolder(checkpoints.find(config.checkpoint, Path(config.runs_dir)).parent.parent)
    if not as_trained or config.tracking.uri is None or not trained_in.status_path.exists():
        return None
    try:
        asked = digest_of_questions(folder)
    except (ConfigError, OSError) as error:  # the questions have gone since; the run has its results all the same
        return f"the training's run was not told: {error}"
    rows = [row | {"probe": f"{row['probe']}_{asked}"} for row in read_journal(folder.journal_path) if "probe" in row]
    return add_rows(config.tracking.uri, trained_in, rows)


def digest_of_questions(folder: RunFolder) -> str:
    """Return six digits of the fingerprint that the run would have without its checkpoint."""
    config = folder.config()
    device_type, identity = study_of(config.study).identity(config)
    return fingerprint(config, device_type, {**identity, "checkpoint": None})[:6]

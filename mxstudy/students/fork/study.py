"""Forks of a student-teacher run as a kind of run."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from mxstudy.config import Fork
from mxstudy.reader import ConfigError
from mxstudy.students.check import backends_on
from mxstudy.students.fork.check import check_perturbed, losses_of, parent_of
from mxstudy.students.fork.points import changed, fork_points
from mxstudy.students.study import plan
from mxstudy.studies.protocol import Identity, Study, on_planned_device
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_parent import Summary
from mxstudy.train.runtime import resolve_device


class ForkStudy(Study[Fork]):
    def check(self, config: Fork, ranks: int = 1) -> None:
        """Raise ConfigError if there is nothing to fork, or if the changed config cannot run."""
        resolve_device(config.device, "device")
        parent, of_parent = parent_of(config)
        fork_points(config, losses_of(parent, of_parent))
        check_perturbed(config.intervention, of_parent)
        try:
            backends_on(changed(of_parent, config.intervention))
        except ConfigError as error:
            raise ConfigError(f"intervention: the changed run fails: {error}") from None

    def pinned(self, config: Fork) -> Fork:
        return on_planned_device(config, "device")

    def identity_key(self, config: Fork) -> Hashable:
        return config.runs_dir, config.parent, config.intervene_before, config.fractions, config.at_step, config.device

    def identity(self, config: Fork) -> Identity:
        """Return the device's type, the parent's fingerprint, and the fork points of its replicas."""
        parent, of_parent = parent_of(config)
        points = [list(point) for point in fork_points(config, losses_of(parent, of_parent))]
        return resolve_device(config.device, "device").type, {"parent": parent.status().fingerprint, "forks": points}

    def backends(self, config: Fork) -> str | None:
        """Return the backends of the forks' blocks in the changed config, on the forks' device."""
        _, of_parent = parent_of(config)
        return backends_on(changed(of_parent, config.intervention), resolve_device(config.device, "device"))

    def precision_plan(self, config: Fork) -> list[str]:
        _, of_parent = parent_of(config)
        return plan(changed(of_parent, config.intervention), resolve_device(config.device, "device"))

    def run(self, config: Fork, folder: RunFolder, label: str) -> str:
        from mxstudy.students.fork.run import run

        return run(config, folder, label)

    def summarise(self, runs: Mapping[str, RunFolder], baseline: Mapping[str, str]) -> Summary:
        from mxstudy.students.fork.run import summarise

        return summarise(runs, baseline)


STUDY = ForkStudy()

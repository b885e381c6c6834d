"""Zero-shot evaluation of a checkpoint as a kind of run."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from mxstudy.config import Evaluate
from mxstudy.evaluation import questions
from mxstudy.studies.protocol import Identity
from mxstudy.studies.trained_model import TrainedModelStudy, check_model, identity_of
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_parent import Summary


class EvaluateStudy(TrainedModelStudy[Evaluate]):
    def check(self, config: Evaluate, ranks: int = 1) -> None:
        """Raise ConfigError if checkpoint or questions are not available, or norm or precision do not fit the model."""
        check_model(config)
        questions.check(config.evaluation)

    def identity_key(self, config: Evaluate) -> Hashable:
        return config.checkpoint, config.runs_dir, config.device, str(config.evaluation)

    def identity(self, config: Evaluate) -> Identity:
        return identity_of(config, questions=questions.identity(config.evaluation))

    def run(self, config: Evaluate, folder: RunFolder, label: str) -> str:
        from mxstudy.studies.evaluate.run import run

        return run(config, folder, label)

    def summarise(self, runs: Mapping[str, RunFolder], baseline: Mapping[str, str]) -> Summary:
        from mxstudy.studies.evaluate.tables import summarise

        return summarise(runs, baseline)


STUDY = EvaluateStudy()

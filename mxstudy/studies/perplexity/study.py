"""The loss of a checkpoint on a corpus as a kind of run."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from mxstudy.config import Perplexity
from mxstudy.data import corpus
from mxstudy.reader import require
from mxstudy.studies.perplexity.check import check_split, corpus_of, documents_of, windows_of
from mxstudy.studies.protocol import Identity
from mxstudy.studies.trained_model import TrainedModelStudy, check_model, identity_of
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_parent import Summary


class PerplexityStudy(TrainedModelStudy[Perplexity]):
    def check(self, config: Perplexity, ranks: int = 1) -> None:
        """Raise ConfigError if the checkpoint is missing, windows or split do not fit it, or there is no text."""
        trained = check_model(config)
        windows_of(config, trained)
        check_split(config, trained)
        remedy = "the corpus has no text" if config.split == "all" else "split=all takes every document"
        require(
            next(documents_of(config), None) is not None,
            f"split: no document of the corpus is in its {config.split} split; {remedy}",
        )

    def identity_key(self, config: Perplexity) -> Hashable:
        return config.checkpoint, config.runs_dir, config.device, corpus_of(config)

    def identity(self, config: Perplexity) -> Identity:
        return identity_of(config, corpus=corpus.identity(corpus_of(config)))

    def run(self, config: Perplexity, folder: RunFolder, label: str) -> str:
        from mxstudy.studies.perplexity.run import run

        return run(config, folder, label)

    def summarise(self, runs: Mapping[str, RunFolder], baseline: Mapping[str, str]) -> Summary:
        from mxstudy.studies.perplexity.tables import summarise

        return summarise(runs, baseline)


STUDY = PerplexityStudy()

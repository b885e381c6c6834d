"""The approximation study as a kind of run: errors of MXNorm and of casts (MXNorm paper, sections 3.3 to 3.6)."""

from __future__ import annotations

from collections.abc import Mapping

from mxstudy.config import Approximation
from mxstudy.studies.protocol import Identity, Study
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_parent import Summary


class ApproximationStudy(Study[Approximation]):
    def check(self, config: Approximation, ranks: int = 1) -> None:
        """Raise ConfigError for a precision without an operand that can be measured."""
        if config.precisions:
            from mxstudy.studies.approximation.recipe_errors import check_recipes

            check_recipes(config)

    def identity(self, config: Approximation) -> Identity:
        return "cpu", {}

    def run(self, config: Approximation, folder: RunFolder, label: str) -> str:
        from mxstudy.studies.approximation.run import run

        return run(config, folder, label)

    def summarise(self, runs: Mapping[str, RunFolder], baseline: Mapping[str, str]) -> Summary:
        """Print and return the commands that draw the runs' figures; each run has already printed its tables."""
        from mxstudy.studies.approximation.run import how_to_draw

        commands = how_to_draw(*runs.values())
        print(commands, flush=True)
        return Summary(commands)


STUDY = ApproximationStudy()

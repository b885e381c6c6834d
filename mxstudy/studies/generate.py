"""Write texts that continue a prompt with a checkpoint, as a kind of run, to see what the model has learnt."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from itertools import zip_longest
from typing import ClassVar

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text as Words

from mxstudy import results
from mxstudy.config import Generate
from mxstudy.evaluation import checkpoints, generation
from mxstudy.evaluation.generation import Text
from mxstudy.studies.protocol import Identity, Uses
from mxstudy.studies.trained_model import (
    TrainedModelStudy,
    check_model,
    described,
    identity_of,
    plan_of,
    write_journal,
)
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_parent import Summary
from mxstudy.train.recorder import finish_and_mirror
from mxstudy.train.runtime import configure_torch, resolve_device
from mxstudy.whole_files import replace_file

TABLE = "texts"  # a row for each text
PROBE = "generation"  # the name of its row in a journal


class GenerateStudy(TrainedModelStudy[Generate]):
    uses: ClassVar[Uses] = Uses.ONE_GPU
    shows_again: ClassVar[bool] = True

    def check(self, config: Generate, ranks: int = 1) -> None:
        """Raise ConfigError if the checkpoint is missing, or the prompt does not fit it."""
        trained = check_model(config)
        generation.check_prompt(config.prompt, trained.tokenizer, trained.max_length, "prompt")
        generation.check_casts(trained.precision, trained.precision.schedule[-1:])

    def identity_key(self, config: Generate) -> Hashable:
        return config.checkpoint, config.runs_dir, config.device

    def identity(self, config: Generate) -> Identity:
        return identity_of(config)

    def run(self, config: Generate, folder: RunFolder, label: str) -> str:
        """Write the texts to tables/texts.parquet and texts.txt, print them, and return the run's state."""
        with folder.lock(), folder.heartbeat():
            folder.update(state="running", steps=config.samples, reason=None)
            configure_torch()
            path, trained = described(config)
            device = resolve_device(config.device, "device")
            print(
                f"{trained.name} on {device}: {checkpoints.title(trained)}\n{plan_of(config, trained)[0]}", flush=True
            )
            model, began_s = checkpoints.load(path, trained, device), time.perf_counter()
            texts = generation.continued(
                model, trained.tokenizer, config.prompt, config, trained.max_length, config.samples, keeps=config.keep
            )
            seconds = time.perf_counter() - began_s
            named = {"checkpoint": trained.name, "asked_in": checkpoints.title(trained)}
            results.save_table(folder, TABLE, pd.DataFrame(texts).assign(**named))
            shown = "\n\n".join(generation.blocks(texts))
            replace_file(folder.path / "texts.txt", f"{shown}\n")
            rate = sum(text.tokens for text in texts) / seconds
            write_journal(config, folder, path, trained, PROBE, {"tokens_per_s": rate})
            folder.update(step=config.samples)
            print(shown, flush=True)
            finish_and_mirror(config, folder, label)
        return "finished"

    def summarise(self, runs: Mapping[str, RunFolder], baseline: Mapping[str, str]) -> Summary:
        """Print the texts of all runs, side by side if there are several, and return them one below the other."""
        texts = {label: generation.blocks(texts_in(folder)) for label, folder in runs.items()}
        show_beside(texts)
        fenced = {label: "\n\n".join(["```", *own, "```"]) for label, own in texts.items()}
        return Summary("\n\n".join(f"**{label}**\n\n{own}" for label, own in fenced.items()))

    def tell_others(self, config: Generate, folder: RunFolder) -> str | None:
        """Do nothing: the run that trained the model can have texts of its own."""
        return None


def texts_in(folder: RunFolder) -> list[Text]:
    rows = results.load_table([folder], TABLE)[list(Text._fields)]
    return [Text(**row) for row in rows.to_dict("records")]


def show_beside(texts: Mapping[str, Sequence[str]]) -> None:
    """Print a column of texts for each label."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for label in texts:
        table.add_column(Words(label), overflow="fold", ratio=1)
    for row in zip_longest(*texts.values(), fillvalue=""):
        table.add_row(*map(Words, row), end_section=True)
    Console(highlight=False).print(table)


STUDY = GenerateStudy()

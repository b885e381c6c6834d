"""Make the training runs that benchmarks time: config, random tokens, and recorders that need no folder of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from mxstudy import config
from mxstudy.model.decoder import Decoder
from mxstudy.reader import read
from mxstudy.studies.pretrain.run import initial_model
from mxstudy.tracking.journal import Journal
from mxstudy.train.loop import StepRecorder, TrainingRun, set_precision
from mxstudy.train.optimizer import build_optimizer

MODELS = Path(__file__).parents[1] / "conf" / "model"
LLAMAS = sorted(path.stem for path in MODELS.glob("llama_*.yaml"))


def model_of(name: str) -> config.Decoder:
    """Return the decoder of a file of conf/model that sets all its sizes."""
    values = yaml.safe_load((MODELS / f"{name}.yaml").read_text())
    return read(config.Decoder, {key: value for key, value in values.items() if key != "defaults"}, "model")


def everywhere(precision: str) -> config.Precision:
    """Return a precision by its name, in all blocks and from the first step on."""
    return config.Precision(schedule=(config.PrecisionRow(plan={"layers.*": precision}),))


def pretraining(
    model: config.Decoder, norm: config.Norm, precision: config.Precision, train: config.Train, lr: float
) -> config.Pretrain:
    """Return the config of a training by AdamW at a constant rate, whose corpus is never read."""
    return config.Pretrain(
        model=model,
        norm=norm,
        precision=precision,
        data=config.PySource(),
        tokenizer=config.Bytes(),
        optimizer=config.AdamW(lr=lr),
        schedule=config.Schedule(kind="constant"),
        train=train,
    )


class RandomTokens:
    """Batches of random tokens, which cost nothing to read."""

    def __init__(self, model: config.Decoder, train: config.Train) -> None:
        text = torch.randint(model.vocab_size, (train.batch_size, train.sequence_length + 1))
        self.tokens, self.targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def train(self, step: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.tokens[start:stop], self.targets[start:stop]

    def validation(self, sequences: int) -> tuple[Tensor, Tensor]:
        return self.train(0, 0, sequences)


class Silent:
    """A recorder that keeps nothing."""

    def record(self, row: dict[str, Any]) -> None:
        """Do nothing."""

    def measuring(self, what: str, done: int, total: int) -> None:
        """Do nothing."""

    def save(self, step: int) -> None:
        """Do nothing."""


class Written(Silent):
    """A recorder that writes the journal but no checkpoints."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def record(self, row: dict[str, Any]) -> None:
        self.journal.write(row)


def build(settings: config.Pretrain, device: torch.device, recorder: StepRecorder | None = None) -> TrainingRun:
    """Return a run with initial weights and random tokens. Without a recorder, it keeps nothing."""
    model = initial_model(settings, device)
    set_precision(model, settings, 0, device)
    return training_run(settings, model, build_optimizer(model, settings.optimizer), device, recorder)


def training_run(
    settings: config.Pretrain,
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    recorder: StepRecorder | None = None,
) -> TrainingRun:
    """Return a run of this model with random tokens."""
    tokens = RandomTokens(settings.model, settings.train)
    return TrainingRun(settings, model, optimizer, tokens, device, recorder or Silent())  # type: ignore[arg-type]

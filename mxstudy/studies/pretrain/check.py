"""Check a pre-training config before it runs: model, precision, ranks, vocabulary and evaluation questions."""

from __future__ import annotations

import functools
from operator import attrgetter

import torch

from mxstudy import config as schemas
from mxstudy.config import Pretrain
from mxstudy.data.batches import rows_of_rank
from mxstudy.evaluation import questions
from mxstudy.model.backends import backends_of
from mxstudy.model.decoder import Decoder
from mxstudy.model.moe import mixtures_of, scaled_operand
from mxstudy.model.precision import DTYPES, apply_precision, check_starts, check_tokens
from mxstudy.reader import require
from mxstudy.studies.protocol import Keyed
from mxstudy.tracking.mixed_backends import all_backends, backends_by_step
from mxstudy.train.runtime import resolve_device

# Config sections whose code runs the model on one rank, for which it needs unsharded weights.
WHOLE_MODEL = ("probe.saturation", "probe.gradient_bias", "evaluation")


def check(config: Pretrain, ranks: int = 1) -> None:
    """Raise ConfigError for anything that is wrong and can be known before a run on this number of ranks."""
    backends_over(config, ranks)
    for name in WHOLE_MODEL if ranks > 1 else ():
        require(
            attrgetter(name)(config).every_steps == 0,
            f"{name}.every_steps: it needs all weights on one GPU, but each of {ranks} ranks has only its shards; set "
            "it to 0, or train on one rank. +experiment=olmes evaluates checkpoints of any run",
        )
    check_routing(config)
    if config.evaluation.every_steps:
        questions.check(config.evaluation)
    sizes = {schemas.Bytes: lambda t: 257, schemas.TrainedBPE: lambda t: t.vocab_size}
    vocab_size = sizes.get(type(config.tokenizer))
    if vocab_size is not None:
        check_vocabulary(config, vocab_size(config.tokenizer))


def check_routing(config: Pretrain) -> None:
    """Raise ConfigError for a probe of routers without routers."""
    require(
        config.model.mlp == "moe" or config.probe.routing.every_steps == 0,
        f"probe.routing.every_steps: model.mlp={config.model.mlp} has no router; set it to 0, or take model.mlp=moe",
    )


def backends_over(config: Pretrain, ranks: int) -> str | None:
    """Return the blocks' backends over all rows of the precision schedule. Raises ConfigError as `check_model` does."""
    read = repr((config.model, config.norm, config.precision, config.train, config.probe.saturation))
    return check_model(Keyed(read, config), resolve_device(config.train.device), ranks)


@functools.cache  # building a model takes 10 ms, and most jobs of a sweep have the same
def check_model(keyed: Keyed[Pretrain], device: torch.device, ranks: int) -> str | None:
    """Check model, norm, precision and train against each other; returns the blocks' backends over the schedule.

    `keyed`: a config by these four sections and `probe.saturation`. Raises ConfigError.
    """
    config = keyed.value
    check_starts(config.precision, config.train.steps)
    backends: list[tuple[int, str | None]] = []
    with torch.device("meta"):
        model = build_model(config)
    share = len(rows_of_rank(config.train, 0, ranks))
    tokens = (config.train.micro_batch_size or share) * config.train.sequence_length
    for row in config.precision.schedule:
        apply_precision(
            model,
            config.precision,
            row.from_step,
            config.train.compute,
            device,
            compiled=config.train.compile,
        )
        backends.append((row.from_step, all_backends(backends_of(model).values())))
        scaled = next(filter(None, map(scaled_operand, mixtures_of(model).values())), None)
        require(
            scaled is None or config.probe.saturation.every_steps == 0,
            f"probe.saturation.every_steps: it measures all experts together, and their {scaled} has a scale for each; "
            "set it to 0",
        )
        check_tokens(model, f"train.micro_batch_size: {tokens} tokens", tokens)
    return backends_by_step(backends)


def check_vocabulary(config: Pretrain, vocab_size: int) -> None:
    require(
        vocab_size <= config.model.vocab_size,
        f"model.vocab_size: {config.model.vocab_size} is smaller than the tokenizer's {vocab_size}",
    )


def build_model(config: Pretrain) -> Decoder:
    return Decoder(config.model, config.norm, config.precision.settings, DTYPES[config.train.compute])

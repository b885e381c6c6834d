"""Whether a pre-training can run, and which it is."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch

from mxstudy import config as schemas
from mxstudy.config import Pretrain
from mxstudy.data import corpus, tokenizer
from mxstudy.data.batches import rows_of_rank
from mxstudy.evaluation import questions
from mxstudy.model.decoder import Decoder
from mxstudy.model.precision import DTYPES, apply_precision, block_cast, check_starts, has_token_blocks
from mxstudy.reader import require
from mxstudy.train.runtime import resolve_device

# What runs the model by itself, with weights that a sharded one does not have.
WHOLE_MODEL = ("probe.saturation", "probe.gradient_bias", "evaluation")

# What `check_model` has passed: to make a model takes 10 ms, and jobs that differ in seeds and rates have the same.
_passed: set[str] = set()


def check(config: Pretrain, ranks: int = 1) -> None:
    """Everything that can be wrong and be known before a run over so many ranks: raises ConfigError."""
    device = resolve_device(config.train.device)
    parts = repr((config.model, config.norm, config.precision, config.train, device, ranks))
    if parts not in _passed:
        check_model(config, device, ranks)
        _passed.add(parts)
    for name in WHOLE_MODEL if ranks > 1 else ():
        require(
            attrgetter(name)(config).every_steps == 0,
            f"{name}.every_steps: it needs all weights on one GPU, and each of {ranks} ranks has but a part; set it "
            "to 0, or train on one. +experiment=olmes evaluates checkpoints of any run",
        )
    if config.evaluation.every_steps:
        questions.check(config.evaluation)
    vocab_size = {schemas.Bytes: lambda t: 257, schemas.TrainedBPE: lambda t: t.vocab_size}.get(type(config.tokenizer))
    if vocab_size is not None:
        check_vocabulary(config, vocab_size(config.tokenizer))


def check_model(config: Pretrain, device: torch.device, ranks: int) -> None:
    """What model, norm, precision and train decide alone."""
    check_starts(config.precision, config.train.steps)
    with torch.device("meta"):
        model = build_model(config)
    share = len(rows_of_rank(config.train, 0, ranks))
    tokens = (config.train.micro_batch_size or share) * config.train.sequence_length
    for row in config.precision.schedule:
        apply_precision(model, config.precision, row.from_step, config.train.compute, device)
        require(
            tokens % config.precision.block_size == 0 or not any(has_token_blocks(m) for m in model.modules()),
            f"train.micro_batch_size: {tokens} tokens do not divide into blocks of {config.precision.block_size}",
        )


def check_vocabulary(config: Pretrain, vocab_size: int) -> None:
    require(
        vocab_size <= config.model.vocab_size,
        f"model.vocab_size: {config.model.vocab_size} is smaller than the tokenizer's {vocab_size}",
    )


def identity_key(config: Pretrain) -> Any:
    """What `identity` depends on: it may hash every file of the corpus, and is asked once for all that share this."""
    return config.data, config.tokenizer, config.train.device


def identity(config: Pretrain) -> tuple[str, dict[str, Any]]:
    """Kind of device, and identity of corpus and tokenizer, as the fingerprint takes them."""
    return resolve_device(config.train.device).type, corpus.identity(config.data) | {
        "tokenizer": tokenizer.identity(config.tokenizer)
    }


def build_model(config: Pretrain) -> Decoder:
    return Decoder(config.model, config.norm, block_cast(config.precision), DTYPES[config.train.compute])

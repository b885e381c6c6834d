"""Check a pre-training config before it runs: model, precision, ranks, vocabulary and evaluation questions."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch

from mxstudy import config as schemas
from mxstudy.config import PrecisionRow, Pretrain, blend_of
from mxstudy.config.data import SMALLEST_BPE
from mxstudy.data import blends, corpus
from mxstudy.data.batches import Batches, rows_of_rank
from mxstudy.data.sampling import apportion
from mxstudy.data.shards import Shards, open_shards
from mxstudy.data.tokenizer import ByteTokenizer, load_pretrained
from mxstudy.evaluation import questions
from mxstudy.evaluation.generation import check_casts, check_prompts_of
from mxstudy.model.all_gather import ELSE, Width, check_all_gather
from mxstudy.model.backends import backends_of, describe_backends
from mxstudy.model.decoder import Decoder
from mxstudy.model.describe_precision import describe
from mxstudy.model.feed_forward import MLPS
from mxstudy.model.fused_block import recompute_mlps
from mxstudy.model.moe import mixtures_of, scaled_by_columns
from mxstudy.model.precision import apply_precision, check_starts, check_tokens
from mxstudy.model.vector_settings import norms_of
from mxstudy.probes.gain_casts import check_gain_cast
from mxstudy.probes.shadow import check_sequence
from mxstudy.reader import ConfigError, require
from mxstudy.studies.folders import check_folder
from mxstudy.studies.pretrain.built import build_model, parameters_of, sampling_of, size_text
from mxstudy.studies.protocol import Keyed, lines_by_step
from mxstudy.tracking.mixed_backends import all_backends, backends_by_step
from mxstudy.train.runtime import is_planned, resolve_device

READ_BYTES = 2**20  # of text files, which are read when a run is planned, to know how much is kept for validation
UNDIVIDED = r"model\.hidden_size: (\d+) does not divide into blocks of (\d+)"  # what model/norm.py raises
# Config sections whose code runs the model on one rank, for which it needs unsharded weights.
WHOLE_MODEL = ("probe.saturation", "probe.gradient_bias", "evaluation", "sample")


def check(config: Pretrain, ranks: int = 1) -> None:
    """Raise ConfigError for any error that can be found before a run on this number of ranks."""
    backends_over(config, ranks)
    sampling_of(config)
    for name in WHOLE_MODEL if ranks > 1 else ():
        require(
            attrgetter(name)(config).every_steps == 0,
            f"{name}.every_steps: it needs all weights on one GPU, but each of {ranks} ranks has only its shards; set "
            "it to 0, or train on one rank. +experiment=olmes evaluates checkpoints of any run, +experiment=generate "
            "continues a prompt with them",
        )
    require(
        ranks == 1 or config.precision.gain is None,
        f"precision.gain: {config.precision.gain} rounds gains from FP32, but each of {ranks} ranks gathers them in "
        "train.compute; leave it out, or train on one rank",
    )
    check_routing(config)
    if config.evaluation.every_steps:
        questions.check(config.evaluation)
    if config.sample.every_steps:
        check_prompts(config)
    check_vocabulary(config, most_ids(config.tokenizer))
    if ranks == 1:  # else a process that plans has done it
        keyed = Keyed(repr((config.data, config.tokenizer, config.cache_dir)), config)
        check_corpora(keyed, Path.cwd(), is_planned())
        check_length(config, prepared(keyed, Path.cwd()))


def check_routing(config: Pretrain) -> None:
    """Raise ConfigError if the probe of routers is on and the model has none."""
    require(
        config.model.mlp == "moe" or config.probe.routing.every_steps == 0,
        f"probe.routing.every_steps: model.mlp={config.model.mlp} has no router; set it to 0, or take model.mlp=moe",
    )


def backends_over(config: Pretrain, ranks: int) -> str | None:
    """Return the blocks' backends over all rows of the precision schedule. Raises ConfigError as `check_model` does."""
    check_starts(config.precision, config.train.steps)
    return check_model(by_model(config), resolve_device(config.train.device), ranks).backends


def backend_notes(config: Pretrain) -> list[str]:
    """Return a line for each group of blocks that the reference computes, wholly or in part, with the reason."""
    return check_model(by_model(config), resolve_device(config.train.device), 1).notes


@contextmanager
def naming_a_size() -> Iterator[None]:
    """Extend the ConfigError of a norm whose blocks do not divide the hidden size: add a hidden size that fits."""
    try:
        yield
    except ConfigError as error:
        if found := re.fullmatch(UNDIVIDED, str(error)):
            size, block = map(int, found.groups())
            fits = math.ceil(size / block) * block
            raise ConfigError(f"{error}, as the norm needs; model.hidden_size={fits} does") from None
        raise


def by_model(config: Pretrain) -> Keyed[Pretrain]:
    """Return the config, keyed by the values that decide model, micro-batch and the result of `check_model`.

    These are four sections without the number of steps, the number of sequences of a validation, and three probes.
    """
    train = vars(config.train) | {"steps": None}
    probes = (config.probe.saturation, config.probe.last_bin, config.probe.gradient_bias)
    others = (config.validation.sequences, probes)
    return Keyed(repr((config.model, config.norm, config.precision, train, others)), config)


class AppliedSchedule(NamedTuple):
    """The blocks' backends over a precision schedule, and the lines that describe those with a reason."""

    backends: str | None
    notes: list[str]


def applied(config: Pretrain, device: torch.device) -> Iterator[tuple[PrecisionRow, Decoder, dict[str, str]]]:
    """Yield the model, on the meta device, under each row of the precision schedule, with the recipe of each linear.

    Raises ConfigError.
    """
    with torch.device("meta"), naming_a_size():
        model = build_model(config)
    for row in config.precision.schedule:
        with naming_a_size():
            recipes = apply_precision(
                model,
                config.precision,
                row.from_step,
                config.train.compute,
                device,
                compiled=config.train.compile,
                sequence_length=config.train.sequence_length,
            )
        recompute_mlps(model, config.train.recompute_mlp)
        yield row, model, recipes


def plan(config: Pretrain) -> list[str]:
    """Return the lines of the precision plan as applied, of each row of the schedule."""
    rows = applied(config, resolve_device(config.train.device))
    return lines_by_step([(row.from_step, describe(model, recipes)) for row, model, recipes in rows])


@functools.cache  # building a model takes 10 ms, and most jobs of a sweep have the same
def check_model(keyed: Keyed[Pretrain], device: torch.device, ranks: int) -> AppliedSchedule:
    """Check model, norm, precision and train against each other. Return what the schedule makes of the model.

    Raises ConfigError.
    """
    config = keyed.value
    backends: list[tuple[int, str | None]] = []
    notes: list[str] = []
    widths: list[dict[str, Width]] = []
    share = len(rows_of_rank(config.train, 0, ranks))
    tokens = (config.train.micro_batch_size or share) * config.train.sequence_length
    for row, model, _ in applied(config, device):
        if config.train.all_gather == "mx":
            widths.append(check_all_gather(model, ranks))
            require(
                widths[0] == widths[-1],
                f"train.all_gather: mx must gather the same number of bytes in every step, but the row of "
                f"precision.schedule from step {row.from_step} on has another; give all rows formats of as many bits "
                f"in equal blocks, or {ELSE}",
            )
        backends.append((row.from_step, all_backends(backends_of(model).values())))
        notes += [line for line in describe_backends(model) if line.endswith(")")]
        experts = (scaled_by_columns(mixture.up, mixture.w2) for mixture in mixtures_of(model).values())
        columns = next(filter(None, experts), None)
        require(
            columns is None or config.probe.saturation.every_steps == 0,
            f"probe.saturation.every_steps: it casts all experts at once, and their {columns} has a scale for each "
            "column of an expert; set it to 0, or take outer_scale: tensor, one for each expert",
        )
        for name, (norm, _) in norms_of(model).items() if config.probe.last_bin.every_steps else ():
            if norm.rounding is not None and norm.rounding.cast is not None:
                check_gain_cast(name, norm.rounding.cast, "precision.gain")
        check_tokens(model, f"train.micro_batch_size: {tokens} tokens", tokens)
        if last := config.validation.sequences % (config.train.micro_batch_size or share):
            remaining = last * config.train.sequence_length
            said = f"validation.sequences: the last micro-batch's {remaining} tokens"
            check_tokens(model, said, remaining, forward=True)
        if config.probe.saturation.every_steps or config.probe.gradient_bias.every_steps:
            check_sequence(model, config.train.sequence_length)
    return AppliedSchedule(backends_by_step(backends), list(dict.fromkeys(notes)))


@functools.cache  # a sweep has many jobs of one tokenizer
def most_ids(chosen: schemas.Tokenizer) -> int:
    """Return the largest number of ids that a tokenizer can have. Raises ConfigError for one that cannot be loaded."""
    if isinstance(chosen, schemas.Pretrained):
        return load_pretrained(chosen).vocab_size
    return chosen.vocab_size if isinstance(chosen, schemas.TrainedBPE) else SMALLEST_BPE


def check_prompts(config: Pretrain) -> None:
    """Raise ConfigError if a text cannot be written during the training, or a prompt is too long for it.

    The length of a prompt under a tokenizer that is not trained yet is checked when the run begins.
    """
    check_casts(config.precision, config.precision.schedule)
    if not isinstance(config.tokenizer, schemas.TrainedBPE):
        chosen = config.tokenizer
        own = load_pretrained(chosen) if isinstance(chosen, schemas.Pretrained) else ByteTokenizer()
        check_prompts_of(config.sample, own, config.train.sequence_length)


@functools.cache  # a corpus may have thousands of files, and `here` is where its paths begin
def check_corpora(keyed: Keyed[Pretrain], here: Path, elsewhere: bool) -> None:
    """Raise ConfigError unless each corpus is prepared, or can be: there is a cache, and local files have first rows.

    The hub is not asked, because a run may be planned without a network; `+experiment=prepare_data` asks it.
    """
    config = keyed.value
    for name, one in blend_of(config.data).corpora.items():
        if name not in prepared(keyed, here):
            if not elsewhere:  # another machine may have a disk that this one lacks
                check_folder("cache_dir", Path(config.cache_dir))
            if corpus.is_local(one):
                with blends.keys_of(config.data, name):
                    corpus.check(one)


@functools.cache
def prepared(keyed: Keyed[Pretrain], here: Path) -> dict[str, Shards]:
    """Return the shards of the corpora that are prepared, by name. Raises ConfigError for damaged ones."""
    config = keyed.value
    folders = blends.locate(config.data, config.tokenizer, Path(config.cache_dir))
    # unlike Path.exists, os.path.exists does not raise for a path that is too long
    return {name: open_shards(folder) for name, folder in folders.items() if os.path.exists(folder)}


def check_length(config: Pretrain, shards: Mapping[str, Shards]) -> None:
    """Raise ConfigError if a corpus certainly has too few tokens; `shards`: those of prepared corpora.

    If all corpora are prepared, the check is exact. Else only plain text files have bounds, under a tokenizer that
    makes at most one token of a byte. The number of tokens of any other corpus is known when the run has tokenised it,
    which it does first.
    """
    corpora, length = blend_of(config.data).corpora, config.train.sequence_length
    if shards.keys() == corpora.keys():
        Batches(shards, sampling_of(config), length).validation(config.validation.sequences)
        return
    for name, one in corpora.items():
        most = most_tokens(one, config.tokenizer)
        with blends.keys_of(config.data, name):
            require(
                most > length,
                f"data.paths: these files have at most {most:,} tokens, fewer than the {length:,} + 1 of "
                "train.sequence_length; give more text",
            )
            share = apportion(sampling_of(config).samples, config.validation.sequences)[name]
            held_out = most_held_out(one, config.tokenizer)
            require(
                held_out > share * length,
                f"validation.sequences: {share} sequences of {length} tokens are more than the at most {held_out:,} "
                f"tokens of text for validation{f' of {name}' if len(corpora) > 1 else ''}; ask for fewer, keep more "
                "text for it (data.validation_fraction), or name some of your files for it (data.validation_paths)",
            )


def most_tokens(data: schemas.Data, chosen: schemas.Tokenizer) -> float:
    """Return the most tokens that a corpus can have: bytes plus an EOS for each local text file, else infinity."""
    if not isinstance(data, schemas.Files) or data.format != "text" or isinstance(chosen, schemas.Pretrained):
        return math.inf
    return sum(os.path.getsize(name) + 1 for name in corpus.source_of(data).parts)


def most_held_out(data: schemas.Data, chosen: schemas.Tokenizer) -> float:
    """Return the largest number of validation tokens that local text files of READ_BYTES can have, else infinity.

    Raises ConfigError if these files have no text.
    """
    if most_tokens(data, chosen) > READ_BYTES:
        return math.inf
    documents = list(corpus.unique_documents(data))
    require(bool(documents), "data: the corpus is empty: no document has text")
    return sum(len(text.encode()) + 1 for split, text in documents if split == "validation")


def check_vocabulary(config: Pretrain, vocab_size: int) -> None:
    require(
        vocab_size <= config.model.vocab_size,
        f"model.vocab_size: {config.model.vocab_size} is smaller than the tokenizer's {vocab_size}",
    )


def flops_per_token(config: Pretrain) -> int:
    """Return the FLOPs of forward and backward of one token, without recomputation."""
    return counted(config)[0]


def flops_again(config: Pretrain) -> int:
    """Return the FLOPs per token of what the backward computes again; MFU does not count them."""
    model = config.model
    if config.train.activation_checkpointing == "full":
        return flops_per_token(config) // 3 - 2 * model.hidden_size * model.vocab_size
    if not config.train.recompute_mlp:
        return 0
    return config.train.recompute_mlp * 2 * model.hidden_size * MLPS[model.mlp].parts * model.ffn_size


def recomputation(config: Pretrain) -> str:
    """Return what the backward computes again, with its FLOPs over those of forward and backward, or "" if nothing."""
    again, train = flops_again(config), config.train
    if not again:
        return ""
    if train.activation_checkpointing == "full":
        key, what = "activation_checkpointing=full", "the whole forward of all blocks"
    else:
        blocks = f"{train.recompute_mlp} of {config.model.num_layers} blocks"
        key, what = f"recompute_mlp={train.recompute_mlp}", f"the product of the MLP's first linear in {blocks}"
    more = f"{again / flops_per_token(config):.1%} more FLOPs, which MFU does not count"
    return f"train.{key}: the backward computes {what} again, {more}"


def size(config: Pretrain) -> str:
    """Return the number of the model's parameters as text."""
    return counted(config)[1]


def counted(config: Pretrain) -> tuple[int, str]:
    """Return the FLOPs of a token and the size as text, which are the same in any precision."""
    return counted_on_meta(Keyed(repr((config.model, config.norm)), config), config.train.sequence_length)


@functools.cache
def counted_on_meta(keyed: Keyed[Pretrain], sequence_length: int) -> tuple[int, str]:
    with torch.device("meta"):
        model = build_model(keyed.value)
    return model.flops_per_token(sequence_length), size_text(parameters_of(model))

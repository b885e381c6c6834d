"""Run a pre-training: one decoder, one norm, one precision plan, one corpus or a blend of several.

Arms of a comparison differ only in their configs: the same seed gives every arm the same initial weights and batches,
and norm and linears are the same fused modules in all arms.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mxstudy.config import Pretrain
from mxstudy.data import blends, tokenizer
from mxstudy.data.batches import Batches
from mxstudy.data.sampling import Sampling
from mxstudy.data.shards import Shards, verify
from mxstudy.distributed import all_of, is_first, on_first_rank, world_size
from mxstudy.evaluation.generation import Text, blocks, sampler_of
from mxstudy.model.all_gather import gather_in_mx
from mxstudy.model.decoder import Decoder
from mxstudy.model.describe_precision import describe
from mxstudy.probes.base import Probe
from mxstudy.probes.build import build_probes, build_spikes
from mxstudy.probes.spike_watch import SpikeWatch
from mxstudy.probes.stragglers import Ranks
from mxstudy.reader import ConfigError, plain, require
from mxstudy.small_files import read_json
from mxstudy.studies.pretrain.built import build_model, parameters_of, sampling_of, size_text
from mxstudy.studies.pretrain.check import check, check_vocabulary, recomputation
from mxstudy.tracking.folder import CHECKPOINT, RunFolder
from mxstudy.tracking.journal import Row, first_missing, read_journal
from mxstudy.train.checkpoint import Checkpoints, state_tensors
from mxstudy.train.loop import CORPORA, TrainingRun, not_measured, set_precision, train
from mxstudy.train.optimizer import build_optimizer, materialize_state
from mxstudy.train.parallel import mesh_of_ranks, parallelize
from mxstudy.train.process_group import process_group
from mxstudy.train.progress import Progress
from mxstudy.train.recorder import Follower, Recorder, TensorsOf, record_end
from mxstudy.train.runtime import configure_torch, resolve_device
from mxstudy.train.signals import Leave
from mxstudy.whole_files import replace_file

SHARDS = "shards.json"  # the manifest of the shards that the run began with


def run(config: Pretrain, folder: RunFolder, label: str) -> str:
    """Train, or resume from the last checkpoint. Return finished, diverged or preempted.

    If several processes were started together, each calls this, and has a share of the model and the batches.
    """
    device = resolve_device(config.train.device)
    configure_torch(config.train.compile, config.train.deterministic)
    with process_group(device, folder), writer(folder):
        if world_size() > 1:
            check(config, world_size())
        report = partial(print, flush=True) if is_first() else silence
        on_first_rank(lambda: folder.update(state="running", steps=config.train.steps, reason=None))
        shards = dict(blends.prepare(config.data, config.tokenizer, Path(config.cache_dir), report))
        tokenizer_of_run = next(iter(shards.values())).tokenizer()  # the same in all
        check_vocabulary(config, tokenizer_of_run.vocab_size)
        on_first_rank(lambda: keep_inputs(folder, shards, tokenizer_of_run, config.train.verify))
        model = initial_model(config, device)
        optimizer = build_optimizer(model, config.optimizer)
        tensors = partial(state_tensors, model, optimizer)
        checkpoints, start = from_last_checkpoint(config, folder, optimizer, tensors)
        plan = set_precision(model, config, start, device)
        about = parameters_of(model)
        for line in announced(config, about, device, describe(model, plan["precision"])):
            report(line)
        batches = Batches(shards, sampling_of(config), config.train.sequence_length)
        for line in phases_of(batches.sampling) if len(shards) > 1 else ():
            report(line)
        batches.validation(config.validation.sequences)  # if too few, raises now, not after the training
        probes = [*probes_of_ranks(config), *build_probes(config.probe)]  # the memory probe resets the peak
        about |= {"ranks": world_size(), "hosts": all_of(socket.gethostname())}
        shares = batches.validation_shares(config.validation.sequences)
        about |= {"unigram_entropy_nats": blends.unigram_entropy_nats(shards, shares, "validation")}
        about |= {"data": data_of(shards, batches.sampling)} | plan
        with Leave() as leave, recorder_of(config, folder, label, start, checkpoints, tensors) as recorder:
            recorder.record({"step": start} | about)
            spikes = spikes_of(config, probes, folder, checkpoints) if is_first() else None
            evaluate = evaluation_of(config, model, tokenizer_of_run, recorder.measuring)
            texts = texts_of(config, model, tokenizer_of_run)
            running = TrainingRun(config, model, optimizer, batches, device, recorder, probes, spikes, evaluate, texts)
            is_over = start == config.train.steps  # it stopped in its last measurements
            lacks = not_measured(read_journal(folder.journal_path), start - 1) if is_over else ()
            state = train(running, start, leave, lacks)
            why = divergence(read_journal(folder.journal_path)) if state == "diverged" else None
            record_end(recorder, folder, state, why, leave)
    return state


def from_last_checkpoint(
    config: Pretrain, folder: RunFolder, optimizer: torch.optim.Optimizer, tensors: TensorsOf
) -> tuple[Checkpoints, int]:
    """Load the run's last checkpoint into its `tensors`, if it has one. Return its checkpoints and its next step."""
    fingerprint, keep_last = folder.status().fingerprint, config.checkpoint.keep_last
    checkpoints = Checkpoints(folder.checkpoints, fingerprint, plain(config), keep_last)
    latest = checkpoints.latest()
    if latest:
        materialize_state(optimizer)
    start = checkpoints.load(latest, tensors()) if latest else 0
    on_first_rank(lambda: check_journal(folder, start))
    return checkpoints, start


def announced(config: Pretrain, about: Row, device: torch.device, described: str) -> Iterator[str]:
    """Yield what a run prints before it trains: its size, its precision, and what it computes twice or not at all."""
    yield f"{size_text(about)} on {world_size()} x {device}\n{described}"
    if again := recomputation(config):
        yield again
    if config.train.all_gather == "mx" and world_size() == 1:
        yield "train.all_gather=mx: one process has all weights, so nothing is gathered"


def silence(line: str) -> None:
    """Print nothing: the first rank prints the line."""


@contextmanager
def writer(folder: RunFolder) -> Iterator[None]:
    """Hold the folder's lock and keep its heartbeat within the block, on the first rank; do nothing on the others."""
    with ExitStack() as stack:
        if is_first():
            stack.enter_context(folder.lock())
            stack.enter_context(folder.heartbeat())
        yield


def keep_inputs(folder: RunFolder, shards: Mapping[str, Shards], own: tokenizer.Tokenizer, verified: bool) -> None:
    """Save the shards' manifests and the tokenizer in the run's folder; when it starts, verify the shards if asked."""
    if not verified:
        print("train.verify=false: the shards are not compared with their sha256", flush=True)
    elif not (folder.path / SHARDS).exists():
        for one in shards.values():
            verify(one)
    pin_shards(folder, shards)
    own.save(folder.tokenizer_path)  # so that a checkpoint can be evaluated without the corpus


def evaluation_of(
    config: Pretrain, model: Decoder, own: tokenizer.Tokenizer, tell: Callable[[str, int, int], None]
) -> Callable[[], dict[str, float]] | None:
    """Return a function that returns the model's scores, or None if the run is never evaluated."""
    if not config.evaluation.every_steps:
        return None
    from mxstudy.evaluation.during_training import build_evaluation  # here: lm-eval takes a second to import

    return build_evaluation(config.evaluation, model, own, config.train.sequence_length, tell)


def texts_of(config: Pretrain, model: Decoder, own: tokenizer.Tokenizer) -> Callable[[], list[Row]] | None:
    """Return a function that returns the texts that the model writes, or None if it writes none."""
    if not config.sample.every_steps:
        return None
    write = sampler_of(config.sample, model, own, config.train.sequence_length)
    return lambda: [text._asdict() for text in write()]


def initial_model(config: Pretrain, device: torch.device) -> Decoder:
    """Return the model with its initial weights, compiled and sharded as configured.

    With several ranks, no rank ever holds all weights.
    """
    with torch.device("meta"):
        model = build_model(config)
    parallelize(model, config.train, mesh_of_ranks(device))
    model.to_empty(device=device)
    model.init_weights(config.seed)
    if config.train.all_gather == "mx" and world_size() > 1:
        gather_in_mx(model)
    return model


def pin_shards(folder: RunFolder, shards: Mapping[str, Shards]) -> None:
    """Record the shards' manifests at the start. Raises ConfigError if a resumed run finds other shards."""
    path, manifest = folder.path / SHARDS, json.loads(json.dumps(blends.manifest_of(shards)))
    if not path.exists():
        replace_file(path, json.dumps(manifest, indent=2))
    where = ", ".join(str(one.folder) for one in shards.values())
    require(
        read_json(path, "rerun=true starts over") == manifest,
        f"data: the shards in {where} are not those that {folder.path} began with; rerun=true starts over",
    )


def data_of(shards: Mapping[str, Shards], sampling: Sampling) -> dict[str, Any]:
    """Return the journal's record of the data: each corpus's shards, and its samples in each phase."""
    corpora = {
        name: {"shards": one.folder.name, "tokens": one.manifest["splits"]["train"]["tokens"]}
        for name, one in sorted(shards.items())
    }
    phases = zip(sampling.first_steps, sampling.counts, strict=False)  # the last entry of first_steps is the end
    return {"corpora": corpora, "phases": [{"from_step": step, "samples": counts} for step, counts in phases]}


def phases_of(sampling: Sampling) -> Iterator[str]:
    """Yield a line for each phase, with the shares of its corpora."""
    for step, counts, size in zip(sampling.first_steps, sampling.counts, sampling.sizes, strict=False):
        yield f"data from step {step}: " + ", ".join(f"{name} {n / size:.2%}" for name, n in sorted(counts.items()))


def used_of(taken: Mapping[str, float]) -> str:
    """Return the tokens used of each corpus, from the journal's last record, e.g. 'pysource 122,880 (0.01 epochs)'."""
    names = sorted(key.removesuffix("/tokens") for key in taken if key.endswith("/tokens"))
    return ", ".join(f"{name} {taken[f'{name}/tokens']:,.0f} ({taken[f'{name}/epochs']:.2f} epochs)" for name in names)


def check_journal(folder: RunFolder, start: int) -> None:
    """Raise ConfigError if the journal lacks a step before `start`, at which a resumed run continues."""
    path = folder.journal_path
    missing = first_missing(read_journal(path) if path.exists() else [], start) if start else None
    if missing is not None:
        reached = max((step for step in folder.checkpoint_steps() if step <= missing), default=None)
        go_on = f"{CHECKPOINT}{reached:08d}" if reached is not None else "the beginning"
        raise ConfigError(
            f"{path}: step {missing} is missing, and the newest checkpoint is at step {start}; to go on "
            f"from {go_on}, delete the folders of later steps in {folder.checkpoints}"
        )


def recorder_of(
    config: Pretrain, folder: RunFolder, label: str, start: int, checkpoints: Checkpoints, tensors: TensorsOf
) -> Recorder | Follower:
    """Return the recorder of this rank: on the first one that writes and mirrors to MLflow, else a `Follower`."""
    if not is_first():
        return Follower(checkpoints, tensors)
    progress = Progress(label, config.train.steps)
    return PretrainRecorder(config, folder, progress, start, checkpoints, tensors)


def probes_of_ranks(config: Pretrain) -> list[Probe]:
    return [Ranks(config.train.batch_size * config.train.sequence_length)] if world_size() > 1 else []


def spikes_of(config: Pretrain, probes: list[Probe], folder: RunFolder, checkpoints: Checkpoints) -> SpikeWatch | None:
    losses = [row["loss"] for row in read_journal(folder.journal_path) if "loss" in row]
    return build_spikes(config.probe, probes, folder.path, checkpoints.pin_latest, losses)


class PretrainRecorder(Recorder):
    def record(self, row: dict[str, Any]) -> None:
        super().record(row)
        if "validation_loss" in row and row["step"] + 1 == self.progress.steps:
            print(f"validation loss {row['validation_loss']:.4f} nats a token", flush=True)
        if "texts" in row:
            self.progress.close()
            print(
                "\n".join([f"written after {row['step'] + 1} steps", *blocks(Text(**one) for one in row["texts"])]),
                flush=True,
            )
        if row.get("probe") == "evaluation":
            self.progress.close()
            print(
                f"scores, and bits a character, after {row['step'] + 1} steps: {scores_text(row['values'])}", flush=True
            )
        if row.get("probe") == CORPORA:
            print(f"tokens used: {used_of(row['values'])}", flush=True)
        if "loss" in row:
            self.show(row)


def scores_text(values: dict[str, float]) -> str:
    """Return an evaluation's scores as text: 'csqa cf 0.213 (chance 0.200, 2.71 bits), mmlu cf ...'."""
    shown = []
    for name in (key.removesuffix("/score") for key in values if key.endswith("/score")):
        score, chance, bits = (
            values.get(f"{name}/{measure}", math.nan) for measure in ("score", "chance", "bits_per_char")
        )
        shown.append(f"{name.replace('.', ' ')} {score:.3f} (chance {chance:.3f}, {bits:.2f} bits)")
    return ", ".join(shown)


def divergence(rows: list[dict[str, Any]]) -> str:
    """Return the value that was not finite and the loss before it, e.g. 'loss nan at step 7; loss 9.1301 at step 6'."""
    *before, last = [row for row in rows if "loss" in row]
    what = next(key for key in ("loss", "grad_norm") if not math.isfinite(last[key]))
    then = f"; loss {before[-1]['loss']:.4f} at step {before[-1]['step']}" if before else ""
    return f"{what} {last[what]} at step {last['step']}{then}"

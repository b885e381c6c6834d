"""Make a decoder small enough to train in a test, on batches drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mxstudy import config
from mxstudy.model.decoder import Decoder
from mxstudy.model.precision import DTYPES
from mxstudy.probes.build import build_probes
from mxstudy.train.loop import TrainingRun, set_precision, train
from mxstudy.train.optimizer import build_optimizer
from mxstudy.train.parallel import parallelize
from mxstudy.train.runtime import configure_torch
from mxstudy.train.signals import Leave

MODEL = config.Decoder(hidden_size=64, ffn_size=96, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=128)
MXNORM, RMSNORM = config.MXNorm(p=2.0), config.RMSNorm()


def precision(*rows: tuple[int, str], pattern: str = "layers.*") -> config.Precision:
    return config.Precision(schedule=tuple(config.PrecisionRow(from_step=s, plan={pattern: row}) for s, row in rows))


CONFIG = config.Pretrain(
    model=MODEL,
    norm=MXNORM,
    precision=precision((0, "mxfp8")),
    data=config.PySource(),
    tokenizer=config.Bytes(),
    optimizer=config.AdamW(lr=1e-3),
    schedule=config.Schedule(kind="cosine"),
    train=config.Train(steps=20, batch_size=4, sequence_length=64, device="cpu"),
    validation=config.Validation(sequences=4),
)

# What is compiled is small, because Dynamo takes seconds for each block.
ONE_BLOCK = replace(CONFIG, model=replace(MODEL, num_layers=1))

# Module by module, so that hooks of linears are called.
REFERENCE = replace(CONFIG, precision=replace(CONFIG.precision, backend="reference"))


class Copies:
    """Random tokens, each repeated once, so that there is something to learn."""

    def train(self, step: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 128, (4, 33), generator=generator).repeat_interleave(2, dim=1)[start:stop]
        return tokens[:, :64], tokens[:, 1:65]

    def validation(self, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.train(10**6, 0, sequences)

    def taken(self, step: int) -> dict[str, float]:
        return {"copies/tokens": step * 4 * 64}


@dataclass
class Memory:
    """A recorder that keeps everything in lists."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)

    def record(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def measuring(self, what: str, done: int, total: int) -> None:
        """Do nothing, because no test looks at progress."""

    def save(self, step: int) -> None:
        self.saved.append(step)

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows if "loss" in row]


def build(settings: config.Pretrain = CONFIG, **train_changes: Any) -> tuple[TrainingRun, Memory]:
    settings = replace(settings, train=replace(settings.train, **train_changes))
    configure_torch(settings.train.compile, settings.train.deterministic)
    compute = settings.train.compute
    model = Decoder(settings.model, settings.norm, settings.precision.settings, DTYPES[compute])
    model.init_weights(settings.seed)
    set_precision(model, settings, 0, torch.device("cpu"))
    parallelize(model, settings.train)
    memory = Memory()
    optimizer = build_optimizer(model, settings.optimizer)
    probes = build_probes(settings.probe)
    return TrainingRun(settings, model, optimizer, Copies(), torch.device("cpu"), memory, probes), memory


def losses(settings: config.Pretrain = CONFIG, **train_changes: Any) -> list[float]:
    run, memory = build(settings, **train_changes)
    assert train(run, 0, Leave()) == "finished"
    return memory.losses

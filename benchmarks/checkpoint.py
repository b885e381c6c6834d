"""Measure the seconds of saving and loading a checkpoint, with and without the checksums of its tensors.

The tensors are those of a decoder and its AdamW: weights and two moments in FP32, random. Saving ends when everything
is on the disk. A checkpoint is loaded once from the disk, as a resumed run finds it (the system is told to forget its
files first), and once from memory, where reading costs least and checksums weigh most. Without checksums, torch's own
reader loads it. Rounds with and without checksums take turns. What checksums add is the difference of the fastest
rounds, because all other work of the machine and its disk only adds time.

All of llama_1b is 17 GiB, and takes 51 GiB of memory while it is written. Each of its rounds takes minutes, most of
them for the disk. --seconds stops before a round that would end later, but never before the first.

python -m benchmarks.checkpoint [--model llama_1b] [--layers 8] [--vocabulary 32000] [--rounds 3] [--seconds 500]
    [--json PATH]
"""

from __future__ import annotations

import math
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.page_cache import forget
from benchmarks.report import machine, measured, options_of, show
from benchmarks.training import LLAMAS, model_of
from mxstudy import config
from mxstudy.model.decoder import Decoder
from mxstudy.train import checkpoint
from mxstudy.train.checksums import Checksums, checksums_of

LIMIT = 0.1  # share of the time without checksums
Rounds = dict[bool, list[dict[str, float]]]  # {with checksums: seconds of each of KINDS and OWN, round by round}
KINDS = ("save", "load from disk", "load from memory")
OWN = "checksums of a save"  # a part of KINDS that the noise of a disk does not hide


def tensors_of(model: config.Decoder) -> dict[str, Tensor]:
    """Return the names and values of a training checkpoint's tensors. The values are random and repeat themselves."""
    with torch.device("meta"):
        decoder = Decoder(model, config.RMSNorm(), config.BlockCast(), torch.float32)
        shapes = {name: weight.shape for name, weight in decoder.named_parameters()}
    block = torch.randn(2**20)  # drawing billions of numbers takes minutes
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        names = (f"model.{name}", *(f"optimizer.{name}.{key}" for key in ("exp_avg", "exp_avg_sq")))
        tensors |= {each: repeated(block, shape) for each in names}
        tensors[f"optimizer.{name}.step"] = torch.tensor(1.0)
    return tensors


def repeated(block: Tensor, shape: torch.Size) -> Tensor:
    return block.repeat(-(-shape.numel() // block.numel()))[: shape.numel()].view(shape)


def seconds(do: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    do()
    return time.perf_counter() - began_s


def one_round(folder: Path, tensors: dict[str, Tensor], with_checksums: bool) -> dict[str, float]:
    """Return the seconds of each of KINDS, and of OWN."""
    shutil.rmtree(folder, ignore_errors=True)
    kept = checkpoint.Checkpoints(folder, "f" * 64, {}, keep_last=1)
    own_s = 0.0

    def timed(written: Mapping[Path, Mapping[str, Tensor]]) -> Checksums:
        nonlocal own_s
        began_s = time.perf_counter()
        found = checksums_of(written) if with_checksums else {}  # without recorded checksums a load compares nothing
        own_s = time.perf_counter() - began_s
        return found

    with patch.object(checkpoint, "checksums_of", timed):
        save_s = seconds(lambda: kept.save(1, tensors))
    path = folder / "step_00000001"
    forget(path)
    loads_s = [seconds(lambda: kept.load(path, tensors)) for _ in range(2)]
    return dict(zip((*KINDS, OWN), (save_s, *loads_s, own_s), strict=True))


def rounds_of(folder: Path, tensors: dict[str, Tensor], number: int, budget_s: float) -> Rounds:
    """Return the seconds of each round, without and with checksums, for as many rounds as the budget allows."""
    rounds: Rounds = {False: [], True: []}
    began_s, longest_s = time.perf_counter(), 0.0
    for done in range(number):
        round_s = time.perf_counter()
        if done and round_s - began_s + longest_s > budget_s:
            say(began_s, f"{done} of {number} rounds; another would end after {budget_s:.0f} s")
            break
        for with_checksums in (False, True) if done % 2 else (True, False):
            taken = one_round(folder, tensors, with_checksums)
            rounds[with_checksums].append(taken)
            took = ", ".join(f"{kind} {kind_s:.2f} s" for kind, kind_s in taken.items())
            say(began_s, f"round {done + 1} of {number}, {'with' if with_checksums else 'without'}: {took}")
        longest_s = max(longest_s, time.perf_counter() - round_s)
    return rounds


def say(began_s: float, what: str) -> None:
    print(f"{time.perf_counter() - began_s:6.1f} s  {what}", flush=True)


def rows_of(rounds: Rounds) -> list[dict[str, Any]]:
    """Return a row for each of KINDS: fastest, median and slowest round, and what checksums add to the fastest."""
    rows = []
    for kind in KINDS:
        without, with_them = ([each[kind] for each in rounds[key]] for key in (False, True))
        row: dict[str, Any] = {"what": kind}
        for name, values in (("without", without), ("with", with_them)):
            row |= {f"{name}_s": min(values), f"{name}_median_s": median(values), f"{name}_most_s": max(values)}
        added = min(with_them) / min(without) - 1
        rows.append(row | {"added": added, "within_limit": added <= LIMIT})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of("checkpoint", __doc__)
    parser.add_argument("--model", choices=LLAMAS, default="llama_1b")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--vocabulary", type=int, help="another than the model's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round that would end later")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: a temporary one")
    chosen = parser.parse_args(arguments)
    given = {"num_layers": chosen.layers, "vocab_size": chosen.vocabulary}
    model = replace(model_of(chosen.model), **{key: value for key, value in given.items() if value})
    began_s = time.perf_counter()
    tensors = tensors_of(model)
    sizes = {
        "parameters": sum(tensor.numel() for name, tensor in tensors.items() if name.startswith("model.")),
        "gib": sum(tensor.nbytes for tensor in tensors.values()) / 2**30,
    }
    say(began_s, f"made {sizes['gib']:.1f} GiB of tensors")
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        folder = Path(name) / "checkpoints"
        one_round(folder, {"model.one": torch.zeros(1)}, True)  # loads what is imported late
        rounds = rounds_of(folder, tensors, chosen.rounds, chosen.seconds)
    rows = rows_of(rounds)
    show(rows)
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    of_machine = machine() | {"peak_gib": peak_gib, "load_average": os.getloadavg()[0]}
    about = {"model": chosen.model, "layers": model.num_layers, "vocabulary": model.vocab_size}
    own = {"checksums_of_a_save_s": min(each[OWN] for each in rounds[True])}
    measured(rows, chosen.json, **about, **sizes, rounds=len(rounds[True]), **own, **of_machine)


if __name__ == "__main__":
    main()

"""Record digests of six steps of small models, in every precision and norm, which a change of the code must keep.

    python tests/digests.py --out FILE [--device cuda] [--compile] [--jobs 8] [PATTERN ...]
    python tests/digests.py --compare FILE FILE

The package is the one on PYTHONPATH, so that one copy of this file can test two commits in turn. It needs neither
pytest nor anything else that only tests have. A case has digests of its losses, of its last gradients and of its last
weights, 16 hexadecimal digits each, or the message with which it was refused. Numbers depend on the processor and on
torch's version, which the file names: compare only files in which these agree.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import multiprocessing
import os
import platform
import re
import sys
import time
import typing
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from digest_cases import STEPS, cases, chosen
from torch import Tensor, nn

from mxstudy import config
from mxstudy.config import read_run
from mxstudy.model.precision import apply_precision
from mxstudy.reader import ConfigError
from mxstudy.students.stack import Stack
from mxstudy.studies.pretrain.built import build_model
from mxstudy.train.optimizer import build_optimizer
from mxstudy.train.parallel import parallelize
from mxstudy.train.runtime import configure_torch

Record = dict[str, Any]
REFUSED = "refused"


def digest(tensors: Iterable[Tensor]) -> str:
    """Return sixteen digits of the sha256 of all bytes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def batches(run: config.Pretrain, device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield random tokens, each repeated once, so that there is something to learn."""
    shape = run.train.batch_size, run.train.sequence_length // 2 + 1
    for step in range(run.train.steps):
        draw = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, run.model.vocab_size, shape, generator=draw).repeat_interleave(2, dim=1).to(device)
        yield tokens[:, :-2], tokens[:, 1:-1]


def with_backend(run: config.Pretrain, backend: str) -> config.Pretrain:
    """Return the run with that backend, if a config can set it."""
    if backend == "auto" or "reference" not in backends():
        return run
    reference = dataclasses.replace(run.precision, backend="reference")  # type: ignore[arg-type]
    return dataclasses.replace(run, precision=reference)


def set_backend(model: nn.Module, backend: str) -> None:
    """Set the backend after `apply_precision`, where a config cannot."""
    if backend == "modules" and "reference" not in backends():
        for block in model.layers:  # type: ignore[union-attr]
            block.fused = None  # type: ignore[assignment]


def backends() -> tuple[str, ...]:
    return typing.get_args(typing.get_type_hints(config.Precision)["backend"])


def train_decoder(run: config.Pretrain, backend: str, device: torch.device) -> list[str]:
    """Return digests of losses, gradients and weights. Raises ConfigError for what cannot be had."""
    run = with_backend(run, backend)
    configure_torch(run.train.compile, run.train.deterministic)
    model = build_model(run)
    model.init_weights(run.seed)
    model.to(device)
    parallelize(model, run.train)
    optimizer = build_optimizer(model, run.optimizer)
    apply_precision(model, run.precision, 0, run.train.compute, device)
    set_backend(model, backend)
    losses = []
    for tokens_BT, targets_BT in batches(run, device):
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(tokens_BT).float().flatten(0, 1), targets_BT.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss)
    parameters = dict(sorted(model.named_parameters())).values()
    return [digest(losses), digest(p.grad for p in parameters if p.grad is not None), digest(parameters)]


def train_students(run: config.StudentTeacher, device: torch.device) -> list[str]:
    """Return the same for a stack, with gradients represented by their norms and the optimizer's moments."""
    configure_torch(run.train.compile)
    stack = Stack(run, device)
    losses, norms = [], []
    for _ in range(run.train.steps):
        stack.train_step()
        losses.append(stack.losses.clone())
        norms.append(stack.grad_norms.clone())
    state = dict(sorted(stack.named_state().items()))
    moments, weights = ([t for name, t in state.items() if name.startswith(of)] for of in ("optimizer.", "model."))
    return [digest(losses), digest([*norms, *moments]), digest(weights)]


def take_no_timings() -> None:
    """Stop Inductor from timing kernels to choose the fastest.

    The fastest may sum in another order, so chance would decide the bits.
    """
    import torch._inductor.config as inductor

    if hasattr(inductor, "deterministic"):
        inductor.deterministic = True


def run_case(name: str, device: str = "cpu", compile: bool = False) -> str:
    """Return the case's digests in a line, or its refusal, or the error that it ends in."""
    torch.set_num_threads(1)
    values, backend = cases(device)[name]
    values["train"] |= {"compile": compile, "device": device}
    if compile:
        take_no_timings()
    try:
        run = read_run(values)
        if isinstance(run, config.StudentTeacher):
            return " ".join(train_students(run, torch.device(device)))
        return " ".join(train_decoder(typing.cast(config.Pretrain, run), backend, torch.device(device)))
    except ConfigError:
        return REFUSED
    except Exception as error:  # the other cases continue
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"


# ------------------------------------------------------------------------------------------------------------- files


def machine(device: str = "cpu") -> dict[str, str]:
    """Return what the bits of a sum depend on beside the code: torch's build, and the kind of processor."""
    if device == "cuda":
        return {"torch": torch.__version__, "processor": torch.cuda.get_device_name()}
    said = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    known = dict(re.findall(r"^(vendor_id|cpu family|model|flags)\s*:\s*(.*)$", said, re.MULTILINE))
    wide = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in known.get("flags", "").split()]
    parts = [known.get("vendor_id", platform.machine()), *(known.get(key, "") for key in ("cpu family", "model"))]
    kind = [*parts, torch.backends.cpu.get_cpu_capability(), *wide]
    return {"torch": torch.__version__, "processor": " ".join(kind)}


def record(names: Sequence[str], device: str, compile: bool, jobs: int, out: Path | None = None) -> Record:
    """Return the records of all those cases.

    `out` is written anew after each case, in case the time runs out.
    """
    work = partial(run_case, device=device, compile=compile)
    recorded: Record = {"about": machine(device) | {"steps": STEPS, "compile": compile}, "cases": {}}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) if jobs > 1 else nullcontext() as pool:
        for name, said in zip(names, pool.map(work, names) if pool else map(work, names), strict=True):
            recorded["cases"][name] = said
            if out:
                out.write_text(to_json(recorded))
    return recorded


def to_json(recorded: Record) -> str:
    """Return the JSON with one line per case."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(said)}" for name, said in recorded["cases"].items())
    return f'{{\n "about": {json.dumps(recorded["about"])},\n "cases": {{\n{lines}\n }}\n}}\n'


def differences(one: Record, other: Record) -> list[str]:
    """Return a line for every case about which two records differ, or that only one of them has."""
    lines = [f"about: {one['about']} and {other['about']}"] if one["about"] != other["about"] else []
    parts = "losses", "gradients", "weights"
    for name in sorted(one["cases"].keys() | other["cases"].keys()):
        a, b = (record["cases"].get(name, "not there") for record in (one, other))
        if a == b:
            continue
        digests = [said.split() for said in (a, b)]
        if all(len(said) == 3 and re.fullmatch("[0-9a-f ]+", " ".join(said)) for said in digests):
            where = [part for part, x, y in zip(parts, *digests, strict=True) if x != y]
            lines.append(f"{name}: other {', '.join(where)}")
        else:
            lines.append(f"{name}: {a!r} and {b!r}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", help="cases, like 'decoder/auto/mxfp8/*'; all if none is given")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--compare", type=Path, nargs=2)
    given = parser.parse_args()
    if given.compare:
        records = [json.loads(path.read_text()) for path in given.compare]
        lines = differences(*records)
        one, other = (record["cases"].items() for record in records)
        print("\n".join([*lines, f"{len(lines)} differ, {len(one & other)} are the same"]))
        return int(bool(lines))
    began = time.perf_counter()
    if given.jobs > 1:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    names = chosen(given.patterns, given.device, given.compile)
    recorded = record(names, given.device, given.compile, given.jobs, given.out)
    said = list(recorded["cases"].values())
    failed = {name: text for name, text in recorded["cases"].items() if ":" in text}
    print("\n".join(f"{name}: {text}" for name, text in failed.items()), file=sys.stderr)
    print(
        f"{len(said)} cases, {said.count(REFUSED)} refused, {len(failed)} failed, {time.perf_counter() - began:.0f} s"
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

"""Measure requests per second of zero-shot scoring: our scorer, lm-eval's HFLM on the exported model, forwards alone.

All of them answer the same questions through lm-eval. HFLM tries each of several batch sizes once. Then the fastest of
these and all others take turns for some rounds. Only RMSNorm is exported exactly, so the checkpoint must have RMSNorm.
HFLM runs in bf16, our scorer in bf16 and in MXFP8, whatever the training was in. The floor is the forward passes of
our batches alone: no tokenizer, no lm-eval, no output head. over_hflm is the median of the quotients within a round,
least_over and most_over are the extremes, and the JSON has the seconds of every round (rounds_s).

python -m benchmarks.evaluation --checkpoint RUN [--data-dir DIR] [--limit 200] [--batch-sizes 64 256] [--json PATH]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lm_eval.api.model import LM

from benchmarks.report import measured, options_of, show
from benchmarks.timing import synchronize
from mxstudy import config
from mxstudy.config.precision_plan import BLOCKS
from mxstudy.data.tokenizer import Tokenizer
from mxstudy.evaluation import checkpoints, questions
from mxstudy.evaluation.checkpoints import Trained
from mxstudy.evaluation.hugging_face import export
from mxstudy.evaluation.lm import NativeLM
from mxstudy.evaluation.scorer import Scorer
from mxstudy.evaluation.suite import samples_of
from mxstudy.evaluation.templates import Question
from mxstudy.model.decoder import Decoder
from mxstudy.reader import ConfigError, read, require
from mxstudy.train.runtime import configure_torch, resolve_device

Asked = dict[str, dict[str, list[Question]]]  # {task: {subject: questions}}
Answering = Callable[[Asked], dict[str, Any]]
PRECISIONS = {"bf16": "bf16", "rmsnorm, mxfp8, compute bf16": "mxfp8"}  # {title of ours: precision of its blocks}


def answer(lm: LM, asked: Asked) -> dict[str, Any]:
    """Answer all questions in cloze form, and return requests, seconds, rate and the share of right answers."""
    began_s = time.perf_counter()
    samples = [samples_of(lm, task, "cf", groups) for task, groups in asked.items()]
    seconds = time.perf_counter() - began_s
    requests = sum(len(nats) for table in samples for column in ("nats", "alone") for nats in table[column])
    right = [right for table in samples for right in table["right"]]
    return rated(requests, seconds) | {"right": sum(right) / len(right)}


def rated(requests: int, seconds: float) -> dict[str, Any]:
    return {"requests": requests, "seconds": seconds, "requests_per_s": requests / seconds}


def ours(path: Path, trained: Trained, precision: str, device: torch.device, settings: config.Evaluation) -> Scorer:
    in_blocks = read(config.Precision, {"schedule": [{"plan": {BLOCKS: precision}}]})
    model = checkpoints.load(path, replace(trained, precision=in_blocks, compute="bf16"), device)
    return Scorer(model, trained.max_length, settings.tokens_per_batch)


def hflm(folder: Path, device: torch.device, batch_size: int, max_length: int) -> LM:
    from lm_eval.models.huggingface import HFLM
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    model: torch.nn.Module = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    settings = {"softmax_dtype": "float32", "add_bos_token": False, "max_length": max_length}
    return HFLM(pretrained=model.to(device).eval(), tokenizer=tokenizer, batch_size=batch_size, **settings)


class Timed(torch.nn.Module):
    """A decoder that measures the seconds of its forward passes up to the head."""

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        super().__init__()
        self.decoder, self.device, self.seconds = decoder, device, 0.0
        self.config, self.output, self.tok_embeddings = decoder.config, decoder.output, decoder.tok_embeddings

    def features(self, *inputs: Any) -> torch.Tensor:
        synchronize(self.device)
        began_s = time.perf_counter()
        features = self.decoder.features(*inputs)
        synchronize(self.device)
        self.seconds += time.perf_counter() - began_s
        return features


def contenders(
    path: Path, trained: Trained, device: torch.device, settings: config.Evaluation, batch_sizes: Sequence[int]
) -> Iterator[tuple[str, Answering]]:
    """Yield the name and the answering function of each contender, which is built when its turn comes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "exported"
        decoder = checkpoints.load(path, trained, torch.device("cpu"))
        export(decoder, trained.norm, trained.tokenizer, trained.max_length, folder, dtype="bfloat16")
        for batch_size in batch_sizes:
            lm = hflm(folder, device, batch_size, trained.max_length)
            yield f"HFLM, bf16, batch {batch_size}", partial(answer, lm)
    for title, precision in PRECISIONS.items():
        scorer = ours(path, trained, precision, device, settings)
        lm = NativeLM(scorer, trained.tokenizer)
        yield f"ours, {title}", partial(answer, lm)
        yield f"forwards of ours, {precision}, alone", partial(forwards, scorer, trained.tokenizer, device)


def forwards(scorer: Scorer, tokenizer: Tokenizer, device: torch.device, asked: Asked) -> dict[str, Any]:
    """Answer the questions with our scorer, counting only the seconds of its forward passes."""
    timed = Timed(scorer.model, device)
    counted = answer(NativeLM(replace(scorer, model=timed), tokenizer), asked)  # type: ignore[arg-type]
    return counted | rated(counted["requests"], timed.seconds)


def measure(path: Path, settings: config.Evaluation, batch_sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Return a row per contender. HFLM runs one round at every batch size, and all rounds at the fastest."""
    device = resolve_device("auto")
    configure_torch()
    trained = checkpoints.describe(path)
    if not isinstance(trained.norm, config.RMSNorm):
        raise ConfigError("--checkpoint: only RMSNorm is exported exactly; give a run with norm=rmsnorm")
    trained = replace(trained, norm=replace(trained.norm, fold_gain=False))
    asked = {name: questions.build_questions(name, "cf", settings) for name in questions.at_hand(settings)}
    warm_up = {name: {group: own[:4] for group, own in groups.items()} for name, groups in asked.items()}
    found: dict[str, Answering] = {}
    trials: list[dict[str, Any]] = []  # one for each of HFLM's batch sizes
    for name, answers in contenders(path, trained, device, settings, batch_sizes):
        if not name.startswith("HFLM"):
            answers(warm_up)
        elif (trial := tried(name, answers, warm_up, asked)) is not None:
            trials.append(trial)
        else:
            continue
        found[name] = answers
    require(bool(trials), "--batch-sizes: HFLM fits into the GPU's memory with none of them; give smaller ones")
    best = max(trials, key=lambda trial: trial["requests_per_s"])["who"]
    found = {name: answers for name, answers in found.items() if name == best or not name.startswith("HFLM")}
    torch.cuda.empty_cache()
    times: dict[str, list[dict[str, Any]]] = {name: [] for name in found}
    for number in range(rounds):
        for name, answers in found.items():
            times[name].append(answers(asked))
        took = ", ".join(f"{name} {own[-1]['seconds']:.2f} s" for name, own in times.items())
        print(f"round {number}: {took}", flush=True)
    rows = [row_of(name, own, times[best]) for name, own in times.items()]
    reached = next(each["requests_per_s"] for each in rows if each["who"] == best)
    others = [trial | {"over_hflm": trial["requests_per_s"] / reached} for trial in trials if trial["who"] != best]
    return others + rows


def tried(name: str, answers: Answering, warm_up: Asked, asked: Asked) -> dict[str, Any] | None:
    """Return the row of one round of HFLM, or None if its batches do not fit into the GPU's memory."""
    torch.cuda.empty_cache()
    try:
        answers(warm_up)
        once = answers(asked)
    except torch.OutOfMemoryError:
        print(f"{name}: does not fit into the GPU's memory", flush=True)
        return None
    print(f"{name}: {once['requests_per_s']:,.0f} requests/s in one round", flush=True)
    return {"who": name, **once, "least_s": once["seconds"], "most_s": once["seconds"], "rounds": 1}


def row_of(name: str, times: Sequence[dict[str, Any]], of_hflm: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a contender's row: the median round, the extremes, and its rate over HFLM's in the same rounds."""
    middle = sorted(times, key=lambda result: result["seconds"])[len(times) // 2]
    over = [other["seconds"] / own["seconds"] for own, other in zip(times, of_hflm, strict=True)]
    seconds = [each["seconds"] for each in times]
    spread = {"least_s": min(seconds), "most_s": max(seconds), "over_hflm": median(over)}
    spread |= {"least_over": min(over), "most_over": max(over), "rounds": len(times), "rounds_s": seconds}
    return {"who": name} | middle | spread


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of("evaluation", __doc__)
    parser.add_argument("--checkpoint", required=True, help="folder of a run or checkpoint, or a fingerprint")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--data-dir", help="folder with the questions; default: the hub")
    parser.add_argument("--tasks", nargs="+", default=list(config.OLMES))
    parser.add_argument("--limit", type=int, default=200, help="questions per task")
    parser.add_argument("--tokens-per-batch", type=int, default=65_536)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 128, 256, 512], help="of HFLM")
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args(arguments)
    try:
        settings = config.Evaluation(
            tasks=tuple(chosen.tasks),
            form="cf",
            limit=chosen.limit,
            data_dir=chosen.data_dir,
            tokens_per_batch=chosen.tokens_per_batch,
        )
        path = checkpoints.find(chosen.checkpoint, chosen.runs_dir)
        rows = measure(path, settings, chosen.batch_sizes, chosen.rounds)
    except ConfigError as error:
        parser.error(str(error))
    show(rows, without=["rounds_s"])
    measured(rows, chosen.json, limit=chosen.limit, rounds=chosen.rounds, tokens_per_batch=chosen.tokens_per_batch)


if __name__ == "__main__":
    main()

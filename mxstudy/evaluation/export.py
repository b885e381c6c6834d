"""Export a native checkpoint to Hugging Face's format, and measure how far transformers' outputs are from the model's.

It becomes a Llama or a Qwen, or a mixture of experts in one of three formats. An RMSNorm model in bf16 or FP32 stays
the same function. Hugging Face's models divide by the exact RMS and cast nothing, so the export of an MXNorm model, or
of one trained in MX formats, differs; the difference is measured on text.

python -m mxstudy.evaluation.export --checkpoint RUN --to FOLDER [--dtype bfloat16] [--text FILE]
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxstudy.evaluation import checkpoints
from mxstudy.evaluation.checkpoints import Trained
from mxstudy.evaluation.hugging_face import export
from mxstudy.reader import ConfigError, require
from mxstudy.train.runtime import configure_torch, resolve_device

SEQUENCES = 8
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}  # of the weights, and of transformers' computation


class Departure(NamedTuple):
    """Both models' losses in nats per token, and the largest difference of a token's log-probability in nats."""

    native_loss: float
    exported_loss: float
    largest: float


def sequences(trained: Trained, file: Path | None) -> Tensor:
    """Return the first sequences of a text, by default Python's help texts: int64 [SEQUENCES at most, T + 1].

    Raises ConfigError if the text is too short or not UTF-8.
    """
    try:
        text = file.read_text(encoding="utf-8") if file else "\n".join(pydoc_data.topics.topics.values())
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text: {file} is not UTF-8: {error.reason} at byte {error.start}") from error
    tokens = torch.from_numpy(trained.tokenizer.encode_batch([text])[0].astype("int64"))
    length = trained.max_length + 1
    require(len(tokens) >= length, f"--text: {len(tokens)} tokens are fewer than one sequence of {length}")
    return tokens[: len(tokens) // length * length].view(-1, length)[:SEQUENCES]


def departure(
    path: Path, trained: Trained, folder: Path, dtype: str, tokens_BT: Tensor, device: torch.device
) -> Departure:
    """Return how far transformers, with the export in `folder`, departs from the native checkpoint `path`.

    Measured on the tokens [B, T + 1].
    """
    tokens_BT = tokens_BT.to(device)
    models = checkpoints.load(path, trained, device), theirs(folder, dtype, device)
    native, exported = (log_probs(model, tokens_BT) for model in models)
    return Departure(-native.mean().item(), -exported.mean().item(), (native - exported).abs().max().item())


def theirs(folder: Path, dtype: str, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the model that transformers loads from the folder, as a function from tokens to logits."""
    from transformers import AutoModelForCausalLM  # takes a second
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], local_files_only=True)
    model = model.to(device).eval()
    return lambda tokens_BT: model(tokens_BT).logits


@torch.inference_mode()
def log_probs(logits: Callable[[Tensor], Tensor], tokens_BT: Tensor) -> Tensor:
    """Return the log-probability of every token after the first, computed row by row: float32 [B, T - 1]."""
    rows = []
    for tokens_T in tokens_BT:
        found_TV = logits(tokens_T[None, :-1])[0].float().log_softmax(-1)
        rows.append(found_TV.gather(-1, tokens_T[1:, None]).squeeze(-1))
    return torch.stack(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkpoint", required=True, help="folder of a run or checkpoint, fingerprint, or MLflow run id"
    )
    parser.add_argument("--to", type=Path, required=True, help="a new folder")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the weights")
    parser.add_argument(
        "--text", type=Path, help="text on which the two models are compared (default: Python's help texts)"
    )
    chosen = parser.parse_args(arguments)
    device = resolve_device("auto")
    configure_torch()
    try:
        path = checkpoints.find(chosen.checkpoint, chosen.runs_dir)
        trained = checkpoints.describe(path)
        tokens_BT = sequences(trained, chosen.text)  # before anything is written
        decoder = checkpoints.load(path, trained, torch.device("cpu"))
        export(decoder, trained.norm, trained.tokenizer, trained.max_length, chosen.to, chosen.dtype)
        found = departure(path, trained, chosen.to, chosen.dtype, tokens_BT, device)
    except (ConfigError, OSError) as error:
        sys.exit(str(error))
    print(f"{chosen.to}: {trained.name} in Hugging Face's format, weights in {chosen.dtype}")
    asked_in = checkpoints.title(trained)
    print(f"loss: native ({asked_in}) {found.native_loss:.4f} nats per token, transformers {found.exported_loss:.4f}")
    print(f"largest difference of a token's log-probability: {found.largest:.2g} nats")


if __name__ == "__main__":
    main()

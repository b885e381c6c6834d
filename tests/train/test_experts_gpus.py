"""A mixture that is sharded over two GPUs trains as on one, but for the order of sums."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SMALL = (
    *("+experiment=moe", "model=moe_tiny", "data=pysource", "tokenizer=bpe_2k", "tracking=none"),
    *("train.steps=4", "train.batch_size=8", "train.micro_batch_size=4", "train.sequence_length=128"),
    *("train.deterministic=true", "validation.every_steps=0", "checkpoint.every_steps=0"),
)


def losses(folder: Path, processes: int, *overrides: str) -> list[float]:
    """Return the loss of each step of a small mixture that these processes train together."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{processes}", "-m", "mxstudy")
    command = [sys.executable, *launcher, *SMALL, *overrides, f"runs_dir={folder}", f"cache_dir={folder.parent}/cache"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (journal,) = folder.rglob("metrics.jsonl")
    rows = map(json.loads, journal.read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "nvfp4"])
def test_two_gpus_have_the_losses_of_one(precision: str, tmp_path: Path) -> None:
    one, two = (losses(tmp_path / f"{gpus}", gpus, f"precision={precision}") for gpus in (1, 2))
    assert len(one) == 4
    assert two[0] == pytest.approx(one[0], rel=1e-5)
    assert two == pytest.approx(one, rel=5e-3)

"""Benchmarks refuse what they cannot measure, and that of attention counts as MFU does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import attention, train_step

RECOMPUTING = ["--arms", *train_step.ON_REQUEST]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--recompute-mlp", "1"], "--recompute-mlp: give an arm that recomputes MLPs with --arms"),
        (["--recompute-mlp", "0", *RECOMPUTING], "argument --recompute-mlp: must be at least 1, not 0"),
        (["--recompute-mlp", "99", *RECOMPUTING], "--recompute-mlp: must be at most 8, the blocks of llama_125m"),
        (["--ffn", "0"], "argument --ffn: must be at least 1, not 0"),
        (["--device", "cuda"], "argument --device: cuda was asked for, but there is no GPU; --device cpu runs here"),
    ],
)
def test_what_no_step_can_have_is_refused(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        train_step.main(words)
    assert says in capsys.readouterr().err


def test_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "attention.json"
    small = ["--model", "llama_23m", "--tokens", "128", "--sequence", "64", "--seconds", "0", "--device", "cpu"]
    attention.main([*small, "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["by"] for row in rows] == [attention.OURS, "flash", "math"]
    model = attention.model_of("llama_23m")
    for row in rows:
        counted = row["tflop_per_s"] * row["us"] * 1e6
        assert counted == pytest.approx(6 * 128 * 64 * model.num_heads * model.head_size)  # as `flops_per_token`
    with pytest.raises(SystemExit):
        attention.main(["--tokens", "100", "--sequence", "64"])
    assert "--tokens: must be a multiple of --sequence, 64; not 100" in capsys.readouterr().err

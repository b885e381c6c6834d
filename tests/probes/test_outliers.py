"""Outlier features are found in hand-made activations, and the ring of the last steps survives its wrap-around."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from mxstudy.config import observation
from mxstudy.model import RMSNorm
from mxstudy.probes.base import StepView
from mxstudy.probes.compiled import compiled
from mxstudy.probes.outliers import FeatureRing, OutlierFeatures, outlier, token_maxima
from mxstudy.probes.ring_file import read_ring

NORM = RMSNorm(4)


def view(step: int = 0) -> StepView:
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    return StepView(step, lambda: torch.ones(2), torch.nn.Identity(), lambda: (tokens, tokens), tokens.numel())


def measured(*parts: list[list[float]]) -> dict:
    probe = OutlierFeatures(observation.OutlierFeatures(every_steps=1))
    for part in parts:
        probe.watch("layers.3.ffn_norm", NORM, torch.tensor([part], dtype=torch.bfloat16))
    values = probe.measure(view())
    assert probe.seen == {}
    return {name.removeprefix("layers.3.ffn_norm/"): value for name, value in values.items()}


def test_the_largest_is_found_over_all_micro_batches_with_those_that_share_it():
    """Feature 2 is the largest of four tokens.

    In one of these it is below half, and the fifth token has another largest feature.
    """
    first = [[1.0, 0, 4.0, 0], [0, 1, -6.0, 0], [0, 0, 3.5, 0]]
    second = [[0, 0, -8.0, 0], [5.0, 0, 4.5, 1]]
    squares = np.square(np.array(first + second)).mean()
    assert measured(first, second) == {
        "absmax": 8.0,
        "feature": 2,
        "sharing_tokens": 3,
        "rms": pytest.approx(math.sqrt(squares), rel=1e-6),
    }


def test_one_token_shares_it_with_none():
    values = measured([[0.5, 0.25, 0, 0]] * 7 + [[0, 0, 0, 100.0]])
    assert (values["feature"], values["sharing_tokens"], values["absmax"]) == (3, 1, 100.0)


def test_what_is_not_a_number_is_seen():
    values = measured([[1.0, 2.0, 3.0, 4.0]], [[1.0, math.nan, 3.0, 4.0]])
    assert math.isnan(values["absmax"])
    assert (values["feature"], values["sharing_tokens"]) == (1, 0)


def filled(steps: range, ring_steps: int) -> FeatureRing:
    """Return a ring after two micro-batches per step of two norms.

    Feature d has the absmax 10 s + d in step s, at both norms.
    """
    ring = FeatureRing(observation.OutlierFeatures(every_steps=1, ring_steps=ring_steps))
    for step in steps:
        largest = 10.0 * step + torch.arange(4)
        for sign in (-1, 0.5) if step % 2 else (0.5, -1):
            x = torch.stack((sign * largest, 0.1 * largest))[None]
            ring.watch("layers.0.ffn_norm", NORM, x)
            ring.watch("norm", NORM, 2 * x)
        assert ring.measure(view(step)) == {}
    return ring


@pytest.mark.parametrize(
    ("steps", "kept"),
    [(range(3), range(3)), (range(8), range(8)), (range(9), range(1, 9)), (range(40, 61), range(53, 61))],
)
def test_the_ring_holds_the_last_steps_whole(steps: range, kept: range, tmp_path: Path) -> None:
    """The last case is a run that was resumed at step 40, so nothing of the steps before is there or claimed."""
    path = tmp_path / "spikes" / "step_00000060.safetensors"
    filled(steps, ring_steps=8).write(path)
    found, norms = read_ring(path)
    assert found == list(kept)
    expected = np.array([[10 * step + d for d in range(4)] for step in kept], dtype=np.float32)
    assert np.array_equal(norms["layers.0.ffn_norm"], expected)
    assert np.array_equal(norms["norm"], 2 * expected)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_ring_keeps_the_activations_dtype_and_their_infinities(tmp_path: Path) -> None:
    ring = FeatureRing(observation.OutlierFeatures())
    ring.watch("norm", NORM, torch.tensor([[[1.0, -math.inf, math.nan, 2**-130]]], dtype=torch.bfloat16))
    ring.measure(view(7))
    assert ring.tensors()["norm"].dtype == torch.bfloat16
    ring.write(tmp_path / "ring.safetensors")
    assert np.array_equal(
        read_ring(tmp_path / "ring.safetensors")[1]["norm"],
        np.array([[1.0, math.inf, math.nan, 2**-130]], dtype=np.float32),
        equal_nan=True,
    )


def test_the_rms_of_millions_of_values_keeps_its_digits():
    x = torch.randn(4, 512, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    rms = outlier(*token_maxima(x))[3].item()
    assert rms == pytest.approx(x.double().square().mean().sqrt().item(), rel=1e-6)


@pytest.mark.slow
def test_compiled_for_a_gpu_it_is_the_same():
    x = torch.randn(2, 48, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 3, 5], x[1, 2, 7], x[1, 3, 8] = torch.nan, torch.inf, -torch.inf
    for part in (x[:1, :3], x):
        for got, want in zip(compiled(token_maxima)(part), token_maxima(part), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=0, equal_nan=True)

"""On a GPU probes change no bit either, and say what they say on a CPU."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import tiny
import torch

from mxstudy import config
from mxstudy.model import MXNorm, NormLinear
from mxstudy.probes import saturation, shadow
from mxstudy.probes.activations import counts_of, input_and_output_counts, mean_squares, mean_squares_of
from mxstudy.probes.build import build_probes, build_spikes
from mxstudy.probes.compiled import on_gpu_compiled
from mxstudy.probes.outliers import token_maxima
from mxstudy.probes.saturation import Saturation
from mxstudy.train.loop import TrainingRun, train, train_step
from mxstudy.train.signals import Leave

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

ALL = config.Probes(**{f.name: type(f.default)(every_steps=1) for f in fields(config.Probes)})
CUDA = torch.device("cuda")


def rows_of(probes: config.Probes, folder: Path, **changes: object) -> list[dict]:
    run, memory = tiny.build(replace(tiny.CONFIG, probe=probes), steps=6, **changes)
    model = run.model.to(CUDA)
    optimizer = tiny.build_optimizer(model, run.config.optimizer)
    built = build_probes(probes)
    spikes = build_spikes(probes, built, folder, lambda: None, [])
    assert (
        train(TrainingRun(run.config, model, optimizer, run.batches, CUDA, memory, built, spikes), 0, Leave())
        == "finished"
    )
    return memory.rows


@pytest.mark.parametrize("compiles", [False, True])
def test_losses_keep_their_bits(compiles, tmp_path):
    plain, watched = (rows_of(probes, tmp_path, compile=compiles) for probes in (config.Probes(), ALL))
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in (plain, watched)]
    assert losses[0] == losses[1]


def test_time_and_memory_are_the_gpus(tmp_path):
    values = {row["probe"]: row["values"] for row in rows_of(ALL, tmp_path) if "probe" in row}
    assert all(ms > 0 for ms in values["timing"].values())
    memory = values["memory"]
    assert 0 < memory["allocated_gib"] <= memory["peak_gib"] <= memory["reserved_gib"]


def test_counts_and_rms_are_those_of_a_cpu():
    linear = NormLinear(MXNorm(1024, p=2.0), 64, 0.02)
    torch.nn.init.ones_(linear.norm.weight)
    linear.gemms = config.PRECISIONS["mxfp8"].filled(config.BlockCast())
    x = torch.randn(4, 512, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    there = [f(linear.to(CUDA), x.to(CUDA)).cpu() for f in (mean_squares_of, counts_of)]
    here = [f(linear.cpu(), x) for f in (mean_squares, input_and_output_counts)]
    torch.testing.assert_close(there[0], here[0], rtol=1e-5, atol=0)
    assert torch.equal(there[1][0], here[1][0])
    moved = (there[1][1] - here[1][1]).abs().sum() / 2  # an RMS whose last bit differs moves a few
    assert moved < 1e-4 * x.numel()
    for got, want in zip(on_gpu_compiled(token_maxima, x.to(CUDA)), token_maxima(x), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("precision", ["mxfp8_e5m2_grad", "mxfp4"])
def test_saturation_by_kernels_is_that_of_pytorch(precision, monkeypatch):
    settings = replace(tiny.CONFIG, precision=tiny.precision((0, precision)))
    run, _ = tiny.build(settings)
    run.model.to(CUDA)
    run.device, run.diverged = CUDA, run.diverged.to(CUDA)
    view, probe = train_step(run, 0), Saturation(config.Saturation(every_steps=1))
    captured = shadow.capture_linears(run.model, shadow.whole_blocks(run.model, view.first_sequence()), view.tokens)
    monkeypatch.setattr(saturation, "capture_linears", lambda *_: captured)  # a backward may differ in its last bits
    by_kernels = probe.measure(view)
    monkeypatch.setattr(saturation, "has_kernel", lambda source: False)
    assert by_kernels == pytest.approx(probe.measure(view), rel=1e-12)

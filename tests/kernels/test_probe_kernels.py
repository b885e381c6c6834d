"""The probes give by kernels what they give without them, and leave to PyTorch what kernels do not compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
import torch
from interpreter import DEVICE

from mxstudy import config
from mxstudy.config import PRECISIONS, BlockCast, Gemms
from mxstudy.config.casts import Hadamard
from mxstudy.kernels.norm_outputs import norm_bins, norm_mean_squares
from mxstudy.model import LayerNorm, MXNorm, NormLinear, RMSNorm
from mxstudy.model.norm import PostRoundMXNorm
from mxstudy.probes import saturation
from mxstudy.probes.activations import BINS, input_and_output_counts, kernel_norm_of, mean_squares
from mxstudy.probes.saturation import PLAIN, Saturation
from mxstudy.train.loop import train_step

pytestmark = pytest.mark.integration
FOLDED = RMSNorm(64, fold_gain=True)
MXFP8 = PRECISIONS["mxfp8"].filled(BlockCast())


def read_by(norm, gemms=MXFP8):
    torch.nn.init.ones_(norm.weight)
    linear = NormLinear(norm, 32, 0.02)
    linear.gemms = gemms
    return linear


@pytest.mark.parametrize(
    "module",
    [
        read_by(MXNorm(64, p=2.0)),
        read_by(MXNorm(64, p=1.0), Gemms()),
        read_by(MXNorm(64, p=1.0, block_size=16), PRECISIONS["mxfp4"].filled(BlockCast(16, "floor"))),
        read_by(FOLDED),
        read_by(RMSNorm(64)),
        read_by(LayerNorm(64)),
        RMSNorm(64),
    ],
)
def test_what_kernels_compute(module):
    known = kernel_norm_of(module)
    assert known is not None
    x = torch.randn(4, 96, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = norm_mean_squares(x.to(DEVICE), *known).cpu()
    torch.testing.assert_close(got, mean_squares(module, x), rtol=1e-5, atol=0)
    counts, expected = norm_bins(x.to(DEVICE), *known, BINS).cpu(), input_and_output_counts(module, x)
    assert torch.equal(counts[0], expected[0])
    assert (counts[1] - expected[1]).abs().sum() / 2 < 1e-3 * x.numel()  # an RMS whose last bit differs moves a few


class Doubled(RMSNorm):
    """A norm of somebody's own."""

    def rms(self, x):
        return super().rms(x) / 2


class Clamped(NormLinear):
    """A linear of somebody's own, which reads its norm in another way."""

    def normalize(self, x):
        return super().normalize(x).clamp(-1, 1)


def read_another_way(linear):
    linear.read = lambda xbar: 3 * xbar
    return linear


@pytest.mark.parametrize(
    "module",
    [
        Clamped(MXNorm(64, p=2.0), 32, 0.02),
        read_another_way(read_by(FOLDED)),
        read_by(MXNorm(64, p=1.0), Gemms(forward_transform=Hadamard(size=16))),
        read_by(Doubled(64)),
        Doubled(64),
        read_by(PostRoundMXNorm(64)),
        read_by(FOLDED, replace(MXFP8, forward_x=replace(MXFP8.forward_x, rounding="stochastic"))),
        read_by(FOLDED, replace(MXFP8, forward_transform=Hadamard(size=16, signs="none"))),
        read_by(FOLDED, PRECISIONS["fp8_tensor"].filled(BlockCast())),
        read_by(MXNorm(256, p=1.0, block_size=128), Gemms()),
        read_by(MXNorm(64, p=1.0, block_size=16)),
    ],
)
def test_what_is_left_to_pytorch(module):
    assert kernel_norm_of(module) is None


@pytest.mark.parametrize("precision", ["mxfp8_e5m2_grad", "fp8_tensor"])
def test_saturation(monkeypatch, precision):
    settings = replace(tiny.CONFIG, precision=replace(tiny.precision((0, precision)), backend="reference"))
    run, _ = tiny.build(settings)
    view = train_step(run, 0)
    probe = Saturation(config.Saturation(every_steps=1))
    expected = probe.measure(view)
    seen = []

    def counted(x, *options):
        seen.append(x.shape)
        found = count(x.to(DEVICE), *options)
        return found._replace(sums=found.sums.cpu(), extremes=found.extremes.cpu())

    count = saturation.cast_counts
    monkeypatch.setattr(saturation, "cast_counts", counted)
    monkeypatch.setattr(saturation, "has_kernel", lambda source: not any(PLAIN.lacked_in(source.cast)))
    assert probe.measure(view) == pytest.approx(expected, rel=1e-12)
    assert bool(seen) == (precision != "fp8_tensor")

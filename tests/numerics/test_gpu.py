"""The same bits on CPU and GPU, eager and compiled."""

import pytest
import torch

from mxstudy import config
from mxstudy.model import MXLinear, MXNorm, NormLinear, RMSNorm
from mxstudy.numerics import FORMATS, quantize
from mxstudy.numerics.cast import BlockCast
from mxstudy.numerics.formats import ROUNDINGS, SCALE_RULES
from mxstudy.numerics.matmul import PRECISIONS
from mxstudy.numerics.norm import norm_cast, rms_estimate, rms_exact
from mxstudy.train.runtime import configure_torch

configure_torch(config.Train(steps=1, batch_size=1, sequence_length=1, compile=True))
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def all_regimes() -> torch.Tensor:
    """Every FP32 exponent, subnormals, ties, zeros, infinities and NaNs: float32 [rows, 256]."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (512, 256), generator=generator).to(torch.int32)
    spread = bits.view(torch.float32).clone()
    spread[torch.rand(spread.shape, generator=generator) < 0.999] = 0  # else nearly every block has a NaN or 3e38
    narrow = torch.randn(512, 256, generator=generator) * 2.0 ** torch.randint(-140, 120, (512, 1), generator=generator)
    ties = (torch.randint(-256, 256, (512, 256), generator=generator) / 16.0) * 2.0 ** torch.randint(-60, 60, (512, 1))
    one_exponent = (bits & 0x007FFFFF | torch.randint(0, 255, (512, 1), generator=generator).int() << 23).view(
        torch.float32
    )
    return torch.cat((spread, narrow, ties, one_exponent))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.cpu(), b.cpu()
    both_nan = a.isnan() & b.isnan() if a.is_floating_point() else torch.zeros_like(a, dtype=torch.bool)
    view = torch.int32 if a.dtype == torch.float32 else a.dtype
    return bool(((a.view(view) == b.view(view)) | both_nan).all())


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_casts(fmt, rule, rounding):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, axis: parts(quantize(x, fmt, 32, axis, rule, rounding)), fullgraph=True)
    for dtype in (torch.float32, torch.bfloat16):
        x = all_regimes().to(dtype)
        for axis in (0, 1):
            expected = parts(quantize(x, fmt, 32, axis, rule, rounding))
            for actual in (parts(quantize(x.cuda(), fmt, 32, axis, rule, rounding)), compiled(x.cuda(), axis)):
                assert all(same_bits(e, a) for e, a in zip(expected, actual, strict=True))


def parts(quantized):
    return quantized.values, quantized.scales, quantized.dequantize(), quantized.dequantize(torch.bfloat16)


@pytest.mark.parametrize("p", [None, 1.0, 2.0, 0.7])
def test_norms_agree_and_given_the_rms_their_casts_are_the_same_bits(p):
    torch._dynamo.reset()
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()

    def rms(x):
        return rms_exact(x, 1e-5) if p is None else rms_estimate(x, p, 32, 1e-5)

    def cast(x, r):
        quantized = norm_cast(x, r, "E4M3", BlockCast())
        return quantized.values, quantized.scales

    expected = rms(x)
    for actual in (rms(x.cuda()), torch.compile(rms)(x.cuda())):
        assert torch.allclose(expected, actual.cpu(), rtol=1e-6, atol=0)
    for actual in (cast(x.cuda(), expected.cuda()), torch.compile(cast)(x.cuda(), expected.cuda())):
        assert all(same_bits(e, a) for e, a in zip(cast(x, expected), actual, strict=True))


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("row", ["bf16", "mxfp8", "mxfp8_forward_only", "mxfp8_backward_only"])
@pytest.mark.parametrize("norm", [RMSNorm(64), RMSNorm(64, fold_gain=True), MXNorm(64, p=2.0)])
def test_compiled_gradients_are_those_of_eager(norm, row, compute):
    """In torch 2.11 they were zero: see `to_dtype`."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(NormLinear(norm, 96, 0.1), MXLinear(96, 64, 0.1)).cuda()
    for parameter in layers.parameters():
        torch.nn.init.normal_(parameter, 0.5, 0.5)
    for layer in layers:
        layer.gemms = PRECISIONS[row]
    x = torch.randn(64, 64, device="cuda", dtype=compute, requires_grad=True)
    tensors = [x, *layers.parameters()]
    eager = torch.autograd.grad(layers(x).float().square().mean(), tensors)
    compiled = torch.autograd.grad(torch.compile(layers, fullgraph=True)(x).float().square().mean(), tensors)
    for expected, actual in zip(eager, compiled, strict=True):
        assert expected.norm() > 0
        assert (actual - expected).norm() < 2e-2 * expected.norm()

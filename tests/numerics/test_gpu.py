"""CPU and GPU, eager and compiled, give the same bits."""

import pytest
import torch
from gemms import linear, tensor_cast

from mxstudy.compat.torch_compiler import keep_roundings
from mxstudy.config import PRECISIONS
from mxstudy.config.casts import Cast
from mxstudy.kernels import native
from mxstudy.model import MXLinear, MXNorm, NormLinear, PostRoundMXNorm, RMSNorm
from mxstudy.numerics import FORMATS, quantize
from mxstudy.numerics.cast import BlockCast, block_cast, quantize_as
from mxstudy.numerics.formats import ROUNDINGS, SCALE_RULES
from mxstudy.numerics.gemms import mx_linear
from mxstudy.numerics.norm_linear import norm_cast, rms_estimate, rms_exact
from mxstudy.numerics.postround import rms_post_round

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def all_regimes() -> torch.Tensor:
    """Return every FP32 exponent, subnormals, ties, zeros, infinities and NaNs: float32 [rows, 256]."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (512, 256), generator=generator).to(torch.int32)
    spread = bits.view(torch.float32).clone()
    spread[torch.rand(spread.shape, generator=generator) < 0.999] = 0  # otherwise nearly every block has a NaN or 3e38
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


MX = [name for name, fmt in FORMATS.items() if fmt.scale == "E8M0"]
CASTS = [
    BlockCast(32, rule, rounding) for rule in SCALE_RULES for rounding in ROUNDINGS if not ROUNDINGS[rounding].draws
]
CASTS += [BlockCast(16, operand_pre_round=True), BlockCast(64)]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", MX)
def test_casts(fmt, dtype, axis):
    """The test has every rule and rounding, and blocks of 16, 32 and 64."""
    torch._dynamo.reset()
    x = all_regimes().to(dtype)

    def casts(x):
        return [part for cast in CASTS for part in parts(block_cast(x, fmt, axis, cast))]

    expected = casts(x)
    for actual in (casts(x.cuda()), torch.compile(casts, fullgraph=True)(x.cuda())):
        assert all(same_bits(e, a) for e, a in zip(expected, actual, strict=True))


def parts(quantized):
    scales = quantized.scales.view(torch.uint8)
    return quantized.values, scales, quantized.codes, quantized.dequantize(), quantized.dequantize(torch.bfloat16)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("regime", ["gaussian", "spread", "with NaN"])
def test_casts_with_fp32_scales(regime, axis):
    """The casts are NVFP4 with one tensor scale, in both chains, or one per row, and FP8 with one per tensor."""
    torch._dynamo.reset()
    training = Cast(format="NVFP4", scale="E4M3", outer_scale="tensor", chain="training").filled(BlockCast(16))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(512, 256, generator=generator)
    if regime == "spread":
        x *= 2.0 ** torch.randint(-30, 30, x.shape, generator=generator)
    if regime == "with NaN":
        x[7, 9] = torch.nan
    rows = x.abs().amax(1, keepdim=True).nan_to_num() / 2688

    def casts(x, rows):
        found = [*parts(quantize(x, "NVFP4", axis=axis)), *parts(quantize(x, "NVFP4", rounding="away"))]
        found += parts(quantize(x, "NVFP4", tensor_scale=rows))
        found += parts(quantize_as(x, training, axis))
        for fmt in ("E4M3", "E5M2"):
            found += tensor_cast(x, fmt)
        return found

    expected = casts(x, rows)
    for actual in (casts(x.cuda(), rows.cuda()), torch.compile(casts, fullgraph=True)(x.cuda(), rows.cuda())):
        assert all(same_bits(e, a) for e, a in zip(expected, actual, strict=True))


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


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_the_rms_from_rounded_scales_agrees(rule):
    torch._dynamo.reset()
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()

    def rms(x):
        return rms_post_round(x, "E4M3", BlockCast(32, rule), 1e-5)

    for actual in (rms(x.cuda()), torch.compile(rms, fullgraph=True)(x.cuda())):
        assert torch.allclose(rms(x), actual.cpu(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("row", [name for name in PRECISIONS if name not in ("bf16", "fp32")])
def test_gemms_agree_with_those_on_cpu(row, compute):
    """Each is a sum of the same products, accumulated in FP32 and rounded once."""
    generator = torch.Generator().manual_seed(0)
    x, weight, dh = (torch.randn(*shape, generator=generator).to(compute) for shape in ((64, 96), (160, 96), (64, 160)))
    cast = BlockCast(16 if row.startswith("nvfp4") else 32)

    def run(*tensors):
        x, weight, dh = tensors
        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        h = mx_linear(x, weight, linear(PRECISIONS[row], cast))
        return h, *torch.autograd.grad(h, (x, weight), dh)

    rtol = 2.0**-7 if compute == torch.bfloat16 else 1e-5  # two neighbours where the sums fall beside a tie
    for expected, actual in zip(run(x, weight, dh), run(x.cuda(), weight.cuda(), dh.cuda()), strict=True):
        assert torch.allclose(expected, actual.cpu(), rtol=rtol, atol=1e-4)


@pytest.mark.parametrize("row", ["mxfp8", "mxfp4"])
def test_the_native_path_compiles(row, monkeypatch):
    """It uses torchao's emulated kernels, because this GPU has no others."""
    torch._dynamo.reset()
    monkeypatch.setattr(native, "KERNELS", "EMULATED")
    x, weight = torch.randn(64, 96, device="cuda").bfloat16(), torch.randn(160, 96, device="cuda").bfloat16()
    x.requires_grad_()
    weight.requires_grad_()
    results = []
    for is_native in (False, True):
        h = torch.compile(mx_linear, fullgraph=True)(x, weight, linear(PRECISIONS[row], native=is_native))
        results.append((h, *torch.autograd.grad(h.float().square().mean(), (x, weight))))
    for expected, actual in zip(*results, strict=True):
        assert expected.norm() > 0
        assert (actual - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "row", ["bf16", "mxfp8", "mxfp8_forward_only", "mxfp8_backward_only", "mxfp4", "fp8_tensor", "nvfp4_forward_only"]
)
@pytest.mark.parametrize("norm", [RMSNorm(64), RMSNorm(64, fold_gain=True), MXNorm(64, p=2.0), PostRoundMXNorm(64)])
def test_compiled_gradients_are_those_of_eager(norm, row, compute):
    """Compare them with roundings kept, as in every training. In torch 2.11 they were zero: see `to_dtype`."""
    keep_roundings()
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(NormLinear(norm, 96, 0.1), MXLinear(96, 64, 0.1)).cuda()
    for parameter in layers.parameters():
        torch.nn.init.normal_(parameter, 0.5, 0.5)
    for layer in layers:
        layer.cast = BlockCast(16 if row.startswith("nvfp4") else 32)
        layer.gemms = PRECISIONS[row].filled(layer.cast)
    x = torch.randn(64, 64, device="cuda", dtype=compute, requires_grad=True)
    tensors = [x, *layers.parameters()]
    eager = torch.autograd.grad(layers(x).float().square().mean(), tensors)
    compiled = torch.autograd.grad(torch.compile(layers, fullgraph=True)(x).float().square().mean(), tensors)
    for expected, actual in zip(eager, compiled, strict=True):
        assert expected.norm() > 0
        assert (actual - expected).norm() < 2e-2 * expected.norm()

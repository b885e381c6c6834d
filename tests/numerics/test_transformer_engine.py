"""The recipes nvfp4 and four over six agree with the quantiser that Transformer Engine publishes as its reference.

Its wheel of Python files is enough, without the libraries for GPUs; without it the tests are skipped:

    pip install --no-deps --target FOLDER transformer-engine==2.20.2
    PYTHONPATH=$PWD:FOLDER python -m pytest tests/numerics/test_transformer_engine.py
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from each import each
from precision_files import of_file
from torch import Tensor, nn

from mxstudy.config.casts import OPERANDS, Gemms
from mxstudy.model.linear import MXLinear
from mxstudy.model.precision import AXES
from mxstudy.numerics.quantized import Quantized
from mxstudy.probes.saturation import quantized_operands

TOKENS, IN, OUT = 64, 128, 96


class Quantizer:
    """Replaces the base class, with the parts that the reference needs."""

    def __init__(self, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


@pytest.fixture(scope="module")
def published() -> Iterator[ModuleType]:
    """Load the module of the reference alone, because the package itself loads libraries."""
    found = importlib.util.find_spec("transformer_engine")
    if found is None or not found.submodule_search_locations:
        pytest.skip("transformer_engine is not installed")
    folder = Path(found.submodule_search_locations[0], "pytorch", "custom_recipes")
    package = "transformer_engine.pytorch.custom_recipes"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("transformer_engine", "transformer_engine.pytorch", package):
            patch.setitem(sys.modules, name, ModuleType(name))
        base = ModuleType("transformer_engine.pytorch.quantized_tensor")
        base.Quantizer, base.QuantizedTensorStorage = Quantizer, object
        patch.setitem(sys.modules, base.__name__, base)
        sys.modules[package].gemm = MagicMock()
        for name in ("reference_utils", "reference_nvfp4"):
            spec = importlib.util.spec_from_file_location(f"{package}.{name}", folder / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            setattr(sys.modules[package], name, module)
        yield module


def integers(rows: int, columns: int, seed: int) -> Tensor:
    """Return bf16 integers of up to 6 bits times 2^-12 to 2^4 by blocks of 16, so that sums of 16 of them are exact."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-12, 5, (rows // 16, columns // 16), generator=generator)
    whole = torch.randint(-63, 64, (rows, columns), generator=generator).float()
    return torch.ldexp(whole, sizes.repeat_interleave(16, 0).repeat_interleave(16, 1)).bfloat16()


def gaussians(rows: int, columns: int, seed: int, more: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed + more)).bfloat16()


def to_nearest(gemms: Gemms) -> Gemms:
    """Round to nearest, because the reference draws other numbers."""
    return replace(gemms, **{name: replace(cast, rounding="even") for name, cast in gemms.casts()})


def operands(name: str, make: Any) -> dict[str, tuple[Quantized, Tensor]]:
    """Return each operand of that file's recipe as cast here, and the tensor that it is made from."""
    precision = of_file(name)
    linear = MXLinear(IN, OUT, 1.0)
    linear.gemms = to_nearest(precision.recipe(name).filled(precision.settings))
    x, weight, dh = (make(*shape, seed) for seed, shape in enumerate([(TOKENS, IN), (OUT, IN), (TOKENS, OUT)]))
    linear.weight = nn.Parameter(weight, requires_grad=False)
    of = {"x": x, "w": weight, "dh": dh}
    return {
        operand: (quantized, of[operand.partition("_")[2]])
        for operand, quantized, _ in quantized_operands(linear.sources(x), dh)
    }


def theirs(published: ModuleType, x: Tensor, operand: str, **settings: Any) -> tuple[Tensor, Tensor]:
    """Return elements, and block scales: one per row and 16 of its columns.

    Those of dgrad's W and of wgrad have one per column and 16 rows.
    """
    quantizer = published.NVFP4QuantizerRef(
        published.reference_utils.Fp4Formats.E2M1,
        quant_tile_shape=(16, 16) if operand.endswith("_w") else (1, 16),
        with_rht=operand.startswith("wgrad"),
        **settings,
    )
    codes, scales, codes_t, scales_t, *_ = quantizer._quantize(x)
    if AXES[operand][0] == "tokens" or operand == "dgrad_w":
        return published.cast_from_fp4x2(codes_t, torch.float32).T, scales_t.float().T
    return published.cast_from_fp4x2(codes, torch.float32), scales.float()


def scales_of(quantized: Quantized, shape: torch.Size) -> Tensor:
    """Return the scales as the reference has them: a block of 16 rows repeats its scale for each row."""
    scales = quantized.scales.float()
    for axis in {0, 1} - {quantized.axis % 2}:
        scales = scales.repeat_interleave(shape[axis] // scales.shape[axis], axis)
    return scales


@each("make", [integers, gaussians])
def test_every_operand_of_nvfp4_is_theirs(published: ModuleType, make: Any) -> None:
    """The recipe has squares of W, and wgrad's transform with its signs, and the test has subnormal scales."""
    found = operands("nvfp4", make)
    assert [*found] == [*OPERANDS]
    for operand, (quantized, x) in found.items():
        values, scales = theirs(published, x, operand)
        assert torch.equal(scales_of(quantized, x.shape), scales), operand
        assert torch.equal(quantized.values, values), operand
        assert (scales < 2.0**-6).any() == (make is integers)


@pytest.mark.slow
def test_four_over_six_is_theirs_but_for_few_blocks(published: ModuleType) -> None:
    """The reference divides the absmax by 6 first, so that a block's scale can be the next E4M3 number."""
    settings = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256, "nvfp4_4over6_err_mode": "MSE"}
    differ = []
    for seed in range(0, 60, 3):
        found = operands("nvfp4_four_over_six", partial(gaussians, more=seed))
        for operand in ("forward_x", "forward_w", "dgrad_w"):
            quantized, x = found[operand]
            values, scales = theirs(published, x, operand, **settings)
            same = scales_of(quantized, x.shape) == scales
            differ.append((~same).float().mean())
            spread = same.repeat_interleave(16, quantized.axis % 2)
            assert torch.equal(quantized.values[spread], values[spread])
    assert torch.stack(differ).mean() < 1e-3

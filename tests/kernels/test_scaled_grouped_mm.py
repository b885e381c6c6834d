"""The grouped product under FP32 scales has every bit of the loop over its groups.

Sums are exact in these tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bits import assert_same_bits
from interpreter import DEVICE
from precision_files import of_file
from small_mixtures import CPU, MOE, NORMS, OUTER_SCALES, gradients, group, outer_scaled
from torch import Tensor, library

from mxstudy.kernels.scaled_grouped_mm import TILES, TILES_BY_BLOCKS, launch_cuda
from mxstudy.model.decoder import Decoder
from mxstudy.model.precision import apply_precision
from mxstudy.numerics import experts
from mxstudy.numerics.grouped_gemm import scaled_grouped_mm
from mxstudy.reader import ConfigError

pytestmark = pytest.mark.integration
BF16 = torch.bfloat16
SIZES = {  # rows of each group
    "parts of tiles, and none": [70, 0, 8, 0, 33, 64, 1],
    "one group": [100],
    "nothing but the last": [0, 0, 40],
    "whole tiles": [64, 128],
}


def ends_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-15, 16, shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def scales(*shape: int, seed: int) -> Tensor:
    """Return scales of any significand."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 2.0**-3


def launched(*arguments: Tensor | None, block_size: int = 0) -> Tensor:
    return launch_cuda(*(None if x is None else x.to(DEVICE) for x in arguments), block_size=block_size).cpu()


def wanted(a: Tensor, b: Tensor, *others: Tensor | None, block_size: int = 0) -> Tensor:
    """Return the reference's product of FP32 matrices, rounded once: its scaled sums are not rounded before."""
    return scaled_grouped_mm(a.float(), b.float(), *others, block_size=block_size).to(BF16)


def assert_as_by_loop(*arguments: Tensor | None, block_size: int = 0) -> Tensor:
    """Return the kernel's product, which is that of the loop; the sum of nothing but -0 is 0 in the kernel."""
    got = launched(*arguments, block_size=block_size)
    assert_same_bits(got, wanted(*arguments, block_size=block_size) + 0)
    return got


def by_rows(sizes: list[int], inner: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    return integers(sum(sizes), inner, seed=0), integers(len(sizes), inner, columns, seed=1), ends_of(sizes)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("inner", "columns"), [(64, 64), (72, 40)])
def test_groups_of_rows(sizes, inner, columns):
    a, b, ends = by_rows(sizes, inner, columns)
    assert_as_by_loop(a, b, scales(len(sizes), 1, seed=2), scales(len(sizes), 1, seed=3), ends)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (72, 40)])
def test_groups_of_the_contraction_axis(sizes, rows, columns):
    """Both matrices lie in memory by tokens, as in wgrad; a group without any gives zeros."""
    a, b, ends = integers(sum(sizes), rows, seed=0).T, integers(sum(sizes), columns, seed=1), ends_of(sizes)
    got = assert_as_by_loop(a, b, scales(len(sizes), 1, seed=2), scales(len(sizes), 1, seed=3), ends)
    assert [bool(one.any()) for one in got] == [size > 0 for size in sizes]


def test_matrices_as_they_lie_in_memory():
    """The forward reads each weight transposed."""
    a, b, ends = by_rows([40, 0, 24], 64, 48)
    assert_as_by_loop(a, b.mT.contiguous().mT, scales(3, 1, seed=2), scales(3, 1, seed=3), ends)


def test_large_tiles():
    height, width, _ = TILES[0]
    sizes, columns = [height + 8, 0, height * 7], width * 15
    a, b, ends = by_rows(sizes, 16, columns)
    assert_as_by_loop(a, b, scales(3, 1, seed=2), scales(3, 1, seed=3), ends)


@pytest.mark.parametrize("of_rows", [(1, 1), (1, 72), (3, 1), None], ids=str)
@pytest.mark.parametrize("of_columns", [(1, 1), (1, 40), (3, 40), None], ids=str)
def test_one_scale_for_all_for_each_row_or_column_or_for_each_group(of_rows, of_columns):
    a, b, ends = by_rows([40, 0, 32], 64, 40)
    given = (None if s is None else scales(*s, seed=i) for i, s in enumerate((of_rows, of_columns)))
    assert_as_by_loop(a, b, *given, ends)


def test_the_scales_are_multiplied_with_each_other_first():
    """Else the sums would overflow."""
    a, b, ends = by_rows([8, 8], 64, 16)
    got = assert_as_by_loop(a, b, torch.tensor([[2.0**126], [1.0]]), torch.tensor([[2.0**-126], [1.0]]), ends)
    assert got.isfinite().all()


def test_nan_stays_in_its_group():
    a, b, ends = by_rows([40, 24, 8], 64, 48)
    of_rows = scales(3, 1, seed=2)
    of_rows[1] = torch.nan
    got = assert_as_by_loop(a, b, of_rows, None, ends)
    assert got.isnan().all(1).nonzero().flatten().tolist() == list(range(40, 64))
    a[0, 5], b[2, 3, 7] = torch.nan, torch.inf
    got = launched(a, b, None, None, ends)
    assert_same_bits(got.isnan(), wanted(a, b, None, None, ends).isnan())
    assert_same_bits(got.nan_to_num(), wanted(a, b, None, None, ends).nan_to_num())


def test_nan_stays_in_its_group_of_the_contraction_axis():
    a, b, ends = integers(72, 16, seed=0).T, integers(72, 32, seed=1), ends_of([40, 24, 8])
    b[41, 3] = torch.nan
    got = launched(a, b, None, scales(3, 1, seed=2), ends)
    assert got.isnan().nonzero().tolist() == [[1, row, 3] for row in range(16)]
    assert_same_bits(got[::2], wanted(a, b, None, scales(3, 1, seed=2), ends)[::2])


@pytest.mark.parametrize("blocks", ["both", "a", "b"])
@pytest.mark.parametrize("inner", [64, 72])
def test_blocks_of_rows_have_scales(blocks, inner):
    """Take an inner axis of 72, too, whose last block is incomplete."""
    (a, b, ends), count = by_rows([70, 0, 8, 33], inner, 40), -(-inner // 16)
    of_a, of_b = scales(111, count, seed=4), scales(4, count, 40, seed=5)
    others = None if blocks == "b" else of_a, None if blocks == "a" else of_b
    assert_as_by_loop(a, b, scales(4, 1, seed=2), None, ends, *others, block_size=16)


def test_blocks_of_the_contraction_axis_have_scales():
    """Both matrices and their scales lie in memory by tokens, as in wgrad."""
    a, b, ends = integers(96, 72, seed=0).T, integers(96, 40, seed=1), ends_of([32, 0, 48, 16])
    of_a, of_b = scales(6, 72, seed=4).T, scales(6, 40, seed=5)
    assert_as_by_loop(a, b, None, None, ends, of_a, of_b, block_size=16)


def test_large_tiles_of_blocks():
    height, width, _ = TILES_BY_BLOCKS[0]
    a, b, ends = by_rows([height + 8, 0, height * 7], 32, width * 15)
    assert_as_by_loop(a, b, None, None, ends, None, scales(3, 2, width * 15, seed=5), block_size=16)


def test_a_size_of_blocks_that_no_kernel_has_is_refused():
    a, b, ends = by_rows([8, 8], 48, 16)
    with pytest.raises(ConfigError, match="block_size: the kernel takes one of"):
        launched(a, b, None, None, ends, None, scales(2, 1, 16, seed=5), block_size=48)


@pytest.mark.parametrize(
    ("name", "norm", "scales_of_x"),
    [
        ("fp8_tensor", "rmsnorm", {"expert"}),
        ("nvfp4", "rmsnorm", {"expert"}),
        ("fp8_blockwise", "rmsnorm", {"block"}),
        ("bounds", "rmsnorm", {"all", "row", "expert"}),
        ("bounds", "mxnorm", {"all", "row", "expert"}),
        ("rows", "mxnorm", {"row", "expert"}),
    ],
)
def test_a_mixture_has_the_numbers_of_the_loop(name, norm, scales_of_x, monkeypatch):
    """Sums are in another order, so a result may be rounded to the next bf16 number."""
    seen = set()

    def product(a: Tensor, b: Tensor, *others: Any) -> Tensor:
        assert torch.equal(a.to(BF16), a)
        assert torch.equal(b.to(BF16), b)
        *given, block_size = others
        found = [scale.shape for scale in given[:2] if scale is not None]
        seen.update("all" if s == (1, 1) else "expert" if s == (6, 1) else "row" for s in found)
        seen.update("block" for scale in given[3:] if scale is not None)
        return launched(a.to(BF16), b.to(BF16), *given, block_size=block_size).float()

    monkeypatch.setattr(experts, "scaled_grouped_mm", product)
    precision = outer_scaled(name) if name in OUTER_SCALES else of_file(name)
    model = Decoder(MOE, NORMS[norm], precision.settings, BF16)
    model.init_weights(0)
    apply_precision(model, precision, 0, "bf16", CPU)
    loop, grouped = (gradients(group(model, is_grouped)) for is_grouped in (False, True))
    assert seen == scales_of_x
    torch.testing.assert_close(grouped[0], loop[0], rtol=0.02, atol=0.02)
    for name, gradient in loop[1].items():
        error = torch.linalg.vector_norm(grouped[1][name] - gradient) / torch.linalg.vector_norm(gradient)
        assert error < 0.02, name


def test_is_an_operator():
    a, b, ends = by_rows([40, 24, 8], 64, 48)
    library.opcheck(torch.ops.mxstudy.scaled_grouped_mm, (a.float(), b.float(), scales(3, 1, seed=2), None, ends))
    inner = integers(72, 16, seed=0).T.float(), integers(72, 32, seed=1).float()
    library.opcheck(torch.ops.mxstudy.scaled_grouped_mm, (*inner, None, scales(3, 32, seed=2), ends))

"""Kernels compile for a GPU, and to what they should, on a machine without one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from interpreter import DEVICE as DEVICE  # before any other import of Triton

from mxstudy.kernels.matmul_blocks import TILES
from mxstudy.kernels.operand_cast import OperandCast
from mxstudy.kernels.packing import pack
from mxstudy.kernels.scaled_grouped_mm import TILES as GROUPED_TILES
from mxstudy.kernels.scaled_grouped_mm import TILES_BY_BLOCKS

pytestmark = pytest.mark.slow

VARIANTS = [
    (4096, "E4M3", 32, 2.0, "even", False, True),
    (16384, "E2M1", 16, None, "even", False, True),
    (7168, "NVFP4", 16, 2.0, "even", True, True),
    (1056, "E5M2", 32, 0.7, "away", True, True),
    (160, "E5M2", 32, 0.7, "away", True, False),
]


STOCHASTIC = OperandCast("E4M3", rounding="stochastic")
NVFP4 = OperandCast("NVFP4", -1, 16, scale="E4M3", outer_scale="tensor", chain="training")
FOUR_OVER_SIX = replace(NVFP4, largest_scale=256.0, candidates=(1.0, 1.5))
FP8_TENSOR = OperandCast("E5M2", -1, 16, scale="none", outer_scale="tensor")
FP8_BLOCKWISE = OperandCast("E4M3", -1, 128, scale="FP32")
CASTS = [
    STOCHASTIC,
    replace(STOCHASTIC, transform_size=16),
    replace(STOCHASTIC, axis=-2),
    replace(STOCHASTIC, axis=-2, transform_size=16),
    OperandCast("E4M3", -2, transform_size=32),
    OperandCast("E4M3", -1, 16, square=True),
    OperandCast("E4M3", -2, 16, square=True),
    OperandCast("E2M1", -2, 32, False, "floor", "stochastic", headroom=0.75),
    NVFP4,
    replace(NVFP4, axis=-2, rounding="stochastic", transform_size=16),
    replace(NVFP4, square=True),
    replace(NVFP4, axis=-2, square=True),
    FOUR_OVER_SIX,
    replace(FOUR_OVER_SIX, axis=-2),
    replace(FOUR_OVER_SIX, axis=-2, square=True),
    FP8_TENSOR,
    replace(FP8_TENSOR, axis=-2),
    FP8_BLOCKWISE,
    replace(FP8_BLOCKWISE, axis=-2),
    replace(FP8_BLOCKWISE, axis=-2, square=True),
    replace(FP8_BLOCKWISE, square=True),
]


def ahead(script: str, variants: list[Any], folder: Path) -> list[dict[str, Any]]:
    """Return what the script prints for each variant, in a process without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name(script)],
        input=json.dumps(variants),
        env=environment | {"TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_cast_any_stays_in_registers_and_moves_whole_vectors(tmp_path: Path) -> None:
    """Nothing goes through shared memory. A thread moves 16 bytes at a time, or 8 if blocks lie along columns.

    Only the 128 rows of a square block are spread over four warps, whose four maxima meet in shared memory.
    """
    variants = [(pack(cast), "cast") for cast in CASTS]
    for cast, found in zip(CASTS, ahead("ahead_cast_any.py", variants, tmp_path), strict=True):
        assert found["STACK"] == 0
        in_four_warps = cast.axis == -1 and cast.square and cast.block_size == 128
        assert ("st.shared" in found["ptx"]) == in_four_warps
        vector = "v4.b32" if cast.axis == -1 else "v2.b32"
        for moved in (r"ld\.global\S*\.", r"st\.global\S*\."):
            assert re.search(moved + vector, found["ptx"])
            assert not re.search(moved + r"b16", found["ptx"])


def assert_pipelined(found: dict[str, Any]) -> None:
    """Assert that a compiled product runs on tensor cores, loads ahead, and does not spill or fuse a scale."""
    assert found["STACK"] == 0
    assert "wgmma.mma_async" in found["ptx"]
    assert "cp.async.cg.shared.global" in found["ptx"]
    assert "fma.rn.f32" not in found["ptx"]
    assert re.search(r"st\.global\S*\.v4\.b32", found["ptx"])


def test_products_of_blocks_are_pipelined_and_stay_in_registers(tmp_path: Path) -> None:
    """They use tensor cores, however the operands lie in memory, and fuse no scale with the sum."""
    layouts = (["a_along", "b_down"], ["a_along", "b_along"], ["a_down", "b_along"])  # forward, dgrad, wgrad
    variants = [(layout, *tile) for layout in layouts for tile in TILES]
    for found in ahead("ahead_matmul_blocks.py", variants, tmp_path):
        assert_pipelined(found)


def test_grouped_products_run_on_tensor_cores_and_load_ahead(tmp_path: Path) -> None:
    """A group's tokens need not fill the last tile of wgrad, so the kernel loads them under a mask."""
    layouts = ((["a_along", "b_down"], True), (["a_along", "b_along"], True), (["a_down", "b_along"], False))
    cases = [(1, 0, tile) for tile in GROUPED_TILES] + [
        (64, size, tile) for size, tiles in ((0, GROUPED_TILES), (128, TILES_BY_BLOCKS)) for tile in tiles
    ]
    variants = [(*layout, groups, size, *tile) for layout in layouts for groups, size, tile in cases]
    for found in ahead("ahead_scaled_grouped_mm.py", variants, tmp_path):
        assert_pipelined(found)


def test_the_absmax_meets_only_at_the_end_of_a_tile(tmp_path: Path) -> None:
    """The kernel stays in registers, loads as the cast does, and stores one number."""
    casts = [cast for cast in CASTS if cast.has_outer]
    for cast, found in zip(
        casts, ahead("ahead_cast_any.py", [(pack(c), "absmax") for c in casts], tmp_path), strict=True
    ):
        assert found["STACK"] == 0
        assert re.search(r"ld\.global\S*\." + ("v4.b32" if cast.axis == -1 else "v2.b32"), found["ptx"])
        assert len(re.findall(r"st\.global", found["ptx"])) == 1


def test_two_casts_in_one_kernel_need_no_more_than_the_larger_of_them(tmp_path: Path) -> None:
    """No thread waits for another between the casts. The one along the rows moves vectors.

    A thread reads the column of its other cast number by number: with tiles in which it would move vectors there, too,
    the kernel takes 1.19 times as long on an H100.
    """
    variants = [(pack(NVFP4), "both"), (pack(replace(NVFP4, axis=-2)), "cast")]
    both, column = ahead("ahead_cast_any.py", variants, tmp_path)
    assert both["STACK"] == 0
    assert both["REG"] <= column["REG"]
    assert not any(word in both["ptx"] for word in ("st.shared", "bar.sync"))
    for moved in (r"ld\.global\S*\.", r"st\.global\S*\."):
        assert re.search(moved + r"v4\.b32", both["ptx"])


def test_norm_codes_stays_in_registers_and_moves_whole_vectors(tmp_path: Path) -> None:
    for (columns, fmt, *_, whole), found in zip(VARIANTS, ahead("ahead.py", VARIANTS, tmp_path), strict=True):
        assert found["STACK"] == 0
        assert found["REG"] <= (224 if fmt == "NVFP4" else 128)
        chunks = -(-columns // (2 ** (columns - 1).bit_length() // 8))
        loads = re.findall(r"ld\.global\S*\.v4\.b32", found["ptx"])
        assert len(loads) >= chunks if whole else loads
        if fmt in ("E4M3", "E5M2"):
            assert f"cvt.rn.satfinite.{fmt.lower()}x2.f32" in found["ptx"]
        assert ("min.s16x2.relu" in found["ptx"]) == (fmt == "E2M1")


def test_gradients_of_swiglu_and_of_heads_stay_in_registers(tmp_path: Path) -> None:
    """Two warps with casts wait for each other, and yet are faster than one (results/parts.md)."""
    most = {("swiglu", True): 192, ("swiglu", False): 48, ("heads", True): 128, ("heads", False): 128}  # registers
    variants = [(what, *c) for what in ("swiglu", "heads") for c in (("E4M3", "E4M3"), (None, "unread"))]
    for (what, row, _), found in zip(variants, ahead("ahead_gradients.py", variants, tmp_path), strict=True):
        assert found["STACK"] == 0
        assert found["REG"] <= most[what, bool(row)]
        assert "div." not in found["ptx"]
        assert any(word in found["ptx"] for word in ("bar.sync", "st.shared")) == bool(row)
        assert ("fma.rn.bf16x2" in found["ptx"]) == bool(row)
        assert "cvt.rn.satfinite" not in found["ptx"]
        assert all(moved.endswith(".v4.b32") for moved in re.findall(r"(?:ld|st)\.global\S*", found["ptx"]))


def test_cross_entropy_meets_only_at_the_end_of_a_row(tmp_path: Path) -> None:
    """Its loops have no barrier and no shuffle, and move 16 bytes at a time. A loop of one round is unrolled."""
    variants = [(128_256, True), (128_256, False), (32_000, True)]
    for (columns, with_gradient), found in zip(
        variants, ahead("ahead_cross_entropy.py", variants, tmp_path), strict=True
    ):
        assert found["STACK"] == 0
        assert re.search(r"ld\.global\S*\.v4\.b32", found["ptx"])
        assert bool(re.search(r"st\.global\S*\.v4\.b32", found["ptx"])) == with_gradient
        loops = re.findall(r"^(\$L__BB\w+):(.*?)bra\S*\s+\1;", found["ptx"], re.MULTILINE | re.DOTALL)
        assert len(loops) == (columns > 32_768) + with_gradient
        assert not any(word in loop for _, loop in loops for word in ("bar.sync", "shfl"))
        assert not any("ex2.approx.f32" in loop for _, loop in loops)  # which takes three instructions more


def test_kernels_of_probes_read_once_and_stay_in_registers(tmp_path: Path) -> None:
    """A tile as wide as the matrix is read once; a row of 768 is read twice, in three parts."""
    variants = [
        ("squares", 1024, "E4M3", 2.0, -1),
        ("squares", 1024, "E2M1", None, -1),
        ("squares", 768, None, 1.0, -1),
        ("bins", 1024, "E4M3", 2.0, -1),
        ("bins", 768, None, None, -1),
        ("counts", 4096, "E4M3", None, -1),
        ("counts", 4096, "E5M2", None, -2),
        ("counts", 1024, "E2M1", None, -2),
    ]
    for (what, columns, *_), found in zip(variants, ahead("ahead_probes.py", variants, tmp_path), strict=True):
        assert found["STACK"] == 0
        assert found["REG"] <= 160
        loads = re.findall(r"ld\.global\S*", found["ptx"])
        per_tile = {"squares": 4, "bins": 4, "counts": 2}[what]
        assert len(loads) == per_tile * (1 if columns != 768 else 3)
        assert all(load.endswith(".v4.b32") for load in loads)

"""Kernels compile for a GPU, and to what they should, where there is none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from interpreter import DEVICE as DEVICE  # before another import of Triton, where there is one

pytestmark = pytest.mark.slow

VARIANTS = [
    (4096, "E4M3", 32, 2.0, "even", False, True),
    (16384, "E2M1", 16, None, "even", False, True),
    (7168, "NVFP4", 16, 2.0, "even", True, True),
    (1056, "E5M2", 32, 0.7, "away", True, True),
    (160, "E5M2", 32, 0.7, "away", True, False),
]


def test_norm_codes_stays_in_registers_and_moves_whole_vectors(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("ahead.py")],
        input=json.dumps(VARIANTS),
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    for (columns, fmt, *_, whole), found in zip(VARIANTS, json.loads(run.stdout), strict=True):
        assert found["STACK"] == 0
        assert found["REG"] <= (224 if fmt == "NVFP4" else 128)
        chunks = -(-columns // (2 ** (columns - 1).bit_length() // 8))
        loads = re.findall(r"ld\.global\S*\.v4\.b32", found["ptx"])
        assert len(loads) >= chunks if whole else loads
        if fmt in ("E4M3", "E5M2"):
            assert f"cvt.rn.satfinite.{fmt.lower()}x2.f32" in found["ptx"]
        assert ("min.s16x2.relu" in found["ptx"]) == (fmt == "E2M1")

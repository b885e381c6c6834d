"""The benchmark of kernels runs small on CPU, and continues after it was cut off.

Its means, grid, figure and peers are right.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from each import each

from analysis.mxnorm import fig08_kernels
from benchmarks import compilers, kernel_tiles, kernels
from benchmarks.compilers import Compilers
from benchmarks.plain_norms import NORMS, PEERS
from mxstudy import results
from mxstudy.kernels import norm_codes
from mxstudy.kernels.norm_codes import row_tile
from mxstudy.numerics.cast import BlockCast

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("figure_rules")]

KERNELS = [
    "--hidden",
    "64",
    "192",
    "--tokens",
    "16",
    "32",
    "--blocks",
    "32",
    "--compile",
    "eager",
    "--case-seconds",
    "0",
]


@pytest.mark.slow
def test_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On CPU no column means anything except that it is there. The second call measures what is missing."""
    out = tmp_path / "made" / "kernels.json"
    kernels.main([*KERNELS, "--json", str(out), "--formats", "E4M3", "--seconds", "0"])
    assert json.loads(out.read_text())["rows"] == []
    assert "0 cases measured on CPU; time is up" in capsys.readouterr().out
    kernels.main([*KERNELS, "--json", str(out), "--formats", "E4M3"])
    first = json.loads(out.read_text())["rows"]
    with out.with_suffix(".jsonl").open("a") as file:
        file.write('{"same": {')  # a call that was killed
    kernels.main([*KERNELS, "--json", str(out), "--blocks", "16", "32"])
    written = json.loads(out.read_text())
    assert written["settings"]["device"] == "cpu"
    assert written["rows"][: len(first)] == first
    assert len(first) == 4
    cases = [(r["format"], r["block_size"], r["hidden_size"], r["tokens"]) for r in written["rows"]]
    assert sorted(cases) == [
        (f, b, d, t) for f in ("E2M1", "E4M3") for b in (16, 32) for d in (64, 192) for t in (16, 32)
    ]
    for row in written["rows"]:
        bits = {"E4M3": 8, "E2M1": 4}[row["format"]]
        numbers = row["tokens"] * row["hidden_size"]
        assert row["bytes"] == numbers * 2 + numbers * bits / 8 + numbers / row["block_size"] + row["tokens"] * 4
        assert row["over_compiled_rmsnorm"] == pytest.approx(row["rmsnorm_compiled_us"] / row["mxnorm_one_pass_us"])
        assert row["mxnorm_of_floor"] == pytest.approx(row["floor_us"] / row["mxnorm_one_pass_us"])
        assert 0 < row["floor_q1_us"] <= row["floor_us"] <= row["floor_q3_us"]
        assert row["rmsnorm_compiled_by"] == row["torchao_compiled_by"] == "eager"
        assert row["over_torchao"] == pytest.approx(row["torchao_compiled_us"] / row["mxnorm_one_pass_us"])
    assert [mean["cases"] for mean in written["settings"]["geometric_means"]] == [4] * 4
    assert "over_compiled_rmsnorm" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    fig08_kernels.main(["--runs", "made/kernels.json"])
    caption = (tmp_path / "figures" / "mxnorm_fig08_kernels.md").read_text()
    assert f"- CPU: 1 run ({written['provenance']['commit'][:12]})" in caption
    frame = results.load(["made/kernels"], "benchmark")
    assert frame["over_compiled_rmsnorm"].tolist() == [row["over_compiled_rmsnorm"] for row in written["rows"]]
    panels = fig08_kernels.draw(frame).axes
    assert [axes.get_title()[:13] for axes in panels] == [f"{f}, B = {b}:" for f in ("E2M1", "E4M3") for b in (16, 32)]
    drawn = {(x, y) for axes in panels for line in axes.lines[1:] for x, y in line.get_xydata().tolist()}
    for speedup in ("over_compiled_rmsnorm", "over_one_pass_rmsnorm", "compiled_over_compiled_rmsnorm"):
        assert {(row["hidden_size"], row[speedup]) for row in written["rows"]} <= drawn


def test_what_was_compiled_otherwise_is_another_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured by a call of its own, and is in no mean of the others. The first call's rows stay."""
    monkeypatch.setitem(compilers.MODES, "static", compilers.eager)
    out = tmp_path / "kernels.json"

    def rows(*modes: str) -> list[dict[str, Any]]:
        case = ["--hidden", "64", "--tokens", "16", "--blocks", "32", "--formats", "E4M3", "--case-seconds", "0"]
        kernels.main([*case, "--device", "cpu", "--json", str(out), "--compile", *modes])
        written = json.loads(out.read_text())
        assert [mean["cases"] for mean in written["settings"]["geometric_means"]] == [1]
        return written["rows"]

    (eager,), (static,), (both,) = rows("eager"), rows("static"), rows("static", "eager")
    assert (eager["rmsnorm_compiled_by"], static["rmsnorm_compiled_by"]) == ("eager", "static")
    assert rows("eager") == [eager]
    assert rows("eager", "static") == [both]
    assert len(out.with_suffix(".jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
def test_compilers_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    """A compiler that fails is reported, and the others continue."""
    groups = [kernels.Group("E4M3", 32, size) for size in (64, 96, 48)]
    with Compilers(2, "cpu") as compilers:
        compilers.compile(groups, [16], ["eager"], math.inf)
        compilers.compile(groups[:1], [16], ["eager"], math.inf)
    printed = capsys.readouterr().out
    assert "1 of 3 groups failed to compile ahead" in printed
    assert "2 groups compiled in" in printed
    assert "1 groups compiled in" in printed


def test_the_grid_of_kernels_is_the_papers() -> None:
    """MXNorm paper, H.1: powers of two, and three evenly spaced numbers between each two."""
    between = {2**e + step * 2**e // 4 for e in range(10, 14) for step in range(4)}
    assert {*kernels.HIDDEN} == between | {2**14}
    assert len(kernels.HIDDEN) == 17
    assert kernels.TOKENS == (4096, 8192, 16384, 32768, 65536)


def test_means_of_kernels_are_geometric_and_of_large_shapes() -> None:
    times = {"floor copy_": 1.0, "floor 1024 x 4": 1.5, "alike": 1.5}
    times |= {
        "rmsnorm_one_pass": 2.0,
        "mxnorm_one_pass": 2.0,
        "mxnorm_compiled eager": 3.0,
        "torchao_compiled eager": 5.0,
    }
    rows = []
    for tokens, compiled in ((2**10, 2.0), (2**15, 8.0)):
        us = {name: kernels.Microseconds(at, at, at) for name, at in times.items()}
        us |= {"rmsnorm_compiled eager": kernels.Microseconds(compiled, compiled, compiled)}
        us |= {"rmsnorm_compiled static": kernels.Microseconds(9.0, 9.0, 9.0)}
        x = torch.empty(tokens, 1024, dtype=torch.bfloat16)
        rows.append(kernels.row(kernels.Group("E4M3", 32, 1024), x, us))
    every, large = kernels.summary(rows)
    assert every["over_compiled_rmsnorm"] == pytest.approx((1 * 4) ** 0.5)
    assert (large["cases"], large["over_compiled_rmsnorm"]) == (1, pytest.approx(4))
    assert every["least_mxnorm_of_floor"] == 0.5
    assert every["mxnorm_of_alike"] == pytest.approx(0.75)
    assert {row["floor_by"] for row in rows} == {"copy_"}
    assert {row["rmsnorm_compiled_by"] for row in rows} == {"eager"}


@each("fmt", ["E4M3", "E2M1"])
@each("norm", NORMS)
def test_plain_norms_are_those_of_the_kernels(norm: str, fmt: str) -> None:
    """They agree up to a last bit of x / rms, which moves few values."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, scales = NORMS[norm](x, fmt, 32)
    expected = norm_codes(x, kernels.OURS[norm], fmt, BlockCast())
    assert codes.shape == expected.codes.shape
    assert (codes != expected.codes).float().mean() < 1e-3
    assert (scales != expected.scales).float().mean() < 1e-3


@each("fmt", ["E4M3", "E2M1"])
def test_torchao_casts_the_same_but_for_the_rounding_to_bf16(fmt: str) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, scales = PEERS["torchao"](x, fmt, 32)
    expected, of_blocks = NORMS["rmsnorm"](x, fmt, 32)
    assert codes.shape == expected.shape
    assert (codes != expected).float().mean() < 0.05
    assert (scales != of_blocks).float().mean() < 0.01


def test_tiles_of_kernels_have_whole_vectors_and_few_chunks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for columns in (1024, 7168, 16384):
        for rows, chunk, warps in kernel_tiles.tiles(columns, 64):
            assert rows * chunk % (warps * 32 * 8) == 0
            assert columns / chunk <= 8
        assert row_tile(columns, 64) in [*kernel_tiles.tiles(columns, 64)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        kernel_tiles.main([])
    assert "there is none here" in capsys.readouterr().err

"""The benchmark of layers runs small on CPU, its arms compute the same, and it assigns kernels to the right layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import layers
from benchmarks.decode import decode
from benchmarks.kept import Kept
from benchmarks.layer import KERNELS, NORMS, PRECISIONS, SIZES, cast_rows
from mxstudy.numerics.cast import quantize
from mxstudy.numerics.scales import e4m3_outer_scale

pytestmark = pytest.mark.integration
CPU = torch.device("cpu")


@pytest.mark.slow
def test_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--size", "tiny", "--device", "cpu", "--compile", "eager", "--profiles", "2", "--batches", "2"]
    out = tmp_path / "layers.json"
    of_others = {"precision": "MXFP8", "batch": 2, "tokens": 32, "norm": "mxnorm", "kernels": "one_pass"}
    of_others |= {"layer_us": 1.0, "speedup": 9.0, "over_compiled_rmsnorm": 9.0}
    for settings in ({"size": "llama3_8b", "compile": "eager"}, {"size": "tiny", "compile": "static"}):
        Kept(out, CPU).add(settings | of_others)  # neither in the table nor in the means
    layers.main([*words, "--json", str(out), "--tokens", "32", "--precisions", "MXFP8"])
    first = json.loads(out.read_text())["rows"]
    layers.main([*words, "--json", str(out), "--tokens", "32", "64"])
    written = json.loads(out.read_text())
    assert written["rows"][:4] == first
    assert len(written["rows"]) == 2 * 2 * 4
    assert (written["settings"]["device"], written["settings"]["left_out"]) == ("cpu", 2)
    for row in written["rows"]:
        same = [r for r in written["rows"] if (r["precision"], r["tokens"]) == (row["precision"], row["tokens"])]
        times = {(r["norm"], r["kernels"]): r["layer_us"] for r in same}
        assert row["speedup"] == pytest.approx(times["rmsnorm", row["kernels"]] / row["layer_us"])
        assert row["over_compiled_rmsnorm"] == pytest.approx(times["rmsnorm", "compiled"] / row["layer_us"])
        assert row["gemms"] == "emulated in bf16"
    assert [(mean["precision"], mean["cases"]) for mean in written["settings"]["geometric_means"]] == [
        *(("MXFP8", 2), ("MXFP8", 2), ("NVFP4", 2), ("NVFP4", 2))
    ]
    assert "over_compiled_rmsnorm" in capsys.readouterr().out


def test_rows_of_changed_code_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Kept(tmp_path / "x.json", CPU).add({"us": 1.0})
    assert Kept(tmp_path / "x.json", CPU).rows == [{"us": 1.0}]
    monkeypatch.setattr("benchmarks.kept.code", lambda: "of a kernel that is being written")
    assert Kept(tmp_path / "x.json", CPU).rows == []


@pytest.mark.parametrize("name", PRECISIONS)
def test_all_arms_compute_the_same(name: str) -> None:
    """They agree up to last bits of x / rms, which move some values. MXNorm estimates the RMS within a few per cent."""
    size, precision = SIZES["tiny"], PRECISIONS[name]
    torch.manual_seed(0)
    weights = layers.random_weights(size, precision, CPU)
    x, branch = torch.randn(2, 2, 16, size.hidden).bfloat16()
    found = {}
    for norm in NORMS:
        for kernel in KERNELS:
            stream, out = layers.forward_of((norm, kernel), size, precision, weights, "eager", CPU)(x, branch)
            assert stream.shape == out.shape == x.shape
            found[norm, kernel] = (stream + out).float()
    for norm in NORMS:
        one, other = found[norm, "compiled"], found[norm, "one_pass"]
        assert (one - other).norm() < 0.01 * one.norm()
    exact, estimated = found["rmsnorm", "one_pass"], found["mxnorm", "one_pass"]
    assert 1e-3 < (exact - estimated).norm() / exact.norm() < 0.1


@pytest.mark.parametrize("name", PRECISIONS)
def test_casts_of_what_comes_from_no_norm(name: str) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    fmt, block_size = PRECISIONS[name]
    rows = e4m3_outer_scale(x.float().abs().amax(-1, keepdim=True), 6.0) if name == "NVFP4" else None
    expected = quantize(x, fmt, block_size, tensor_scale=rows)
    codes, scales, tensor_scale = cast_rows(x, PRECISIONS[name])
    assert torch.equal(scales, expected.scales.view(torch.uint8))
    assert (codes != expected.codes).float().mean() < 0.02  # NVFP4 rounds its factors in another place
    assert torch.allclose(
        decode(codes, scales, fmt).float() * tensor_scale, expected.dequantize(), rtol=2**-7, atol=0.3 * name.count("4")
    )


def test_kernels_are_put_down_to_layers() -> None:
    """A layer goes from one attention to the next. Two layers are left out, and the compiler's names mean nothing."""
    names = ["nvjet_tst_qkv", "triton_poi_fused_scaled_dot_product_flash_attention", "pytorch_flash::flash_fwd_kernel"]
    names += ["norm_codes_kernel", "decode_kernel", "sm90_xmma_gemm_bf16", "triton_red_fused_mul"]
    kernels = [(name, 10.0 * layer + i) for layer in range(5) for i, name in enumerate(names)]
    found = layers.by_layer(kernels, 5)
    assert len(found) == 2
    assert found[0] == {"attention": 32.0, "norm": 23.0, "decode": 24.0, "gemm": 25.0 + 30.0, "rest": 26.0 + 31.0}
    row = layers.row(("mxnorm", "one_pass"), found)
    assert row["layer_us"] == (167.0 + 227.0) / 2
    with pytest.raises(RuntimeError, match="5 attention kernels in 8 layers"):
        layers.by_layer(kernels, 8)

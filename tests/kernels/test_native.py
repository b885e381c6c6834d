"""The native backend is refused where it cannot run, and with torchao's emulated kernels gives our emulated result."""

from __future__ import annotations

import pytest
import torch
from each import slow_but
from gemms import linear

from mxstudy.config import PRECISIONS
from mxstudy.kernels import native
from mxstudy.numerics import BlockCast
from mxstudy.numerics.gemms import mx_linear

CUDA = torch.device("cuda")
COVERED = ["mxfp8", "mxfp4", "mxfp8_forward_only", "mxfp8_backward_only", "bf16"]


def run(row: str, is_native: bool, dtype: torch.dtype, backend: str | None = None) -> list[torch.Tensor]:
    """Return h, dX and dW."""
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, columns: int) -> torch.Tensor:
        shift = torch.randint(-9, 9, (rows, columns), generator=generator)
        return torch.ldexp(torch.randn(rows, columns, generator=generator), shift).to(dtype)

    x, weight, dh = draw(64, 96).requires_grad_(), draw(160, 96).requires_grad_(), draw(64, 160)
    call = torch.compile(mx_linear, backend=backend, fullgraph=True) if backend else mx_linear
    h = call(x, weight, linear(PRECISIONS[row], native=is_native))
    return [h.detach(), *torch.autograd.grad(h, (x, weight), dh)]


@pytest.fixture
def emulated_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    monkeypatch.setattr(native, "KERNELS", "EMULATED")


@pytest.mark.parametrize("row", COVERED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_native_path_gives_the_emulated_result(row: str, dtype: torch.dtype, emulated_kernels: None) -> None:
    for one, other in zip(run(row, True, dtype), run(row, False, dtype), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("row", slow_but(["mxfp4"], ["mxfp8", "mxfp4"]))
def test_the_native_path_is_traced_without_a_break(row: str, emulated_kernels: None) -> None:
    """Inductor has no E8M0 on CPU, so the graph runs as it was traced."""
    torch._dynamo.reset()
    got = run(row, True, torch.float32, backend="aot_eager")
    for one, other in zip(got, run(row, False, torch.float32), strict=True):
        assert other.norm() > 0
        assert torch.equal(one, other)


def test_the_native_path_is_taken(emulated_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the two tests above would compare emulation with itself."""
    from torchao.prototype.mx_formats import mx_tensor

    shapes = []
    dispatch = mx_tensor._addmm_mx_dispatch

    def spy(a: torch.Tensor, b: torch.Tensor, *rest: object) -> torch.Tensor:
        shapes.append((*a.shape, b.shape[1]))
        return dispatch(a, b, *rest)

    monkeypatch.setattr(mx_tensor, "_addmm_mx_dispatch", spy)
    run("mxfp8", True, torch.float32)
    assert shapes == [(64, 96, 160), (64, 160, 96), (160, 64, 96)]


def why_not(row: str = "mxfp8", cast: BlockCast | None = None, compute: torch.dtype = torch.bfloat16) -> str | None:
    return native.why_not_native(PRECISIONS[row].filled(cast or BlockCast()), compute, CUDA)


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))


def test_a_gpu_that_is_not_here_is_asked_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may be planned on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why_not() is None
    assert why_not("mxfp8_e5m2_grad") is not None


def test_without_cuda_it_is_refused() -> None:
    reason = native.why_not_native(PRECISIONS["mxfp8"].filled(BlockCast()), torch.bfloat16, torch.device("cpu"))
    assert reason == "it needs CUDA with compute capability 10.0 (SM100) or later, and the device is cpu"


def test_an_older_gpu_is_named_with_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert why_not() == "it needs compute capability 10.0 (SM100) or later, and NVIDIA H200 has 9.0"


@pytest.mark.parametrize("row", COVERED)
def test_what_the_hardware_covers(row: str, blackwell: None) -> None:
    assert why_not(row) is None


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("mxfp8_e5m2_grad", "E5M2 x E4M3"),
        ("mxfp6_e2m3", "E2M3 x E2M3"),
        ("mxfp8_bf16_act", "- x E4M3"),
        ("nvfp4_forward_only", "NVFP4 x NVFP4"),
        ("fp8_tensor", "one a tensor"),
    ],
)
def test_rows_that_torchao_does_not_multiply_are_refused(row: str, named: str, blackwell: None) -> None:
    assert named in str(why_not(row))


def test_other_blocks_and_dtypes_are_refused(blackwell: None) -> None:
    assert "native GEMMs do not support forward_x.block_size=16, only 32" in str(why_not(cast=BlockCast(block_size=16)))
    assert "returns bf16" in str(why_not(compute=torch.float32))

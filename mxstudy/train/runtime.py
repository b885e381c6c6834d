"""The machine under a run: device, determinism, how fast it could be."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mxstudy.reader import ConfigError

# Dense bf16 FLOP/s by the data sheets; MFU of a GPU that is not here is null.
PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
}


_planned_gpus: int | None = None  # of a job on another machine; None: it will run in this process


@contextmanager
def planned_for(gpus: int | None) -> Iterator[None]:
    """What is resolved meanwhile is resolved for a job that has so many GPUs of a node, whatever this machine has."""
    global _planned_gpus
    before, _planned_gpus = _planned_gpus, gpus
    try:
        yield
    finally:
        _planned_gpus = before


def is_planned() -> bool:
    """For another machine, or other processes of this one."""
    return _planned_gpus is not None


def gpus_there() -> int:
    """Of this machine, or of the job that is planned."""
    return torch.cuda.device_count() if _planned_gpus is None else _planned_gpus


def resolve_device(wanted: str, key: str = "train.device") -> torch.device:
    """auto is CUDA where there is one. Raises ConfigError, with the `key`, for a CUDA that is not there."""
    is_there = torch.cuda.is_available() if _planned_gpus is None else _planned_gpus > 0
    if wanted == "cuda" and not is_there:
        where = "here" if _planned_gpus is None else "without; hydra.launcher.gpus_per_node=1 gives a job one"
        raise ConfigError(f"{key}: cuda was asked for and there is none; {key}=cpu runs {where}")
    return torch.device("cuda" if wanted != "cpu" and is_there else "cpu")


def configure_torch(compile: bool = False, deterministic: bool = False) -> None:
    """Numerics first: full FP32, FP32 accumulation, and no rounding that a compiler may drop."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    if compile:
        import torch._inductor.config as inductor

        torch._dynamo.reset()  # what an earlier arm compiled must not make this arm's sizes and floats dynamic
        inductor.emulate_precision_casts = True
        keep_roundings()
        if hasattr(inductor, "eager_numerics"):
            inductor.eager_numerics.division_rounding = True
    keep_freed_memory()


def keep_roundings() -> None:
    """Take from Inductor what makes x of x.to(bfloat16).to(float32): a pass, and on CPU what it keeps of conversions.

    Before torch 2.13 it does so whatever `emulate_precision_casts` says; then it asks.
    """
    import torch.compiler.config as compiler
    from torch._inductor.codegen.cpp import CppKernel
    from torch._inductor.fx_passes import joint_graph

    for entries in joint_graph.patterns.patterns.values():
        entries[:] = [e for e in entries if getattr(e, "handler", None) is not joint_graph.pointless_convert]
    CppKernel.cache_dtype_convert = lambda *_: None  # type: ignore[method-assign]
    compiler.cache_key_tag = "mxstudy keeps all roundings"  # a cached graph may have lost some


def keep_freed_memory() -> None:
    """Tell glibc to keep what is freed: else an eager step on CPU spends most of its time in page faults."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        m_trim_threshold, m_mmap_threshold = -1, -3
        if hasattr(libc, "mallopt"):
            libc.mallopt(m_mmap_threshold, 1 << 30)
            libc.mallopt(m_trim_threshold, 1 << 30)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of the device, None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    matches = [key for key in PEAK_FLOPS if name.startswith(key)]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None

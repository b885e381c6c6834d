"""Set up the machine for a run: device, determinism, memory, and its peak FLOP/s."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from mxstudy.compat.torch_compiler import build_dtype_rules_once, keep_floats_constant, keep_roundings
from mxstudy.reader import ConfigError

# Dense bf16 FLOP/s by the data sheets: the longest name with which a GPU's begins. No MFU is recorded for other GPUs.
PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
}


# GPUs per node of a job that is planned for another machine or other processes; None: the job runs in this process.
_planned_gpus: ContextVar[int | None] = ContextVar("planned_gpus", default=None)


@contextmanager
def planned_for(gpus: int | None) -> Iterator[None]:
    """Resolve devices, within the block, for a job with `gpus` GPUs per node, whatever this machine has."""
    before = _planned_gpus.set(gpus)
    try:
        yield
    finally:
        _planned_gpus.reset(before)


def is_planned() -> bool:
    """Return whether devices are resolved for a job on another machine, or in other processes of this one."""
    return _planned_gpus.get() is not None


def gpus_there() -> int:
    """Return the number of GPUs of this machine, or per node of the job that is planned."""
    planned = _planned_gpus.get()
    return torch.cuda.device_count() if planned is None else planned


def resolve_device(wanted: str, key: str = "train.device") -> torch.device:
    """Return the device for `wanted` (auto, cuda or cpu); auto is CUDA if there is a GPU.

    Raises ConfigError, naming the config key `key`, if CUDA is wanted and there is no GPU.
    """
    planned = _planned_gpus.get()
    is_there = torch.cuda.is_available() if planned is None else planned > 0
    if wanted == "cuda" and not is_there:
        where = "here" if planned is None else "without; hydra.launcher.gpus_per_node=1 gives a job one"
        raise ConfigError(f"{key}: cuda was asked for, but there is no GPU; {key}=cpu runs {where}")
    return torch.device("cuda" if wanted != "cpu" and is_there else "cpu")


def configure_torch(compile: bool = False, deterministic: bool = False) -> None:
    """Set up torch for exact numerics: full FP32, FP32 accumulation, and no rounding dropped by the compiler."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    if compile:
        torch.compiler.reset()  # else code compiled for an earlier arm makes this arm's sizes dynamic
        keep_floats_constant()
        keep_roundings()
        build_dtype_rules_once()
    keep_freed_memory()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def share_of_cores(processes: int) -> int:
    """Return the number of threads of each of these processes on these cores; no more than torch's default."""
    return max(1, min(torch.get_num_threads(), cores() // processes))


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory; otherwise an eager step on CPU spends most of its time in page faults."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        m_trim_threshold, m_mmap_threshold = -1, -3
        if hasattr(libc, "mallopt"):
            libc.mallopt(m_mmap_threshold, 1 << 30)
            libc.mallopt(m_trim_threshold, 1 << 30)


def peak_flops(device: torch.device) -> float | None:
    """Return the dense bf16 FLOP/s of the device, or None if it is not known, as of a CPU or a part of a GPU (MIG)."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if " MIG " in name:
        return None
    matches = [key for key in PEAK_FLOPS if name.startswith(key)]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None

"""Read the file of a `FeatureRing`; does not import torch, because figures use it too.

spikes/step_00001234.safetensors    `steps` int64 [n], and under each norm's name the features' absmax [n, size]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

STEPS = "steps"
DTYPES = {"I64": np.int64, "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def read_ring(path: Path) -> tuple[list[int], dict[str, np.ndarray]]:
    """Return the steps that a ring's file covers, and each norm's absmax, float32 [steps, size]."""
    from safetensors import deserialize

    tensors = {name: numbers_of(tensor) for name, tensor in deserialize(path.read_bytes())}
    steps = tensors.pop(STEPS).tolist()
    return steps, {name: absmax.astype(np.float32) for name, absmax in tensors.items()}


def numbers_of(tensor: dict[str, Any]) -> np.ndarray:
    """Return a tensor of the file as a NumPy array; bfloat16, which NumPy lacks, as float32."""
    numbers = np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return (numbers.astype(np.uint32) << 16).view(np.float32) if tensor["dtype"] == "BF16" else numbers

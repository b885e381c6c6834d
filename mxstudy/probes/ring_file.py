"""The file of a ring of features, as `FeatureRing` writes it; read without torch, for figures need it too.

spikes/step_00001234.safetensors    `steps` int64 [n], and by each norm's name its features' absmax [n, size]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

STEPS = "steps"
DTYPES = {"I64": np.int64, "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def read_ring(path: Path) -> tuple[list[int], dict[str, np.ndarray]]:
    """Return the steps that a ring's file covers, and of every norm float32 [steps, size]."""
    from safetensors import deserialize

    tensors = {name: numbers_of(tensor) for name, tensor in deserialize(path.read_bytes())}
    steps = tensors.pop(STEPS).tolist()
    return steps, {name: absmax.astype(np.float32) for name, absmax in tensors.items()}


def numbers_of(tensor: dict[str, Any]) -> np.ndarray:
    """Return a tensor of the file as NumPy has it; bfloat16, which it has not, as float32."""
    numbers = np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return (numbers.astype(np.uint32) << 16).view(np.float32) if tensor["dtype"] == "BF16" else numbers

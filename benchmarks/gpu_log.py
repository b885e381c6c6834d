"""Read a GPU's clock, power and temperature while it is timed, from nvidia-smi, which every driver brings.

A GPU at its power limit lowers its clock, by an amount that depends on the numbers that it multiplies. So two times can
be compared only beside the clocks at which they were taken.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

EVERY_MS = 50
# nvidia-smi's fields under the names of our columns: clock and power are those of this moment, not of the last second.
FIELDS = {"sm_mhz": "clocks.sm", "power_w": "power.draw.instant", "temperature_c": "temperature.gpu"}
EXTREMES: dict[str, Callable[[np.ndarray], float]] = {"min": np.min, "median": np.median, "max": np.max}


class Span(NamedTuple):
    """Two times of `time.perf_counter`."""

    began_s: float
    ended_s: float


class GpuLog:
    """The readings of one GPU during a `with` block. A CPU has none.

    Raises RuntimeError with nvidia-smi's own words if it gives no readings.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.readings: list[tuple[float, list[float]]] = []  # [(time, a number per field)]
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> GpuLog:
        if self.device.type == "cuda":
            gpu = f"GPU-{str(torch.cuda.get_device_properties(self.device).uuid).removeprefix('GPU-')}"
            fields = f"--query-gpu={','.join(FIELDS.values())}"
            words = ["nvidia-smi", "-i", gpu, fields, "--format=csv,noheader,nounits", f"--loop-ms={EVERY_MS}"]
            self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if not self.keep(line := self.line()):  # so that a failure is found before anything is timed
                self.process.kill()
                self.process.wait()
                raise RuntimeError(f"nvidia-smi gives no {', '.join(FIELDS.values())}: {line.strip()}")
            self.thread = threading.Thread(target=self.read, daemon=True)
            self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.thread.join()

    def read(self) -> None:
        while line := self.line():
            self.keep(line)

    def line(self) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def keep(self, line: str) -> bool:
        """Keep a line that has a number per field, and return whether it is one."""
        try:
            values = [float(cell) for cell in line.split(",")]
        except ValueError:
            return False
        is_whole = len(values) == len(FIELDS)
        if is_whole:
            self.readings.append((time.perf_counter(), values))
        return is_whole

    def over(self, spans: Sequence[Span]) -> dict[str, Any]:
        """Return least, median and largest reading of each field within the spans, or None where there is none."""
        times = np.array([at_s for at_s, _ in self.readings])
        inside = np.zeros(len(times), bool)
        for span in spans:
            inside |= (times >= span.began_s) & (times <= span.ended_s)
        values = np.array([values for _, values in self.readings]).reshape(-1, len(FIELDS))[inside]
        return {
            f"{name}_{which}": float(extreme(column)) if len(column) else None
            for name, column in zip(FIELDS, values.T, strict=True)
            for which, extreme in EXTREMES.items()
        }


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row as a terminal shows it, with one cell, 'least / median / largest', for the readings of a field."""
    cells = {name: [row[f"{name}_{which}"] for which in EXTREMES] for name in FIELDS}
    hidden = {f"{name}_{which}" for name in FIELDS for which in EXTREMES}
    joined = {
        name: None if None in cell else " / ".join(f"{value:.0f}" for value in cell) for name, cell in cells.items()
    }
    return {key: value for key, value in row.items() if key not in hidden} | joined

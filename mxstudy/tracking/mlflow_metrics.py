"""Turn a journal's row into MLflow metrics, grouped in folders; long rows are reduced to a readable number of metrics.

MLflow makes a section of charts for each prefix that ends in a slash, so a name has one slash: FOLDER/WHAT.IT.IS.
It shows metrics under system/ on a separate page. The journal keeps everything: every layer, constants, lists.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean
from typing import Any

from mxstudy.tracking.journal import Row

Values = dict[str, Any]
Quantities = dict[str, tuple[str, ...]]  # quantity -> the statistics that are worth a chart

# For rows without a probe's name: the metric of each key that is not called train/KEY.
METRIC_NAMES = {
    "validation_loss": "val/loss",
    "unigram_entropy_nats": "val/unigram_entropy_nats",
    "tokens_per_s": "system/tokens_per_s",
    "mfu": "system/mfu",
    "memory_gib": "system/memory_gib",
    "parameters": "system/parameters",
    "active_matmul_parameters": "system/active_matmul_parameters",
    "ranks": "system/ranks",
}
STATISTICS: dict[str, Callable[[list[float]], float]] = {"mean": fmean, "min": min, "max": max}
SATURATION: Quantities = {  # the values of a Gaussian are not listed because they never change
    "overflow_fraction": ("mean", "max"),
    "max_fraction": ("mean", "max"),
    "underflow_fraction": ("mean", "max"),
    "sqnr_db": ("mean", "min"),
    "scale_exponent_mean": ("mean",),
    "scale_exponent_min": ("min",),
    "scale_exponent_max": ("max",),
}
OUTLIERS: Quantities = {"absmax": ("mean", "max"), "sharing_tokens": ("max",), "rms": ("mean", "max")}
ROUTING: Quantities = {"busiest": ("max",), "idle": ("max",), "entropy": ("mean", "min"), "padding": ("mean",)}
LAST_BIN: Quantities = {
    "overflow_fraction": ("mean", "max"),
    "max_fraction": ("mean", "max"),
    "literal_fraction": ("mean", "max"),
}
WEIGHTS: Quantities = {
    "rms": ("mean", "max"),
    "absmax": ("max",),
    "mean": ("mean",),
    "std": ("mean", "max"),
    "min": ("min",),
    "max": ("max",),
}


def metrics_of(row: Row, spikes: int = 0) -> Iterator[tuple[str, float]]:
    """Yield MLflow's (name, value) for each number of a row; `spikes`: number of spikes so far, this row's included."""
    if "probe" in row:
        folder, select = PROBES.get(row["probe"], (row["probe"], everything))
        named = {metric_name(folder, key): value for key, value in select(row["values"]).items()}
    elif "spike" in row:
        named = {"train/spikes": spikes, "train/spike_loss": row["spike"]["loss"]}
    else:
        named = {
            METRIC_NAMES.get(key, f"train/{key}"): value for key, value in row.items() if key not in ("step", "time_s")
        }
    for name, value in named.items():
        if isinstance(value, int | float):
            yield allowed(name), float(value)


def metric_name(folder: str | None, key: str) -> str:
    """Return the metric's name FOLDER/WHAT.IT.IS of a key; without a folder, the first part of the key is the folder.

    Of 'layers.0.norm/rms' it is 'rms.layers.0.norm', because MLflow's pages cut a long name off at its end, and the
    long parts are what the metrics of a folder have in common.
    """
    own, _, rest = key.partition("/") if folder is None else (folder, "", key)
    of, _, what = rest.rpartition("/")
    return f"{own}/{what}.{of.replace('/', '.')}" if of else f"{own}/{what}"


def everything(values: Values) -> Values:
    return values


def nothing(values: Values) -> Values:
    """Return no metrics: the counts of histograms are lists, and the bound beside them is a constant."""
    return {}


def whole_model(values: Values) -> Values:
    """Return the values of 'model/<quantity>' as '<quantity>', without those of single parameters."""
    return {key.removeprefix("model/"): value for key, value in values.items() if key.startswith("model/")}


def gains_over_layers(values: Values) -> Values:
    """Return the gains' values over all layers, without those of a Gaussian, which never change."""
    measured = {key: value for key, value in values.items() if not key.startswith("gaussian.")}
    return over(without_layer, LAST_BIN, measured)


def over(group: Callable[[str], str], quantities: Quantities, values: Values) -> Values:
    """Reduce '<tensor>/<quantity>' to '<group>/<quantity>_<statistic>' over the finite numbers of a group's tensors."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for key, value in values.items():
        tensor, quantity = key.rsplit("/", 1)
        if quantity in quantities and isinstance(value, int | float) and math.isfinite(value):
            found[group(tensor), quantity].append(value)
    return {
        f"{where}/{quantity if quantity.endswith(statistic) else f'{quantity}_{statistic}'}": STATISTICS[statistic](
            numbers
        )
        for (where, quantity), numbers in found.items()
        for statistic in quantities[quantity]
    }


def operand_of(tensor: str) -> str:
    """Return OPERAND of '<linear>/<operand>', to group a GEMM's operand over all linears."""
    return tensor.rsplit("/", 1)[1]


def without_layer(tensor: str) -> str:
    """Return 'layers.3.attention.wo.weight' as 'layers.attention.wo.weight', to group a parameter over all layers."""
    return re.sub(r"\blayers\.\d+\.", "layers.", tensor)


# Probe name -> its folder (None: the first part of each key) and a function that selects the values of its rows that go
# there. The rows of any other probe go completely to a folder of its name.
PROBES: dict[str, tuple[str | None, Callable[[Values], Values]]] = {
    "norm_output_rms": ("norm_rms", everything),
    "activation_histograms": ("activation_histograms", nothing),
    "outlier_features": ("outlier_features", partial(over, without_layer, OUTLIERS)),
    "saturation": ("saturation", partial(over, operand_of, SATURATION)),
    "gradient_bias": ("gradient_bias", whole_model),
    "last_bin": ("last_bin", gains_over_layers),
    "weights": ("weights", partial(over, without_layer, WEIGHTS)),
    "memory": ("system", everything),
    "timing": ("system", everything),
    "corpora": ("system", everything),
    "routing": ("routing", partial(over, without_layer, ROUTING)),
    "ranks": ("system", everything),  # values by rank are lists, so only the slowdown remains
    "replicas": (None, everything),  # train/loss, loss/REPLICA and grad_norm/REPLICA
}


def allowed(name: str) -> str:
    """Return a name with the characters that MLflow refuses, such as the * of `layers.*`, replaced by _."""
    return re.sub(r"[^\w. :/-]", "_", name)

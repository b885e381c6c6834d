"""A journal's row as MLflow shows it: metrics in folders, of long rows a part that can be read.

MLflow makes a section of charts of every prefix that ends in a slash, so a name has one slash: FOLDER/WHAT.IT.IS.
What is under system/ it shows on a page of its own. The journal keeps everything: every layer, constants, lists.
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
Quantities = dict[str, tuple[str, ...]]  # with the statistics that are worth a chart

# Of rows without a probe's name: where a number goes that is not called train/KEY.
PLACES = {
    "validation_loss": "val/loss",
    "unigram_entropy_nats": "val/unigram_entropy_nats",
    "tokens_per_s": "system/tokens_per_s",
    "mfu": "system/mfu",
    "memory_gib": "system/memory_gib",
    "parameters": "system/parameters",
    "ranks": "system/ranks",
}
STATISTICS: dict[str, Callable[[list[float]], float]] = {"mean": fmean, "min": min, "max": max}
SATURATION: Quantities = {  # what is not named here, a Gaussian's values, never changes
    "overflow_fraction": ("mean", "max"),
    "max_fraction": ("mean", "max"),
    "underflow_fraction": ("mean", "max"),
    "sqnr_db": ("mean", "min"),
    "scale_exponent_mean": ("mean",),
    "scale_exponent_min": ("min",),
    "scale_exponent_max": ("max",),
}
OUTLIERS: Quantities = {"absmax": ("mean", "max"), "sharing_tokens": ("max",), "rms": ("mean", "max")}
WEIGHTS: Quantities = {
    "rms": ("mean", "max"),
    "absmax": ("max",),
    "mean": ("mean",),
    "std": ("mean", "max"),
    "min": ("min",),
    "max": ("max",),
}


def metrics_of(row: Row, spikes: int = 0) -> Iterator[tuple[str, float]]:
    """Names in MLflow and values of what a row holds; `spikes`: how many there have been, with this row's."""
    if "probe" in row:
        folder, select = PROBES.get(row["probe"], (row["probe"], everything))
        named = {place(folder, key): value for key, value in select(row["values"]).items()}
    elif "spike" in row:
        named = {"train/spikes": spikes, "train/spike_loss": row["spike"]["loss"]}
    else:
        named = {PLACES.get(key, f"train/{key}"): value for key, value in row.items() if key not in ("step", "time_s")}
    for name, value in named.items():
        if isinstance(value, int | float):
            yield allowed(name), float(value)


def place(folder: str | None, key: str) -> str:
    """Where there is no folder the key begins with its own."""
    own, _, rest = key.partition("/") if folder is None else (folder, "", key)
    return f"{own}/{rest.replace('/', '.')}"


def everything(values: Values) -> Values:
    return values


def nothing(values: Values) -> Values:
    """Counts are lists, and the bound beside them is a constant."""
    return {}


def whole_model(values: Values) -> Values:
    """'model/<quantity>' without those of single parameters."""
    return {key.removeprefix("model/"): value for key, value in values.items() if key.startswith("model/")}


def over(group: Callable[[str], str], quantities: Quantities, values: Values) -> Values:
    """'<place>/<quantity>' as '<group>/<quantity>_<statistic>' over all places of a group, where it is finite."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for key, value in values.items():
        place, quantity = key.rsplit("/", 1)
        if quantity in quantities and math.isfinite(value):
            found[group(place), quantity].append(value)
    return {
        f"{where}/{quantity if quantity.endswith(statistic) else f'{quantity}_{statistic}'}": STATISTICS[statistic](
            numbers
        )
        for (where, quantity), numbers in found.items()
        for statistic in quantities[quantity]
    }


def operand_of(place: str) -> str:
    """'<linear>/<operand>': a GEMM's operand, in all linears."""
    return place.rsplit("/", 1)[1]


def without_layer(place: str) -> str:
    """'layers.3.attention.wo.weight' as 'layers.attention.wo.weight'."""
    return re.sub(r"\blayers\.\d+\.", "layers.", place)


# By a probe's name: its folder, and what of its rows goes there; any other has a folder of its own name, and all goes.
PROBES: dict[str, tuple[str | None, Callable[[Values], Values]]] = {
    "norm_output_rms": ("norm_rms", everything),
    "activation_histograms": ("activation_histograms", nothing),
    "outlier_features": ("outlier_features", partial(over, without_layer, OUTLIERS)),
    "saturation": ("saturation", partial(over, operand_of, SATURATION)),
    "gradient_bias": ("gradient_bias", whole_model),
    "weights": ("weights", partial(over, without_layer, WEIGHTS)),
    "memory": ("system", everything),
    "timing": ("system", everything),
    "ranks": ("system", everything),  # by rank are lists, so this is the slowdown
    "replicas": (None, everything),  # train/loss, and loss/REPLICA and grad_norm/REPLICA
}


def allowed(name: str) -> str:
    """A plan's `layers.*` as MLflow lets it be called."""
    return re.sub(r"[^\w. :/-]", "_", name)

"""Shares of gains, activations and weights in the last bin, above the loss (instability paper, figure 3).

A number is in the last bin if it is larger than the format's largest number after division by the block scale, by the
paper's floor rule. Lines: medians over replicas, for gains one per layer, otherwise of means over layers; bands: their
middle half. Dotted: the exact share of normal numbers. For gains that are not in MX blocks: the share if they were.
Thin lines: losses of replicas that diverged.

python -m analysis.instability.fig03_overflow --runs runs/overflow
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pandas as pd

from analysis.command import command
from analysis.students.measures import Row, make_measures
from analysis.style import plt

COUNT = "floor/overflow_fraction"
TENSORS = {
    "activations": {"norm's output": "up.input", "activation's output": "down.input", "residual stream": "output"},
    "weights": {"up": "up.weight", "down": "down.weight"},
}
COLORS = ("#0072B2", "#D55E00", "#009E73")


def rows_of(last_bin: pd.DataFrame) -> list[Row]:
    """Return the figure's rows, shares in percent."""
    shares = 100 * last_bin.filter(like=f"/{COUNT}")
    normal = {f"normal numbers\n({fmt})": shares[f"gaussian.{fmt}/{COUNT}"].max() for fmt in formats(shares)}
    identity = last_bin[["fingerprint", "replica", "step"]]
    gains = [name for name in shares if ".norm.weight/" in name]
    found = []
    if gains:
        hues = plt.cm.viridis_r([(i + 0.5) / len(gains) for i in range(len(gains))])
        of_layers = {gain_of(name, gains): (name, tuple(hue)) for name, hue in zip(gains, hues, strict=True)}
        found.append(Row("gains in\nthe last bin, %", identity.join(shares[gains]), of_layers, thin=False))
    for kind, places in TENSORS.items():
        means = {name: shares.filter(regex=rf"^layers\.\d+\.{place}/").mean(axis=1) for name, place in places.items()}
        lines = {name: (name, color) for name, color in zip(means, COLORS, strict=False)}
        found.append(Row(f"{kind} in\nthe last bin, %", identity.assign(**means), lines, normal, thin=False))
    return found


def formats(shares: pd.DataFrame) -> list[str]:
    return [*dict.fromkeys(match[1] for name in shares if (match := re.match(r"gaussian\.(\w+)/", name)))]


def gain_of(name: str, gains: Sequence[str]) -> str:
    """Return the name of a gain: its layer, and what its norm precedes if the layer has several norms."""
    layer = ".".join(name.split(".")[:2])
    alone = sum(gain.startswith(f"{layer}.") for gain in gains) == 1
    return layer.replace("s.", " ") + ("" if alone else f", {name.partition('.norm.')[0].split('.')[-1]}")


@command
def main(arguments: Sequence[str] | None = None) -> None:
    columns = ["precision", "fidelity", "teacher"]
    make_measures("instability_fig03_overflow", __doc__, arguments, rows_of, columns, "last_bin")


if __name__ == "__main__":
    main()

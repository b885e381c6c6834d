"""The cells of docs/'s notebooks run here in one process, and in Jupyter's kernel when the site is built."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt
from test_scripts import ROOT

CELL = re.compile(r"^```\{code-cell\} ipython3\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOTEBOOKS = {path.stem: CELL.findall(path.read_text()) for path in sorted((ROOT / "docs/notebooks").glob("*.md"))}


def test_the_five_lines_that_train_and_plot_are_five() -> None:
    first = NOTEBOOKS["training"][0]
    assert [len(ast.parse(first).body), len(first.split("\n\n"))] == [5, 2]
    assert len(first.strip().replace("\n\n", "\n").splitlines()) == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str, here: Path) -> None:
    mpl.use("svg")  # one that nothing of ours would choose
    names: dict[str, Any] = {}
    for cell in NOTEBOOKS[name]:
        exec(cell, names)
    assert len(NOTEBOOKS[name]) >= 3
    assert plt.get_fignums(), "it plots"
    assert mpl.get_backend() == "svg", "a notebook's figures are drawn by the backend of the notebook"
    plt.close("all")
    losses = names["losses"]
    ends = losses if isinstance(losses, list) else losses["loss"].tolist()
    assert min(ends) < 0.6 * max(ends), "it learns"

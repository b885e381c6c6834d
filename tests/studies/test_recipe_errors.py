"""The errors of recipes' operands on random tensors equal those computed apart from this project."""

from __future__ import annotations

import functools
import math
from typing import Any

import pandas as pd
import pytest
from each import each
from precision_files import of_file

from mxstudy import results
from mxstudy.config import Approximation, Precision, fingerprint
from mxstudy.config.casts import OPERANDS
from mxstudy.reader import ConfigError
from mxstudy.studies.approximation import recipe_errors as module
from mxstudy.studies.approximation.recipe_errors import CELL, check_recipes, recipe_errors
from mxstudy.studies.approximation.run import show_recipe_errors, tables_of
from mxstudy.studies.approximation.tables import TABLES

# From numpy, on N(0, 1): noise divided by signal, and the slope minus 1 in percent.
GAUSSIAN = {
    ("nvfp4_parts", "forward_x"): (0.0090, -0.45),
    ("nvfp4", "dgrad_dh"): (0.0188, -0.34),  # stochastic
    ("nvfp4_four_over_six", "dgrad_dh"): (0.0236, 0.0),  # with 16/17 of the range
    ("mxfp4_parts", "forward_x"): (0.0134, -2.2),  # floor; the mean over a binade
    ("mxfp4_rht_sr", "dgrad_w"): (0.0278, 0.0),  # with 3/4 of it
    ("quartet", "forward_w"): (0.0224, -5.2),  # scales from the deviation
}


@functools.cache
def precision_of(name: str) -> Precision:
    return of_file(name)


def of_files(*names: str, **values: Any) -> Approximation:
    return Approximation(precisions={name: precision_of(name) for name in names}, **values)


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    monkeypatch.setattr(module, "SIZE", 128)


def measured(*names: str, **values: Any) -> pd.DataFrame:
    return pd.DataFrame(recipe_errors(of_files(*names, **values))).set_index(CELL)


@pytest.mark.integration
def test_gaussians_are_as_computed_elsewhere(monkeypatch) -> None:
    monkeypatch.setattr(module, "INPUTS", {"gaussian": module.INPUTS["gaussian"]})
    found = measured(*dict.fromkeys(name for name, _ in GAUSSIAN), draws=4).reset_index()
    for (name, operand), (noise, shrinks) in GAUSSIAN.items():
        own = found[(found["precision"] == name) & (found["operand"] == operand)].iloc[0]
        assert own["sqnr_db"] == pytest.approx(-10 * math.log10(noise), abs=0.15), name
        assert 100 * (own["gain"] - 1) == pytest.approx(shrinks, abs=0.35), name


@pytest.mark.integration
def test_rows_have_the_transform_and_are_measured_without_it() -> None:
    found = measured("mxfp4_h16_wgrad", "mxfp4_h16", draws=2)
    assert not found.index.duplicated().any()
    assert not found.isna().any(axis=None)
    assert not found.xs(0, level="hadamard").xs("mxfp4_h16_wgrad", level="precision").index.duplicated().any()
    sizes = found.reset_index().groupby(["precision", "operand"])["hadamard"].unique().map(sorted)
    assert sizes["mxfp4_h16_wgrad"].to_dict() == {
        name: [0, 16] if name.startswith("wgrad") else [0] for name in OPERANDS
    }
    assert set(map(tuple, sizes["mxfp4_h16"])) == {(0, 16)}
    cell = ("precision", "operand"), ("mxfp4_h16", "forward_x")
    sqnr = found["sqnr_db"].xs(cell[1], level=cell[0]).droplevel("recipe").unstack("hadamard")
    assert sqnr.loc["gaussian", 16] == pytest.approx(sqnr.loc["gaussian", 0], abs=0.2)
    assert sqnr.loc["4 features x 30", 16] > sqnr.loc["4 features x 30", 0] + 2
    assert (found["sqnr_db_std"] > 0).all()


def test_a_seed_decides_the_numbers() -> None:
    first, again, other = (measured("nvfp4", draws=2, seed=seed) for seed in (0, 0, 1))
    assert first.equals(again)
    assert not (first["sqnr_db"] == other["sqnr_db"]).any()


def test_only_a_run_with_precisions_measures_them() -> None:
    plain, more = Approximation(), of_files("nvfp4")
    assert tables_of(plain) == TABLES
    assert [*tables_of(more)] == [*TABLES, "recipe_errors"]
    prints = {fingerprint(config, "cpu", {}) for config in (plain, more, of_files("quartet"))}
    assert len(prints) == 3


@each(
    ("name", "words", "message"),
    [
        ("bf16", [], "precisions.bf16.schedule: bf16 quantises nothing; leave it out"),
        (
            "mxfp4_h16",
            ["+precision.recipes.mxfp4_h16.forward_x.block_size=96"],
            "precisions.mxfp4_h16.recipes.mxfp4_h16.forward_x.block_size: 96 does not divide the measured linear's",
        ),
        (
            "mxfp4_h16",
            ["+precision.recipes.mxfp4_h16.wgrad_x.block_size=96"],
            "precisions.mxfp4_h16.recipes.mxfp4_h16: the measurement's 128 tokens do not divide into blocks of 96",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(name: str, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_recipes(Approximation(precisions={name: of_file(name, *words)}))
    assert str(error.value).startswith(message)


def test_the_terminal_has_a_line_with_the_transform_and_one_without(monkeypatch) -> None:
    frame = measured("nvfp4", draws=2).reset_index()
    monkeypatch.setattr(results, "load_table", lambda folders, kind: frame)
    shown = [*show_recipe_errors(None)]
    assert len(shown) == len(module.INPUTS)
    assert [*shown[0].columns[0].cells] == ["nvfp4", "  unrotated"]
    by_operand = {str(column.header): [*column.cells] for column in shown[0].columns}
    assert by_operand["fwd_x"][1] == by_operand["dgrad_w"][1] == "-"
    own = frame[(frame["input"] == "gaussian") & (frame["operand"] == "wgrad_x")].set_index("hadamard")["sqnr_db"]
    assert by_operand["wgrad_x"] == [f"{own[size]:.1f}" for size in (16, 0)]

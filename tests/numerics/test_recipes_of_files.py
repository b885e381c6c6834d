"""The three GEMMs of every recipe of conf/precision agree with reference_recipes.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from each import slow_but
from precision_files import FILES, of_file
from reference_recipes import assert_within
from test_every_recipe import linear_of, references, results


def rows_of_all_sizes(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Return bf16 normals times 2^-8 to 2^4, by row and by 16 columns, as in training."""
    generator = torch.Generator().manual_seed(seed)
    down, across = (torch.randint(-4, 3, shape, generator=generator) for shape in ((rows, 1), (1, columns // 16)))
    sizes = down + across.repeat_interleave(16, 1)
    return torch.ldexp(torch.randn(rows, columns, generator=generator), sizes).bfloat16().float()


@pytest.mark.integration
@pytest.mark.parametrize("name", slow_but(["nvfp4", "quartet"], FILES))
def test_the_gemms_of_a_file(name: str) -> None:
    precision = of_file(name)
    gemms = precision.recipe(name).filled(precision.settings)
    x, weight, dh = (rows_of_all_sizes(*shape, seed) for seed, shape in enumerate([(64, 64), (128, 64), (64, 128)]))
    found = results(linear_of(gemms, weight), x, dh)
    for got, (what, want) in zip(found, references(gemms, x, weight, dh).items(), strict=True):
        assert_within(got, want, what)
        assert np.abs(want.exact).mean() > 5 * want.slack.mean(), "nothing is asked"

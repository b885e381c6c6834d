"""The error of every operand that a recipe quantises, on random tensors, cast and measured as in training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from torch import Generator, Tensor, nn

from mxstudy.config import Approximation
from mxstudy.config.casts import TRANSFORMS, Gemms
from mxstudy.data.distributions import Sampler, gaussian, laplace, with_outliers
from mxstudy.model.linear import MXLinear
from mxstudy.model.precision import Origin, check_precision, check_tokens
from mxstudy.model.random_streams import give_streams
from mxstudy.model.seeds import generator_of
from mxstudy.numerics.quality import quantisation_gain
from mxstudy.probes.saturation import quality, quantized_operands
from mxstudy.reader import ConfigError, require

SIZE = 256  # tokens, and features of the linear's input and output
INPUTS: dict[str, Sampler] = {
    "gaussian": gaussian,
    "laplace": laplace,
    "4 features x 30": lambda shape, generator: some_features_larger(gaussian(shape, generator), generator),
}
CELL = ["input", "precision", "recipe", "hadamard", "operand"]
QUANTITIES = ["sqnr_db", "gain", "overflow_fraction", "underflow_fraction"]


def some_features_larger(x: Tensor, generator: Generator) -> Tensor:
    """Return x with four random features 30 times as large: their places in a block matter."""
    return with_outliers(x, 30.0, features=4)[:, torch.randperm(x.shape[-1], generator=generator)]


def recipe_errors(config: Approximation) -> Iterator[dict[str, Any]]:
    """Yield the errors of every operand of the precisions' recipes: means over draws, and `<quantity>_std`.

    `hadamard`: the size of the operand's transform, or 0; an operand with one is also measured without it. Under a
    transform the error is relative to the rotated tensor. For an operand that is quantised again from the forward's
    codes, it is relative to these. Each draw has its own tensors, signs and roundings, and draw i of n is scaled by
    2^(i / n): the error of power-of-two scales depends on a tensor's place in a binade, and the mean covers the binade.
    """
    found = []
    for input_name, sample in INPUTS.items():
        for i in range(config.draws):
            tensors = [
                2.0 ** (i / config.draws) * sample((SIZE, SIZE), generator_of(repr((config.seed, input_name, name, i))))
                for name in ("x", "weight", "dh")
            ]
            for key, name, gemms in recipes_of(config):
                for hadamard, operand, values in errors(gemms, config.seed, f"draw {i}", *tensors):
                    found.append(dict(zip(CELL, (input_name, key, name, hadamard, operand), strict=True)) | values)
    for cell, rows in pd.DataFrame(found, columns=[*CELL, *QUANTITIES]).groupby(CELL, sort=False):
        means, stds = rows[QUANTITIES].mean(), rows[QUANTITIES].std(ddof=1).add_suffix("_std")
        yield dict(zip(CELL, cell, strict=True)) | means.to_dict() | stds.to_dict()


def errors(
    gemms: Gemms, seed: int, name: str, x_TI: Tensor, weight: Tensor, dh_TO: Tensor
) -> Iterator[tuple[int, str, dict[str, float]]]:
    """Yield the size of the transform or 0, the operand, and its errors: as the recipe has it, then unrotated.

    `name`: the linear's name, which seeds signs and random roundings.
    """
    linear, unrotated = MXLinear(SIZE, SIZE, init_std=1.0), replace(gemms, **dict.fromkeys(TRANSFORMS))
    linear.weight = nn.Parameter(weight, requires_grad=False)
    for asked in dict.fromkeys((gemms, unrotated)):
        linear.gemms = asked
        give_streams(linear, {name: linear}, [seed])
        for operand, quantized, x in quantized_operands(linear.sources(x_TI), dh_TO):
            if asked == gemms or size_of_transform(gemms, operand):
                found = quality(quantized, x, getattr(asked, operand))
                found["gain"] = quantisation_gain(quantized.dequantize(), x)
                yield size_of_transform(asked, operand), operand, {key: found[key].item() for key in QUANTITIES}


def size_of_transform(gemms: Gemms, operand: str) -> int:
    """Return the size of the transform of the operand's GEMM, or 0."""
    transform = gemms.transform_of(operand)
    return transform.size if transform else 0


def recipes_of(config: Approximation) -> Iterator[tuple[str, str, Gemms]]:
    """Yield a precision's key, a recipe's name in its first plan, and the recipe with its open fields filled."""
    for key, precision in config.precisions.items():
        for name in dict.fromkeys(precision.schedule[0].plan.values()):
            yield key, name, precision.filled(name)


def check_recipes(config: Approximation) -> None:
    """Raise ConfigError for a recipe that quantises nothing, or whose blocks do not divide the measured tensors."""
    for key, precision in config.precisions.items():
        try:
            for name in precision.schedule[0].plan.values():
                linear = MXLinear(SIZE, SIZE, init_std=1.0)
                linear.gemms = precision.filled(name)
                require(any(linear.gemms.casts()), f"schedule: {name} quantises nothing; leave it out")
                check_precision("the measured linear", linear, Origin(precision, name), compute="fp32")
                check_tokens(linear, f"recipes.{name}: the measurement's {SIZE} tokens", SIZE)
        except ConfigError as error:
            raise ConfigError(f"precisions.{key}.{str(error).removeprefix('precision.')}") from None

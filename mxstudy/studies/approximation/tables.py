"""The measurements of the approximation study: one function per table, one row per measured combination."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from mxstudy.config import Approximation
from mxstudy.data.distributions import DISTRIBUTIONS, gaussian, with_outliers
from mxstudy.model.norm import MXNorm, Norm, RMSNorm
from mxstudy.model.seeds import generator_of
from mxstudy.numerics import BlockCast
from mxstudy.numerics.cast import block_cast, pre_rounded
from mxstudy.numerics.formats import FORMATS, ROUNDINGS, SCALE_RULES
from mxstudy.numerics.norm_linear import norm_cast, normalize, rms_coefficient
from mxstudy.numerics.quality import (
    max_fraction,
    overflow_fraction,
    pearson_squared,
    quantisation_gain,
    r_squared,
    sqnr_db,
    underflow_fraction,
)
from mxstudy.studies.approximation.norm_bounds import norm_bounds

TableRow = dict[str, Any]
Measure = Callable[[Approximation], Iterator[TableRow]]
EPS = 1e-5
POWERS = (1.0, 2.0)
ELEMENTS_A_DRAW = 2**17  # where the row length varies: longer rows mean fewer rows
GRADED = ("gaussian", "gelu", "log_normal", "gain 1.02 +- 0.003", "gain 0.99 +- 0.003", "gain 0.95 +- 0.02")
ROWS_OF = ("gaussian", "uniform", "laplace")


def generator(config: Approximation, *words: object) -> Generator:
    """Return a random generator seeded by the seed and `words` alone, not by what was measured before."""
    return generator_of(repr((config.seed, *words)))


def norms(size: int, block_size: int) -> dict[str, Norm]:
    return {"RMSNorm": RMSNorm(size, EPS)} | {f"MXNorm p={p:g}": MXNorm(size, p, block_size, EPS) for p in POWERS}


def cast_of(config: Approximation, block_size: int | None = None) -> BlockCast:
    return BlockCast(block_size or config.block_size, config.scale_rule)


# ---------------------------------------------------------------------------- figure 2, left and middle: distributions


def distributions(config: Approximation) -> Iterator[TableRow]:
    """Yield counts of scale exponents and of element values, after each norm and without one."""
    for std in config.stds:
        x = std * gaussian((config.rows, config.hidden_size), generator(config, "distributions", std))
        quantised = {"no norm": block_cast(x, config.format, -1, cast_of(config))}
        for name, norm in norms(config.hidden_size, config.block_size).items():
            quantised[name] = norm_cast(x, norm.rms(x), config.format, cast_of(config))
        for name, tensor in quantised.items():
            for quantity, values in {"scale exponent": tensor.scales.int() - 127, "element": tensor.values}.items():
                for value, count in zip(*values.unique(return_counts=True), strict=True):
                    yield {
                        "norm": name,
                        "std": std,
                        "quantity": quantity,
                        "value": value.item(),
                        "count": count.item(),
                    }


# --------------------------------------------------------------------------------------------- figure 2, right: r^2


def fidelity(config: Approximation) -> Iterator[TableRow]:
    """Yield r^2 of decoded MXNorm against decoded RMSNorm + MXCast, by block size, p and number of blocks in a row."""
    for block_size, blocks, draw in itertools.product((16, 32, 64), lengths(config.max_blocks), range(config.draws)):
        size = block_size * blocks
        x = gaussian((rows_of(size), size), generator(config, "fidelity", size, draw))
        cast = cast_of(config, block_size)
        want, *others = (
            norm_cast(x, norm.rms(x), config.format, cast).dequantize() for norm in norms(size, block_size).values()
        )
        for p, got in zip(POWERS, others, strict=True):
            yield {
                "block_size": block_size,
                "p": p,
                "blocks": blocks,
                "draw": draw,
                "r_squared": r_squared(got, want).item(),
                "pearson_squared": pearson_squared(got, want).item(),
            }


def lengths(longest: int) -> list[int]:
    """Return the powers of 2 from 1 to `longest`."""
    return [2**i for i in range(longest.bit_length())]


def rows_of(size: int) -> int:
    return max(1, ELEMENTS_A_DRAW // size)


# ---------------------------------------------------------------------------------------------------------- Theorem 1


def convergence(config: Approximation) -> Iterator[TableRow]:
    """Yield estimated RMS / true RMS for rows of K blocks: mean and std over rows, and the limit for long rows."""
    for name, blocks in itertools.product(ROWS_OF, lengths(16 * config.max_blocks)):
        size = blocks * config.block_size
        draws = max(config.draws, 16 * config.draws // rows_of(size))  # enough rows to estimate the std
        x = torch.cat(
            [DISTRIBUTIONS[name]((rows_of(size), size), generator(config, name, size, i)) for i in range(draws)]
        )
        rms = x.double().square().mean(-1, keepdim=True).sqrt()
        for p in POWERS:
            ratio = MXNorm(size, p, config.block_size, eps=0.0).rms(x) / rms
            yield {
                "distribution": name,
                "p": p,
                "blocks": blocks,
                "rows": len(x),
                "mean": ratio.mean().item(),
                "std": ratio.std().item(),
                "limit": limit(name, p, config.block_size),
            }


@dataclass(frozen=True)
class Magnitude:
    """The distribution of |Z| for a Z of variance 1: `cdf` is P(|Z| < t), and `top` the t from which it is 1."""

    cdf: Callable[[np.ndarray], np.ndarray]
    top: float


MAGNITUDES = {
    "gaussian": Magnitude(lambda t: np.vectorize(math.erf)(t / math.sqrt(2)), 12.0),
    "uniform": Magnitude(lambda t: np.minimum(t / math.sqrt(3), 1.0), math.sqrt(3)),
    "laplace": Magnitude(lambda t: -np.expm1(-math.sqrt(2) * t), 60.0),
}


def limit(distribution: str, p: float, block_size: int) -> float:
    """Return the limit of estimated RMS / true RMS for long rows (MXNorm paper, Eq. 6); it is 1 for Gaussian rows.

    It is the distribution's c times the Gaussian's 1 / c. E[max^p] is the integral of p t^(p-1) (1 - F(t)^B).
    """
    magnitude = MAGNITUDES[distribution]
    t = (np.arange(60_000) + 0.5) * magnitude.top / 60_000
    moment = (p * t ** (p - 1) * (1 - magnitude.cdf(t) ** block_size)).sum() * magnitude.top / 60_000
    return float(moment ** (1 / p)) * rms_coefficient(p, block_size)


# ----------------------------------------------------------------------------------------------------- Lemmas 1 and 2


def bounds(config: Approximation) -> Iterator[TableRow]:
    """Yield the largest |x / rms| and its bound, estimated RMS / true RMS, and the fraction cast to zero."""
    for input_name, x in bounded_inputs(config).items():
        true_rms = x.double().square().mean(-1, keepdim=True).sqrt()
        for name, norm in norms(config.hidden_size, config.block_size).items():
            rms = norm.rms(x)
            output = normalize(x, rms)
            quantised = block_cast(output, config.format, -1, cast_of(config))
            yield {
                "input": input_name,
                "norm": name,
                "bound": norm.bound,
                "absmax": output.abs().max().item(),
                "absmax_decoded": quantised.dequantize().abs().max().item(),
                "rms_ratio": (rms / true_rms).mean().item(),
                "output_rms": output.double().square().mean().sqrt().item(),
                "underflow": underflow_fraction(quantised, output).item(),
            }


def bounded_inputs(config: Approximation) -> dict[str, Tensor]:
    """Return {name: x}: a lone spike (reaches the bounds up to eps), Gaussian rows, those with 4 outlier features."""
    size, x = config.hidden_size, gaussian((config.rows, config.hidden_size), generator(config, "bounds"))
    spike = torch.zeros(2, size)
    spike[0, 0], spike[1, size // 2 + 5] = 1e4, -1e4
    return {"spike": spike, "gaussian": x} | {
        f"4 features x {factor}": with_outliers(x, factor, features=4) for factor in (10, 100, 1000)
    }


# ------------------------------------------------------------------------------- what a cast does to a tensor: quality


def quality(config: Approximation) -> Iterator[TableRow]:
    """Yield gain, SQNR, last bin and underflow (means over draws) by format, scale rule, rounding and pre-rounding."""
    shape = (config.elements // 1024, 1024)
    for input_name in GRADED:
        tensors = [DISTRIBUTIONS[input_name](shape, generator(config, input_name, i)) for i in range(config.draws)]
        for fmt, cast in casts(config):
            draws = [graded(x, fmt, cast) for x in tensors]
            columns = {key: np.array([draw[key] for draw in draws]) for key in draws[0]}
            yield {
                "input": input_name,
                "format": fmt,
                "scale_rule": cast.scale_rule if FORMATS[fmt].scale == "E8M0" else "E4M3",
                "rounding": cast.rounding,
                "pre_round": cast.operand_pre_round,
                **{key: float(values.mean()) for key, values in columns.items()},
                "gain_standard_error": float(columns["gain"].std(ddof=1) / math.sqrt(config.draws)),
            }


def casts(config: Approximation) -> list[tuple[str, BlockCast]]:
    """Return every (format, cast) to measure; only E8M0 scales vary by scale rule."""
    combinations = []
    roundings = [name for name, rounding in ROUNDINGS.items() if not rounding.draws]
    for fmt, rule, rounding, pre_round in itertools.product(FORMATS, SCALE_RULES, roundings, (False, True)):
        if FORMATS[fmt].scale == "E8M0":
            combinations.append((fmt, BlockCast(config.block_size, rule, rounding, pre_round)))
        elif rule == BlockCast.scale_rule:
            combinations.append((fmt, BlockCast(FORMATS[fmt].block_size, rule, rounding, pre_round)))
    return combinations


def graded(x: Tensor, fmt: str, cast: BlockCast) -> dict[str, float]:
    """Return the quality measures of casting x."""
    quantised = block_cast(x, fmt, -1, cast)
    decoded = quantised.dequantize()
    return {
        "gain": quantisation_gain(decoded, x).item(),
        "sqnr_db": sqnr_db(decoded, x).item(),
        "overflow": overflow_fraction(quantised, pre_rounded(x, cast)).item(),
        "at_max": max_fraction(quantised).item(),
        "underflow": underflow_fraction(quantised, x).item(),
    }


def formats(config: Approximation) -> Iterator[TableRow]:
    """Yield the properties of every format (MXFP8 recipe, table 1)."""
    for fmt in FORMATS.values():
        yield {
            "format": fmt.name,
            "bits": fmt.bits,
            "max": fmt.max,
            "min_subnormal": fmt.min_subnormal,
            "binades": fmt.binades,
            "scale": fmt.scale,
        }


# ------------------------------------------------------------------------------------- rows, columns, parts of a tensor


def orientations(config: Approximation) -> Iterator[TableRow]:
    """Yield in how many elements two casts of one tensor differ, as stored and decoded (Transformer Engine, MXFP8)."""
    shards = 8
    x = gaussian((shards * config.block_size, config.hidden_size), generator(config, "orientations"))
    for rule in SCALE_RULES:

        def cast(tensor: Tensor, axis: int, rule: str = rule) -> Tensor:
            """Return the cast's elements as stored and as decoded: [2, rows, columns]."""
            quantised = block_cast(tensor, config.format, axis, BlockCast(config.block_size, rule))
            return torch.stack((quantised.values, quantised.dequantize()))

        rows, columns = cast(x, -1), cast(x, -2)
        pairs = {
            "rows, columns": (rows, columns),
            "columns, columns of the cast rows": (columns, cast(rows[1], -2)),
            "rows, rows of the cast columns": (rows, cast(columns[1], -1)),
            "rows, rows of each shard": (rows, torch.cat([cast(part, -1) for part in x.chunk(shards)], 1)),
        }
        for name, (one, other) in pairs.items():
            stored, decoded = (one != other).double().mean((1, 2)).tolist()
            yield {"scale_rule": rule, "casts": name, "stored_differ": stored, "decoded_differ": decoded}


TABLES: dict[str, Measure] = {
    "distributions": distributions,
    "fidelity": fidelity,
    "convergence": convergence,
    "bounds": bounds,
    "norm_bounds": norm_bounds,
    "quality": quality,
    "formats": formats,
    "orientations": orientations,
}

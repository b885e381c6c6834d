"""Judge the claims that arithmetic decides: coefficients, formats, formulas and printed tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
from scipy import integrate, stats

from analysis.instability.table02_scaling_fits import PRINTED
from analysis.ledger.claim import Evidence, Judge
from analysis.ledger.tables import Tables
from analysis.statistics import Exact

DRAW = 0  # seed of the random tensors


def number(value: float, count: int = 1, note: str = "", unit: str = "cases") -> Evidence:
    return Evidence(Exact(float(value), count), unit, note)


def computed(of: Callable[[], float]) -> Judge:
    """Return a judge of one number that needs no table."""
    return lambda tables: number(of())


def printed(pairs: Sequence[tuple[float, float]]) -> Judge:
    """Return a judge of the largest difference between printed and computed numbers, given as (printed, computed)."""
    worst = max(abs(ours - theirs) for theirs, ours in pairs)
    return lambda tables: number(worst, len(pairs), unit="printed numbers")


# ------------------------------------------------------------------------------------------------------- MXNorm's paper

# Table F: the ratio of the RMS to the p-mean of block absmaxes, by (block size, p).
COEFFICIENTS = {(16, 1): 0.4814, (16, 2): 0.4688, (32, 1): 0.4261, (32, 2): 0.4185, (64, 1): 0.3852, (64, 2): 0.3803}
# Table 1: TFLOPS of the dtype, TFLOPS of CUDA cores, TB/s, and the printed improvements over the V100.
V100 = (125, 15.7, 0.9)
GPUS = {
    "A100": ((312, 19.5, 2.0), (2.5, 1.2, 2.2)),
    "H100": ((1979, 67.0, 3.4), (15.8, 4.3, 3.7)),
    "GB200": ((10_000, 80.0, 8.0), (80.0, 5.1, 8.9)),
    "Rubin": ((35_000, 130.0, 22.0), (280, 8.3, 24.4)),
}
# Table 2: percentage of right answers in ten tasks.
ZERO_SHOT = {
    "RMSNorm": (45.3, 75.9, 73.2, 68.5, 70.4, 37.9, 50.4, 74.8, 56.5, 66.8),
    "p=1": (39.1, 73.7, 56.6, 62.4, 68.1, 37.2, 49.8, 74.5, 52.5, 64.4),
    "p=2": (45.8, 74.1, 72.6, 67.1, 71.5, 38.0, 54.2, 76.2, 55.5, 65.2),
}
# Table 3: batch, sequence, billions of tokens; blocks, hidden and FFN size; the name's billions of parameters.
SIZES = {
    "125M": (32, 4096, 2.62, 8, 1024, 1536, 0.125),
    "1B": (256, 4096, 20.97, 16, 2048, 3072, 1.0),
    "8B": (256, 4096, 314.57, 32, 4096, 7168, 8.0),
}
VOCABULARY = 128_256


def coefficient(block_size: int, p: float) -> float:
    """Return RMS / p-mean of block absmaxes of standard normal rows, by quadrature (Theorem 1, Eq. 6)."""
    tail = lambda t: p * t ** (p - 1) * (1 - (2 * stats.norm.cdf(t) - 1) ** block_size)  # noqa: E731
    return float(integrate.quad(tail, 0, 12)[0] ** (-1 / p))


def improvements() -> list[tuple[float, float]]:
    rows = [zip(shown, values, V100, strict=True) for values, shown in GPUS.values()]
    return [(shown, value / base) for row in rows for shown, value, base in row]


def leads() -> list[tuple[float, float]]:
    best = [max(ZERO_SHOT, key=lambda name: ZERO_SHOT[name][task]) for task in range(10)]
    return [(5, best.count("RMSNorm")), (5, best.count("p=2"))]


def steps() -> float:
    """Return the largest relative distance of a size's steps from a round number of thousands."""
    found = [1e9 * tokens / batch / length / 1000 for batch, length, tokens, *_ in SIZES.values()]
    return max(abs(one - round(one)) / one for one in found)


def parameters() -> list[tuple[float, float]]:
    """Return (name, parameters) in billions, for the printed FFN sizes.

    Keys and values have a quarter of the heads.
    """
    sizes = []
    for *_, blocks, hidden, ffn, name in SIZES.values():
        sizes.append((name, (blocks * (2.5 * hidden**2 + 3 * hidden * ffn) + 2 * VOCABULARY * hidden) / 1e9))
    return sizes


def nearest_size() -> float:
    """Return by how much the 8B model's parameters differ from 8 billion, as a fraction."""
    name, found = parameters()[-1]
    return found / name - 1


def rounded_scale(sigma: float, sign: int = 1) -> float:
    """Return appendix K's sum for the mean rounded absmax of 32 normal numbers. The printed sign is -1."""
    j = np.arange(-60, 12)
    below, above = ((2 * stats.norm.cdf(2.0 ** (j + up) / sigma) - 1) ** 32 for up in (0, 1))
    return float((2.0**j * sign * (above - below)).sum())


def falls() -> float:
    """Return in how many of 1,000 steps of sigma the mean rounded absmax does not rise."""
    values = [rounded_scale(sigma) for sigma in np.geomspace(0.25, 4, 1001)]
    return float((np.diff(values) <= 0).sum())


def other_scales() -> float:
    """Return the fraction of normal blocks whose scale by 2^ceil(log2(m / 256)) is not that of RCEIL."""
    blocks = np.abs(np.random.default_rng(DRAW).standard_normal((100_000, 32))).max(1)
    return float((np.ceil(np.log2(blocks / 256)) != np.ceil(np.log2(blocks / 448))).mean())


def grid_of_sizes() -> float:
    """Return how many hidden sizes only one of the two descriptions of the kernel benchmark's sizes has."""
    formula = {k * 2**r for k in (1, 3, 5, 7) for r in range(15)} & set(range(2**10, 2**14 + 1))
    words = {2**i * (4 + quarter) // 4 for i in range(10, 14) for quarter in range(4)} | {2**14}
    return float(len(formula ^ words))


def norm_backward() -> float:
    """Return the largest relative difference of appendix E's gradient of RMSNorm from central differences."""
    draw = np.random.default_rng(DRAW)
    x, gain, of_output = draw.standard_normal(64), draw.standard_normal(64), draw.standard_normal(64)
    loss = lambda v: (v / np.sqrt((v**2).mean()) * gain) @ of_output  # noqa: E731
    rms, g = np.sqrt((x**2).mean()), of_output * gain
    formula = g / rms - (g @ x) * x / (64 * rms**3)
    steps = 1e-5 * np.eye(64)
    numeric = np.array([(loss(x + step) - loss(x - step)) / 2e-5 for step in steps])
    return float(np.abs(numeric - formula).max() / np.abs(formula).max())


def folded_gain() -> float:
    """Return the largest relative difference of (X gain) W^T from X (W gain)^T."""
    draw = np.random.default_rng(DRAW)
    x, w, gain = draw.standard_normal((8, 64)), draw.standard_normal((16, 64)), draw.standard_normal(64)
    one, other = (x * gain) @ w.T, x @ (w * gain).T
    return float(np.abs(one - other).max() / np.abs(one).max())


# ---------------------------------------------------------------------------------------------------- element formats

EXPONENT_BITS = {"E4M3": 4, "E5M2": 5, "E2M3": 2, "E3M2": 3, "E2M1": 2}
# MXFP8 recipe, table 1: largest, smallest number, binades. The smallest of E3M2 is a misprint: its binades need 2^-4.
FORMATS = {
    "E4M3": (1.75 * 2**8, 2.0**-9, 17.8),
    "E5M2": (1.75 * 2**15, 2.0**-16, 31.8),
    "E2M3": (1.875 * 2**2, 2.0**-3, 5.9),
    "E3M2": (1.75 * 2**4, 2.0**-3, 8.8),
    "E2M1": (1.5 * 2**2, 2.0**-1, 3.6),
}


def codes(name: str) -> np.ndarray:
    """Return the positive finite numbers of a format, ascending. E4M3 has one NaN, and E5M2 is that of IEEE 754."""
    bits, mantissa = EXPONENT_BITS[name], int(name[-1])
    bias = 2 ** (bits - 1) - 1
    top = 2**bits - (2 if name == "E5M2" else 1)
    normal = [(1 + m / 2**mantissa) * 2.0 ** (e - bias) for e, m in product(range(1, top + 1), range(2**mantissa))]
    subnormal = [m / 2**mantissa * 2.0 ** (1 - bias) for m in range(1, 2**mantissa)]
    return np.array(sorted(subnormal + normal)[: -1 if name == "E4M3" else None])


def of_formats(column: int, of: Callable[[np.ndarray], float]) -> Judge:
    """Return a judge of one column of the recipe's table 1.

    It counts the formats whose printed value differs from the computed one.
    """
    wrong = [name for name, shown in FORMATS.items() if abs(shown[column] - of(codes(name))) > SLACK[column]]

    def judge(tables: Tables) -> Evidence:
        return number(len(wrong), len(FORMATS), ", ".join(f"{n}: {of(codes(n)):g}" for n in wrong), "formats")

    return judge


SLACK = (0.0, 0.0, 0.051)  # what rounding to the printed digits allows, by column of FORMATS


def binades(values: np.ndarray) -> float:
    return float(np.log2(values[-1] / values[0]))


def relative_gaps() -> list[tuple[float, float]]:
    normal = codes("E4M3")[7:]
    gaps = 100 * np.diff(normal[:9]) / normal[:8]
    return [(12.5, float(gaps[0])), (6.6, float(gaps[-1]))]


def clamped_blocks() -> tuple[float, float]:
    """Return two fractions of normal numbers: over 0.875 of their block's absmax, and that overflow by floor."""
    blocks = np.abs(np.random.default_rng(DRAW).standard_normal((100_000, 32)))
    largest = blocks.max(1, keepdims=True)
    overflow = blocks > 448 * 2 ** (np.floor(np.log2(largest)) - 8)
    return float((blocks > 0.875 * largest).mean()), float(overflow.mean())


GAINS = np.array([0.89740956, 0.89628334, 0.88358812, 0.88474816, 0.90372837])  # the instability paper's block


def exponent_of_gains() -> float:
    return float(np.floor(np.log2(GAINS.max())) - 8)


def clamped_gains() -> float:
    """Return how many of the block's gains do not overflow."""
    return float((448 * 2.0 ** exponent_of_gains() >= GAINS).sum())


# --------------------------------------------------------------------------------------------------------------- scales


def all_significands() -> np.ndarray:
    """Return every FP32 number from 1 to below 2."""
    return (np.arange(2**23, dtype=np.uint32) | np.uint32(127 << 23)).view(np.float32)


def rounded_up(ratio: np.ndarray) -> np.ndarray:
    """Return the exponent of FP32 numbers, one more where the mantissa is not 0."""
    bits = ratio.view(np.uint32)
    return (bits >> 23).astype(np.int64) - 127 + ((bits & 0x7FFFFF) != 0)


def bits_against_log2() -> float:
    """Return how many ratios from 1 to 2 have a rounded-up exponent that is not the ceiling of log2 in FP64."""
    ratio = all_significands()
    return float((rounded_up(ratio) != np.ceil(np.log2(ratio.astype(np.float64)))).sum())


def log2_in_fp32() -> float:
    """Return how many ratios from 2^100 to 2^101 get another scale if log2 is rounded to FP32."""
    ratio = all_significands() * np.float32(2.0**100)
    return float((rounded_up(ratio) != np.ceil(np.log2(ratio.astype(np.float64)).astype(np.float32))).sum())


def largest_ratio() -> float:
    """Return log2 of the largest FP32 number divided by the smallest of the formats' largest numbers."""
    return float(np.log2(np.finfo(np.float32).max / min(shown[0] for shown in FORMATS.values())))


def swizzled() -> float:
    """Return how many of 128 rows the interleaved order of scales misses, repeats or misplaces."""
    order = [row + 32 * part for row in range(32) for part in range(4)]
    begins = [0, 32, 64, 96, 1, 33, 65, 97]
    return float(len(set(range(128)) ^ set(order)) + sum(a != b for a, b in zip(order, begins, strict=False)))


# ------------------------------------------------------------------------------------- the instability paper's formulas


def exponents() -> list[tuple[float, float]]:
    """Return, for each row of table 2, its exponent a as printed, and as alpha and beta give it."""
    rows = [map(float, constants.split()[3:]) for *_, constants in PRINTED.values()]
    return [(a, beta / (alpha + beta)) for alpha, beta, a in rows]


def unrelated_gradients() -> float:
    """Return the ratio ||g - h|| / ||h|| of two independent normal vectors of equal length."""
    g, h = np.random.default_rng(DRAW).standard_normal((2, 1_000_000))
    return float(np.linalg.norm(g * np.linalg.norm(h) / np.linalg.norm(g) - h) / np.linalg.norm(h))


def swiglu_parameters(width: int = 512) -> float:
    """Return the parameters of a SwiGLU layer of hidden size 8/3 divided by those of a layer of hidden size 4."""
    hidden = round(8 * width / 3)
    return 3 * width * hidden / (2 * width * 4 * width)

"""The casts of a linear's GEMM operands, the transforms of its GEMMs and its recipe, as plain values.

    forward   H  = Q(X; in)   . Q(W; in)^T
    dgrad     dX = Q(dH; out) . Q(W; out)
    wgrad     dW = Q(dH; T)^T . Q(X; T)

`mxstudy.numerics.gemms` computes every recipe that can be written here. A faster backend lists the recipes that it
supports, and refuses any other with a reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from mxstudy.reader import ConfigError, require

Outer = Literal["none", "tensor", "row", "bound"]


@dataclass(frozen=True)
class BlockCast:
    """The run's settings (`precision.*`) for every operand whose recipe leaves them open.

    `operand_pre_round`: round operands to bf16 first, ties away from zero. `pad_blocks`: fill a block that the end of
    the axis leaves incomplete with zeros; if false, such a size is an error. microxcaling has both on.
    """

    block_size: int = 32
    scale_rule: str = "rceil"
    rounding: str = "even"
    operand_pre_round: bool = False
    pad_blocks: bool = False


@dataclass(frozen=True, kw_only=True)
class Cast:
    """The cast of one operand of one GEMM; a field that is None is open: the run's settings fill it.

    `format`: the elements' format, a row of FORMATS. `scale`: the format of the block scales: E8M0, E4M3, FP32, or none
    if there is only an outer scale. `block_size` B: elements per block, along the contraction axis. `two_dimensional`:
    a block is B x B. `scale_rule`: how the exponent of an E8M0 scale is rounded, a row of SCALE_RULES. `outer_scale`:
    an FP32 scale above the block scales, for the whole tensor or for each row; bound takes it from the preceding norm's
    bound, or from each row without a norm. `chain`: how E4M3 scales are computed: inference keeps them at 2^-6 and
    above, as torchao's inference cast; training multiplies in Transformer Engine's order, and they may be subnormal or
    0 (`mxstudy.numerics.scales`). `largest_scale`: the block scale that the outer scale gives the block with the
    largest element (four over six: 256, of which 1.5 times is an E4M3 number too). `statistic`: what sets the range of
    a block: the absmax, or the standard deviation times the range that Quartet chose for Gaussians (arXiv 2505.14669),
    with E8M0 scales for the rule floor; zeros that fill up a block count as its numbers.
    `headroom`: the fraction of the format's range that is used, for example 3/4 (arXiv 2502.20586) or 16/17.
    `candidates`: factors on the range; each block takes the one with the smallest error (`candidate_error`), the first
    of equal ones (four over six, arXiv 2512.02010: 1 and 1.5). `rounding`: a row of ROUNDINGS; stochastic rounding
    draws `random_bits` random bits: with 24 the mean is the number; with 8 the fraction of a step is first rounded
    down to 8 bits, as by Transformer Engine, so that the mean is 1/512 step nearer to zero. `pre_round`, `pad`: see
    BlockCast's `operand_pre_round` and `pad_blocks`.
    `source`: quantise the tensor in high precision, or the forward's quantised operand.
    `mask_clipped`: set the gradient to zero where the forward's cast clipped.
    """

    format: str
    scale: Literal["E8M0", "E4M3", "FP32", "none"] = "E8M0"
    block_size: int | None = None
    two_dimensional: bool = False
    scale_rule: str | None = None
    outer_scale: Outer = "none"
    chain: Literal["inference", "training"] = "inference"
    largest_scale: float = 448.0
    statistic: Literal["absmax", "std"] = "absmax"
    headroom: float = 1.0
    candidates: tuple[float, ...] = (1.0,)
    candidate_error: Literal["mse", "mae"] = "mse"  # the error by which a block chooses among several candidates
    rounding: str | None = None
    random_bits: Literal[8, 24] = 24  # bits of each random number that stochastic rounding compares with
    pre_round: bool | None = None
    pad: bool | None = None
    source: Literal["high_precision", "forward"] = "high_precision"
    mask_clipped: bool = False

    def __post_init__(self) -> None:
        blocks = self.scale != "none"
        require(self.block_size is None or self.block_size > 0, f"block_size: must be positive, not {self.block_size}")
        require(0 < self.headroom <= 1, f"headroom: must be above 0 and at most 1, not {self.headroom}")
        require(
            bool(self.candidates) and min(self.candidates) > 0,
            f"candidates: must be one or more positive factors, not {list(self.candidates)}",
        )
        require(
            len({*self.candidates}) == len(self.candidates),
            f"candidates: {list(self.candidates)} has a factor twice; name each once",
        )
        require(
            len(self.candidates) > 1 or self.candidate_error == "mse",
            "candidate_error: there is only one candidate, so no error decides; leave it out",
        )
        require(
            self.scale == "E8M0" or self.scale_rule is None,
            f"scale_rule: rounds exponents of E8M0 scales, and the scales are {self.scale}; leave it out",
        )
        require(
            self.statistic != "std" or self.scale_rule in (None, "floor"),
            f"scale_rule: with statistic=std the range is that of the rule floor, not of {self.scale_rule}; take floor",
        )
        require(
            self.scale not in ("E8M0", "FP32") or self.outer_scale == "none",
            f"outer_scale: {self.scale} scales cover the range of FP32 and need no outer scale; leave it out",
        )
        require(
            not self.two_dimensional or self.outer_scale in ("none", "tensor"),
            f"outer_scale: a square block spans several rows, and {self.outer_scale} scales each row; use tensor",
        )
        for name, applies in (
            ("chain", self.scale == "E4M3"),
            ("largest_scale", self.scale == "E4M3" and self.outer_scale != "none"),
        ):
            require(
                applies or getattr(self, name) == getattr(Cast, name),
                f"{name}: is for E4M3 scales (largest_scale: under an outer_scale), and this cast has {self.scale} "
                f"scales and outer_scale={self.outer_scale}; leave it out",
            )
        require(
            0 < self.largest_scale <= 448, f"largest_scale: must be above 0 and at most 448, not {self.largest_scale}"
        )
        require(blocks or self.outer_scale != "none", "scale: none needs an outer_scale; use tensor or row")
        for name, is_set in (
            ("block_size", self.block_size is not None),
            ("two_dimensional", self.two_dimensional),
            ("pad", self.pad is not None),
            ("candidates", len(self.candidates) > 1),
            ("statistic", self.statistic != "absmax"),
        ):
            require(blocks or not is_set, f"{name}: there are no blocks with scale=none; leave it out")
        require(
            self.rounding not in ("even", "away") or self.random_bits == 24,
            f"random_bits: {self.rounding} rounding uses no random bits; leave it out",
        )

    def filled(self, settings: BlockCast) -> Cast:
        """Return the cast with each open field filled from the settings, where the field applies (`has`)."""
        values = {name: getattr(settings, setting) for name, setting in SETTINGS.items() if self.is_open(name)}
        return replace(self, **values)

    def is_open(self, name: str) -> bool:
        """Return whether the run's settings fill this field."""
        return getattr(self, name) is None and self.has(name)

    def has(self, name: str) -> bool:
        """Return whether this field applies to a cast with this scale format."""
        if name in BLOCKS_OWN:
            return self.scale != "none"
        return name != "scale_rule" or self.scale == "E8M0"


SETTINGS = {
    "block_size": "block_size",
    "scale_rule": "scale_rule",
    "rounding": "rounding",
    "pre_round": "operand_pre_round",
    "pad": "pad_blocks",
}
BLOCKS_OWN = ("block_size", "pad")  # fields that only a cast with blocks has


@dataclass(frozen=True, kw_only=True)
class Hadamard:
    """The orthonormal Hadamard transform of both operands of a GEMM along the contraction axis, in tiles of `size`.

    It cancels in the product, so an operand that is not quantised is transformed too. `signs`: random signs, drawn once
    per run (seed), per step, or per GEMM call. `vector`: fixed signs instead. `signs_after`: apply the signs after the
    transform, where they change no magnitude (a control).
    """

    size: int
    signs: Literal["none", "seed", "step", "call"] = "none"
    vector: tuple[int, ...] = ()
    signs_after: bool = False

    def __post_init__(self) -> None:
        require(
            16 <= self.size <= 256 and self.size & (self.size - 1) == 0,
            f"size: must be a power of two from 16 to 256, not {self.size}",
        )
        require(
            not self.vector or self.signs == "none",
            f"vector: signs={self.signs} draws the signs; write vector=[] or signs=none",
        )
        require(
            not self.vector or (len(self.vector) == self.size and set(self.vector) <= {-1, 1}),
            f"vector: must be {self.size} numbers, each 1 or -1, not {list(self.vector)}",
        )
        has_signs = bool(self.vector) or self.signs != "none"
        require(has_signs or not self.signs_after, "signs_after: there are no signs; leave it out")

    @property
    def is_random(self) -> bool:
        return self.signs != "none"


@dataclass(frozen=True)
class Gemm:
    """The casts of a GEMM's two operands, None for the compute dtype, and the transform of both."""

    left: Cast | None = None
    right: Cast | None = None
    transform: Hadamard | None = None


@dataclass(frozen=True, kw_only=True)
class Gemms:
    """The recipe of a linear's three GEMMs: the cast of each operand (None: the compute dtype), and each transform."""

    forward_x: Cast | None = None
    forward_w: Cast | None = None
    dgrad_dh: Cast | None = None
    dgrad_w: Cast | None = None
    wgrad_dh: Cast | None = None
    wgrad_x: Cast | None = None
    forward_transform: Hadamard | None = None
    dgrad_transform: Hadamard | None = None
    wgrad_transform: Hadamard | None = None

    def __post_init__(self) -> None:
        for name, cast in self.casts():
            require(
                cast.source == "high_precision" or getattr(self, FORWARD_OF.get(name, ""), None) is not None,
                f"{name}.source: the forward does not quantise this tensor; leave it out",
            )
            require(
                not cast.mask_clipped or name.startswith("forward"),
                f"{name}.mask_clipped: masks what the forward's cast clips; set it on forward_x or forward_w",
            )
            require(
                cast.outer_scale != "bound" or name.endswith("_x"),
                f"{name}.outer_scale: bound is that of a norm's output, which only X is; take tensor or row",
            )

    def casts(self) -> Iterator[tuple[str, Cast]]:
        """Yield name and cast of every quantised operand."""
        for name in OPERANDS:
            if (cast := getattr(self, name)) is not None:
                yield name, cast

    def cast_of(self, operand: str) -> Cast | None:
        """Return the cast of this operand, or None if it is not quantised."""
        cast: Cast | None = getattr(self, operand)
        return cast

    def transform_of(self, operand: str) -> Hadamard | None:
        """Return the transform of the GEMM that this operand belongs to, or None."""
        transform: Hadamard | None = getattr(self, f"{gemm_of(operand)}_transform")
        return transform

    def format(self, operand: str) -> str | None:
        """Return the element format of this operand, or None if it is not quantised."""
        cast = self.cast_of(operand)
        return None if cast is None else cast.format

    @property
    def forward(self) -> Gemm:
        return Gemm(self.forward_x, self.forward_w, self.forward_transform)

    @property
    def dgrad(self) -> Gemm:
        return Gemm(self.dgrad_dh, self.dgrad_w, self.dgrad_transform)

    @property
    def wgrad(self) -> Gemm:
        return Gemm(self.wgrad_dh, self.wgrad_x, self.wgrad_transform)

    @property
    def reads_forward(self) -> bool:
        """Return whether the backward needs the forward's quantised operands besides the unquantised ones."""
        return any(cast.source == "forward" or cast.mask_clipped for _, cast in self.casts())

    def filled(self, settings: BlockCast) -> Gemms:
        """Return the recipe with the open fields of every cast filled from the settings.

        Raises ConfigError with the operand for a cast that its filled fields make impossible.
        """
        casts: dict[str, Any] = {}
        for name, cast in self.casts():
            try:
                casts[name] = cast.filled(settings)
            except ConfigError as error:
                raise ConfigError(f"{name}.{error}") from None
        return replace(self, **casts)


def gemm_of(operand: str) -> str:
    """Return the GEMM that this operand belongs to: forward, dgrad or wgrad."""
    return operand.partition("_")[0]


FORWARD_OF = {"dgrad_w": "forward_w", "wgrad_x": "forward_x"}  # the operand that `source: forward` quantises again
# Selected by type, so a later field of another type is in neither table.
OPERANDS = tuple(f.name for f in fields(Gemms) if f.type == "Cast | None")
TRANSFORMS = tuple(f.name for f in fields(Gemms) if f.type == "Hadamard | None")

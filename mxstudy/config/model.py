"""The schema of a model: its sizes, its norms, and which linears run in which formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar, Literal

from mxstudy.config.casts import BlockCast, Gemms
from mxstudy.config.recipes import NAMED, PRECISIONS, look_up_recipe
from mxstudy.reader import ConfigError, require, schema


@schema
class Decoder:
    """Pre-norm, rotary embedding, grouped-query attention, no bias in a linear, embedding and head not tied.

    `mlp`: what is between its two linears: silu with a gate, GELU (exact), or squared ReLU. `qk_norm`: queries and keys
    are normalised over all heads at once, exactly and unquantised. `init`: that of TorchTitan's Llama 3, whose linears
    have `init_std`, or OLMo's mitchell, where a linear's follows from its fan-in.
    """

    kind: Literal["decoder"] = "decoder"
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    rope_theta: float = 500_000.0
    mlp: Literal["swiglu", "gelu", "relu2"] = "swiglu"
    qk_norm: bool = False
    init: Literal["llama", "mitchell"] = "llama"
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("hidden_size", "ffn_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size"):
            require(getattr(self, name) > 0, f"{name}: must be positive, not {getattr(self, name)}")
        require(
            self.hidden_size % (2 * self.num_heads) == 0,
            f"num_heads: hidden_size {self.hidden_size} does not divide into {self.num_heads} heads of an even size",
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_kv_heads: {self.num_heads} query heads do not divide into {self.num_kv_heads} groups",
        )
        require(
            self.init == "llama" or self.init_std == 0.02,
            f"init_std: {self.init} takes its own from the fan-in; leave it at 0.02, not {self.init_std}",
        )
        require(self.init_std >= 0, f"init_std: must not be negative, not {self.init_std}")
        require(self.rope_theta > 0, f"rope_theta: must be positive, not {self.rope_theta}")


@schema
class AnyNorm:
    """`eps`: keeps what is divided by from 0. `reads`: which of the run's settings it takes, beside the casts."""

    reads: ClassVar[tuple[str, ...]] = ()
    eps: float = 1e-5

    def __post_init__(self) -> None:
        require(self.eps >= 0, f"eps: must not be negative, not {self.eps}")


@schema
class RMSNorm(AnyNorm):
    """`fold_gain`: multiply the gain into the following weight, as MXNorm does (the control that isolates folding)."""

    kind: Literal["rmsnorm"] = "rmsnorm"
    fold_gain: bool = False


@schema
class LayerNorm(AnyNorm):
    """`bias`: added after the gain. `affine`: whether there is a gain, else it is 1 (instability paper, figure 12)."""

    kind: Literal["layernorm"] = "layernorm"
    bias: bool = False
    affine: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.affine or not self.bias, "bias: without affine a norm has no parameters; set it to false")


@schema
class MXNorm(AnyNorm):
    """RMS estimated by the p-mean of the block absmax (MXNorm paper, section 3.4); its gain is always folded."""

    reads = ("block_size",)
    kind: Literal["mxnorm"] = "mxnorm"
    p: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.p < float("inf"), f"p: the exponent of the p-mean must be positive and finite, not {self.p}")


@schema
class PostRoundMXNorm(AnyNorm):
    """RMS estimated from the block scales after their rounding, by `precision.scale_rule` for `format`.

    MXNorm paper, appendix K; its gain is always folded.
    """

    reads = ("block_size", "scale_rule")
    kind: Literal["mxnorm_postround"] = "mxnorm_postround"
    format: Literal["E4M3", "E5M2", "E3M2", "E2M3", "E2M1"] = "E4M3"


Norm = RMSNorm | LayerNorm | MXNorm | PostRoundMXNorm


BLOCKS = "layers.*"  # the pattern of a plan that means the linears of every block


@schema
class PrecisionRow:
    """Say by which recipe the linears run whose module name matches a pattern, from this step on.

    A recipe is one of the config's `recipes`, or a row of PRECISIONS. Of several patterns that match one linear the
    last wins; a linear that none matches runs in `train.compute`.
    """

    from_step: int = 0
    plan: dict[str, str]


@schema
class Precision:
    """Which linears run by which recipe, and the settings that hold where a recipe leaves something open.

    `recipes`: recipes of this config's own, by the names that the plan gives them: the cast of each operand, and the
    transform of each GEMM. `operand_pre_round`: operands to bf16 first, ties away from zero, before they are quantised
    (microxcaling). `scale_rule`: code_bump is floor with the "bump of the exponent" of the instability paper's public
    code, which raises the wrong elements' (`mxstudy.numerics.scales.code_bump`); the right one is rceil. `pad_blocks`:
    a last block that an axis does not fill is filled with zeros (microxcaling); without, sizes have to be multiples of
    `block_size`. An operand that fixes what is set keeps its own, and a setting that none takes is refused
    (`mxstudy.config.settings`).
    `backend`: reference computes module by module in PyTorch, joined in fused kernels, native with the hardware's MX
    GEMM, compute capability 10.0 (SM100) and later. auto takes the fastest that each block can have; emulated is auto
    without native. One that is asked for and cannot be had is refused.
    `head`: whether the output linear runs by the recipe that the plan has for all blocks (its pattern `layers.*`).
    `skip_blocks`: so many of the first and as many of the last blocks stay in `train.compute`, whatever the plan says.
    """

    schedule: tuple[PrecisionRow, ...]
    block_size: Literal[16, 32, 64] = 32
    scale_rule: Literal["floor", "ceil", "rceil", "even", "code_bump"] = "rceil"
    rounding: Literal["even", "away", "stochastic"] = "even"
    operand_pre_round: bool = False
    pad_blocks: bool = False
    backend: Literal["auto", "emulated", "reference", "joined", "native"] = "auto"
    head: bool = False
    skip_blocks: int = 0
    recipes: dict[str, Gemms] = field(default_factory=dict)

    def __post_init__(self) -> None:
        starts = [row.from_step for row in self.schedule]
        require(
            starts[:1] == [0] and starts == sorted(set(starts)),
            f"schedule: rows must start at step 0 and ascend, not {starts}",
        )
        require(
            not self.head or all(BLOCKS in row.plan for row in self.schedule),
            f"head: takes its row from the plan's pattern {BLOCKS!r}, and there is none; give one for 'output'",
        )
        require(self.skip_blocks >= 0, f"skip_blocks: must not be negative, not {self.skip_blocks}")
        named = {name for row in self.schedule for name in row.plan.values()}
        for name in self.recipes:
            require(name not in PRECISIONS, f"recipes.{name}: is the name of another recipe; give it one of its own")
            require(name in named, f"recipes.{name}: no plan of the schedule names it; name it, or leave it out")

    def recipe(self, name: str) -> Gemms:
        """Return the recipe of that name; ConfigError with the nearest one where there is none."""
        return look_up_recipe(name, self.recipes)

    @property
    def settings(self) -> BlockCast:
        """Return what recipes leave open."""
        return BlockCast(self.block_size, self.scale_rule, self.rounding, self.operand_pre_round, self.pad_blocks)

    def canonical(self) -> Mapping[str, Any]:
        """Return what stands for the recipes in a fingerprint, by their names in the plan: not those names.

        A recipe is its casts as the settings fill them; one of the rows that runs were always named by is that name.
        """
        known = {PRECISIONS[name].filled(self.settings): name for name in sorted(NAMED, reverse=True)}
        found: dict[str, Any] = {}
        for name in sorted({name for row in self.schedule for name in row.plan.values()} - NAMED):
            try:
                gemms = self.recipe(name).filled(self.settings)
            except ConfigError:  # an unknown name; whoever applies the plan says so
                continue
            found[name] = known.get(gemms, gemms)
        return found

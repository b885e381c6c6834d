"""The schema of a model: its sizes, its norms, and which linears run in which formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar, Literal

from mxstudy.config.casts import BlockCast, Gemms
from mxstudy.config.recipes import NAMED, PRECISIONS, look_up_recipe, named_by_casts
from mxstudy.reader import ConfigError, changed, plain, require, require_at_most, schema

MOST_FEATURES = 2**24
MOST_LAYERS = 2**12
MOST_EXPERTS = 2**12


@schema
class Llama3RopeScaling:
    """Llama 3.1's scaling of the rotary embedding, for more tokens than the `original_length` of its first training.

    Frequencies with a period above original_length / low_freq_factor are divided by `factor`, those with one below
    original_length / high_freq_factor stay, and between the two the divisor changes smoothly.
    """

    factor: float
    low_freq_factor: float  # see `factor`
    high_freq_factor: float  # see `factor`
    original_length: int

    def __post_init__(self) -> None:
        low, high = self.low_freq_factor, self.high_freq_factor
        for name in ("factor", "low_freq_factor", "original_length"):
            require(getattr(self, name) > 0, f"{name}: must be positive, not {getattr(self, name)}")
        require(high > low, f"high_freq_factor: must be above low_freq_factor, {low}, not {high}")


@schema
class MoE:
    """A mixture of experts: a router sends each token to `top_k` of `num_experts` MLPs; `num_shared` more see them all.

    No token is dropped. `activation`: that of every expert. `gate`: the router's scores, softmax over all experts or a
    sigmoid of each; the scores of the chosen ones, divided by their sum, weight their outputs (with top_k=1 the score
    itself does, as in Switch).

    `balance`: bias adds to each score a number that only affects the choice, moved by `bias_rate` after each step,
    up for an expert with less than the mean load, down for one with more (DeepSeek-V3). loss adds `loss_coefficient`
    times Switch's loss of every mixture to the training loss, over the tokens of a micro-batch. none has no balancing.
    """

    num_experts: int = 8  # MLPs in place of one
    top_k: int = 2  # of the experts, for each token
    num_shared: int = 0  # further experts that see every token
    activation: Literal["swiglu", "gelu", "relu2"] = "swiglu"
    gate: Literal["softmax", "sigmoid"] = "sigmoid"
    balance: Literal["bias", "loss", "none"] = "bias"
    bias_rate: float = 1e-3  # how far a bias moves in a step
    loss_coefficient: float = 1e-2  # weight of Switch's loss

    def __post_init__(self) -> None:
        require_at_most(self, {"num_experts": MOST_EXPERTS})
        require(
            0 < self.top_k <= self.num_experts,
            f"top_k: must lie in 1 .. num_experts ({self.num_experts}), not {self.top_k}",
        )
        require(
            0 <= self.num_shared <= MOST_EXPERTS,
            f"num_shared: must lie in 0 .. {MOST_EXPERTS:,}, not {self.num_shared}",
        )
        for name, owner in (("bias_rate", "bias"), ("loss_coefficient", "loss")):
            value, default = getattr(self, name), getattr(MoE, name)
            require(
                0 < value < float("inf"), f"{name}: must be positive and finite, not {value}; balance=none: no balance"
            )
            require(
                self.balance == owner or value == default,
                f"{name}: only for balance={owner}, not for {self.balance}; leave it at {default}",
            )


@schema
class Decoder:
    """A pre-norm decoder: rotary embedding, grouped-query attention, embedding and head not tied.

    `mlp`: the function between its linears: SiLU with a gate (swiglu), exact GELU, or squared ReLU; or moe, a
    mixture of experts as in `moe`, where `ffn_size` is that of one expert. `qk_norm`: normalise queries and keys over
    all heads at once, exactly and unquantised; `qk_norm_by_head`: each head by itself, with one gain for all heads.
    `qkv_bias`: add a bias to queries, keys and values; no other linear has one. `head_dim`: features of a head; null:
    hidden_size / num_heads. `dropout`: the share of elements that training sets to zero, drawn anew in every step: of
    the embedding, of the attention's weights, and of what attention and MLP add to the residual stream, as in GPT-2.
    `init`: llama is TorchTitan's for Llama 3, where the linears' standard deviation is `init_std`; mitchell is OLMo's,
    where it follows from the fan-in.
    """

    kind: Literal["decoder"] = "decoder"
    hidden_size: int  # size of the residual stream
    ffn_size: int  # inner size of the MLP
    num_layers: int  # number of blocks
    num_heads: int  # heads of queries
    num_kv_heads: int  # heads of keys and values, each read by as many queries
    vocab_size: int  # ids that the embedding has
    rope_theta: float = 500_000.0  # base of the rotary embedding
    rope_scaling: Llama3RopeScaling | None = None
    mlp: Literal["swiglu", "gelu", "relu2", "moe"] = "swiglu"
    moe: MoE = MoE()  # the experts of mlp=moe
    qk_norm: bool = False
    qk_norm_by_head: bool = False
    qkv_bias: bool = False
    head_dim: int | None = None
    dropout: float = 0.0
    init: Literal["llama", "mitchell"] = "llama"
    init_std: float = 0.02  # standard deviation of the linears' initial weights

    def __post_init__(self) -> None:
        require_at_most(self, dict.fromkeys(("hidden_size", "ffn_size", "vocab_size"), MOST_FEATURES))
        require_at_most(self, dict.fromkeys(("num_layers", "num_heads", "num_kv_heads"), MOST_LAYERS))
        require(
            self.head_dim is not None or self.hidden_size % (2 * self.num_heads) == 0,
            f"num_heads: hidden_size {self.hidden_size} does not divide into {self.num_heads} heads of an even size",
        )
        require(
            self.head_size > 0 and self.head_size % 2 == 0,
            f"head_dim: must be positive and even, not {self.head_dim}",
        )
        require(self.head_size <= MOST_FEATURES, f"head_dim: must be at most {MOST_FEATURES:,}, not {self.head_dim}")
        require(
            self.qk_norm or not self.qk_norm_by_head, "qk_norm_by_head: has no effect without qk_norm; set qk_norm too"
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_kv_heads: {self.num_heads} query heads do not divide into {self.num_kv_heads} groups",
        )
        require(
            self.init == "llama" or self.init_std == 0.02,
            f"init_std: {self.init} initialisation sets it from the fan-in; leave it at 0.02, not {self.init_std}",
        )
        require(self.init_std >= 0, f"init_std: must not be negative, not {self.init_std}")
        require(
            self.mlp == "moe" or self.moe == MoE(),
            f"moe: {self.mlp} has no experts; set mlp=moe, or leave moe out",
        )
        require(0 <= self.dropout < 1, f"dropout: must lie in 0 .. 1, below 1, not {self.dropout}")
        require(self.rope_theta > 0, f"rope_theta: must be positive, not {self.rope_theta}")

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim


@schema
class AnyNorm:
    """`eps`: keeps the divisor above 0. `reads`: the run's settings that the norm uses, besides those of its casts."""

    reads: ClassVar[tuple[str, ...]] = ()
    eps: float = 1e-5

    def __post_init__(self) -> None:
        require(self.eps >= 0, f"eps: must not be negative, not {self.eps}")


@schema
class RMSNorm(AnyNorm):
    """`fold_gain`: multiply the gain into the following weight, as MXNorm does (the control that isolates folding).

    `fold_gain_in_dgrad`: dgrad multiplies with W * gain, too, instead of W: forward and dgrad then quantise the same
    tensor. The gain's gradient comes from wgrad instead of dgrad.
    """

    kind: Literal["rmsnorm"] = "rmsnorm"
    fold_gain: bool = False
    fold_gain_in_dgrad: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.fold_gain or not self.fold_gain_in_dgrad,
            "fold_gain_in_dgrad: the forward does not fold the gain; set fold_gain=true too, or leave it at false",
        )


@schema
class LayerNorm(AnyNorm):
    """`bias`: add a bias after the gain. `affine`: train a gain; if false it is 1 (instability paper, figure 12)."""

    kind: Literal["layernorm"] = "layernorm"
    bias: bool = False
    affine: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.affine or not self.bias, "bias: without affine a norm has no parameters; set it to false")


@schema
class MXNorm(AnyNorm):
    """RMS estimated by the p-mean of the block absmax (MXNorm paper, section 3.4); the gain is always folded.

    The blocks are those of the cast that reads the norm, after the forward's transform if there is one, which keeps the
    RMS. If the forward does not cast X, they have `precision.block_size` elements. `fold_gain_in_dgrad`: dgrad
    reads W * gain too.
    """

    reads = ("block_size",)
    kind: Literal["mxnorm"] = "mxnorm"
    p: float  # exponent of the p-mean
    fold_gain_in_dgrad: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.p < float("inf"), f"p: the exponent of the p-mean must be positive and finite, not {self.p}")


@schema
class PostRoundMXNorm(AnyNorm):
    """RMS estimated from the block scales after `precision.scale_rule` has rounded them for `format`.

    MXNorm paper, appendix K; the gain is always folded.
    """

    reads = ("block_size", "scale_rule")
    kind: Literal["mxnorm_postround"] = "mxnorm_postround"
    format: Literal["E4M3", "E5M2", "E3M2", "E2M3", "E2M1"] = "E4M3"


Norm = RMSNorm | LayerNorm | MXNorm | PostRoundMXNorm


EARLIER_BACKENDS = {"joined": "fused"}  # {name in stored configs: name of now}; both have the same fingerprint
BLOCKS = "layers.*"  # the pattern of a plan that matches the linears of every block


@schema
class PrecisionRow:
    """The recipe of each linear from step `from_step` on, by a pattern of its module name.

    A recipe is one of the config's `recipes`, or a row of PRECISIONS. If several patterns match a linear, the last one
    wins; a linear that no pattern matches runs in `train.compute`.
    """

    from_step: int = 0  # the step from which the plan holds
    plan: dict[str, str]  # from patterns of module names to the recipes of the matching linears


@schema
class Precision:
    """The recipe of each linear, and the settings for the fields that a recipe leaves open.

    `recipes`: the config's own recipes, by the names that the plan uses: the cast of each operand, and the transform of
    each GEMM. `operand_pre_round`: round operands to bf16, ties away from zero, before they are quantised
    (microxcaling). `scale_rule`: code_bump is floor with the "bump of the exponent" of the instability paper's public
    code, which raises the scales of wrong elements (`mxstudy.numerics.scales.code_bump`); rceil raises the right ones.
    `pad_blocks`: fill a block that the end of an axis leaves incomplete with zeros (microxcaling); if false, sizes must
    be multiples of `block_size`. An operand that fixes a setting keeps its own value, and a setting that no operand
    uses is refused (`mxstudy.config.settings`).

    `backend`: reference computes module by module in PyTorch; fused uses fused kernels; native uses the hardware's MX
    GEMM, compute capability 10.0 (SM100) and later. auto takes the fastest that each block supports; emulated is auto
    without native; joined is an earlier name of fused. An explicit backend that is not available is an error.
    `head`: the output linear takes the recipe that the plan gives all blocks (pattern `layers.*`). `skip_blocks`: this
    many of the first and of the last blocks, or [first, last], stay in `train.compute`, whatever the plan says; tail:
    the number of last blocks nearest to 15 % of the linears, at least one.

    `gain`: how a language model's norms round their gains and biases: null keeps them in `train.compute`; mx is the
    cast of the forward's X of the linear that reads the norm, along the vector (of queries and keys: that of the linear
    that makes them); a norm whose reader quantises no X keeps `train.compute`. `vector_ops`: fp32 rounds the result of
    a norm or an activation once; bf16 rounds each of their operations, GELU by its tanh form, as microxcaling does.
    """

    schedule: tuple[PrecisionRow, ...]
    block_size: Literal[16, 32, 64] = 32  # elements that share a scale
    scale_rule: Literal["floor", "ceil", "rceil", "even", "code_bump"] = "rceil"  # how scales are rounded
    rounding: Literal["even", "away", "stochastic"] = "even"  # of elements: even and away decide where a half goes
    operand_pre_round: bool = False
    pad_blocks: bool = False
    backend: Literal["auto", "emulated", "reference", "fused", "joined", "native"] = "auto"  # what computes a block
    head: bool = False
    skip_blocks: int | tuple[int, int] | Literal["tail"] = 0
    gain: Literal["fp32", "bf16", "mx"] | None = None
    vector_ops: Literal["fp32", "bf16"] = "fp32"
    recipes: dict[str, Gemms] = field(default_factory=dict)

    def __post_init__(self) -> None:
        starts = [row.from_step for row in self.schedule]
        require(
            starts[:1] == [0] and starts == sorted(set(starts)),
            f"schedule: rows must start at step 0 and ascend, not {starts}",
        )
        require(
            not self.head or all(BLOCKS in row.plan for row in self.schedule),
            f"head: takes the recipe of the plan's pattern {BLOCKS!r}, which is missing; use a pattern 'output'",
        )
        ends = self.skip_blocks if isinstance(self.skip_blocks, tuple) else (self.skip_blocks,)
        require(
            all(end == "tail" or end >= 0 for end in ends),
            f"skip_blocks: must not be negative, not {plain(self.skip_blocks)}",
        )
        require(len(set(ends)) == len(ends), f"skip_blocks: write {ends[0]} instead of {plain(self.skip_blocks)}")
        named = {name for row in self.schedule for name in row.plan.values()}
        for name in self.recipes:
            require(name not in PRECISIONS, f"recipes.{name}: is a built-in recipe's name; choose another name")
            require(name in named, f"recipes.{name}: no plan of the schedule uses it; use it, or leave it out")

    def recipe(self, name: str) -> Gemms:
        """Return the recipe of that name. Raises ConfigError with the nearest name if there is none."""
        return look_up_recipe(name, self.recipes)

    def with_plan(self, plan: dict[str, str]) -> Precision:
        """Return the same precision with this plan from the first step on, and those recipes that it uses."""
        recipes = {name: gemms for name, gemms in self.recipes.items() if name in plan.values()}
        return changed(self, schedule=(PrecisionRow(plan=plan),), recipes=recipes)

    @property
    def settings(self) -> BlockCast:
        """Return the values that fill the fields that recipes leave open."""
        return BlockCast(self.block_size, self.scale_rule, self.rounding, self.operand_pre_round, self.pad_blocks)

    def canonical(self) -> Mapping[str, Any]:
        """Return {recipe name: what a fingerprint hashes in its place}, a recipe or a name of NAMED.

        A recipe enters as its casts, filled with the settings. A recipe equal to a row of NAMED enters as that row's
        name, and names of NAMED themselves are left out.
        """
        others = sorted({name for row in self.schedule for name in row.plan.values()} - NAMED)
        named_rows = named_by_casts(self.settings) if others else {}
        canonical: dict[str, Any] = {}
        for name in others:
            try:
                gemms = self.recipe(name).filled(self.settings)
            except ConfigError:  # an unknown name, which is an error when the plan is applied
                continue
            canonical[name] = named_rows.get(gemms, gemms)
        return canonical

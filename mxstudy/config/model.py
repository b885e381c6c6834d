"""The schema of a model: its sizes and its norms."""

from __future__ import annotations

from typing import ClassVar, Literal

from mxstudy.reader import require, require_at_most, schema

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
        check_exponent(self.p)


def check_exponent(p: float) -> None:
    """Raise ConfigError for an exponent of which there is no p-mean."""
    require(0 < p < float("inf"), f"p: the exponent of the p-mean must be positive and finite, not {p}")


@schema
class PostRoundMXNorm(AnyNorm):
    """RMS estimated from the block scales after `precision.scale_rule` has rounded them for `format`.

    MXNorm paper, appendix K; the gain is always folded.
    """

    reads = ("block_size", "scale_rule")
    kind: Literal["mxnorm_postround"] = "mxnorm_postround"
    format: Literal["E4M3", "E5M2", "E3M2", "E2M3", "E2M1"] = "E4M3"


Norm = RMSNorm | LayerNorm | MXNorm | PostRoundMXNorm

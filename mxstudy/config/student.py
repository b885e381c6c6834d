"""The schema of the student-teacher study: its models, their training, their probes and interventions."""

from __future__ import annotations

from typing import Literal

from mxstudy.config.model import MOST_FEATURES, MOST_LAYERS
from mxstudy.config.observation import LastBin, Scheduled
from mxstudy.config.training import MOST_STEPS
from mxstudy.reader import cosmetic, require, require_at_most, schema


@schema
class ResidualMLP:
    """Blocks of two linears around an activation; each block adds to its input (instability paper, Eq. 1).

    `expansion`: inner size over hidden size. With swiglu the inner size is two thirds of that, which keeps the number
    of parameters, rounded to the nearest multiple of `swiglu_multiple`: 1 in the public code, which then pads the last
    quantisation block (`precision.pad_blocks`). `residual`: if false, a block replaces its input and has no bias, as in
    the teacher of the paper's public code. `init`: torch's default, uniform within fan_in^-0.5, or Xavier normal with
    gain 0.5 and bias 0. `attention_heads`: heads of self-attention before each block (Eq. 11), 0 for none; a sequence
    is `sequence_length` samples of the batch.
    """

    kind: Literal["residual_mlp"] = "residual_mlp"
    hidden_size: int  # size of the residual stream
    num_layers: int  # number of blocks
    activation: Literal["relu", "gelu", "gelu_tanh", "swiglu"] = "gelu"  # between the two linears
    expansion: int = 4
    swiglu_multiple: Literal[1, 32] = 32
    residual: bool = True
    init: Literal["torch", "xavier"] = "torch"
    attention_heads: int = 0
    sequence_length: int = 0  # samples of the batch that are one sequence of the attention

    def __post_init__(self) -> None:
        require_at_most(self, {"hidden_size": MOST_FEATURES, "num_layers": MOST_LAYERS, "expansion": MOST_LAYERS})
        require(self.ffn_size > 0, f"hidden_size: {self.hidden_size} is too small for swiglu's multiples of 32")
        for name in ("attention_heads", "sequence_length"):
            require(getattr(self, name) >= 0, f"{name}: must not be negative, not {getattr(self, name)}")
        heads, length = self.attention_heads, self.sequence_length
        require(
            self.hidden_size % (heads or 1) == 0,
            f"attention_heads: hidden_size {self.hidden_size} does not divide into {heads} heads",
        )
        require(length > 0 or not heads, f"sequence_length: {heads} attention_heads need sequences; give a length")
        require(heads > 0 or not length, f"sequence_length: {length} needs attention_heads; set it to 0, or give heads")
        require(self.residual or not heads, "attention_heads: attention needs residual: true; set it to 0")

    @property
    def ffn_size(self) -> int:
        if self.activation == "swiglu":
            return self.swiglu_multiple * round(2 * self.expansion * self.hidden_size / 3 / self.swiglu_multiple)
        return self.expansion * self.hidden_size


@schema
class Student:
    """The student's roundings besides those of its GEMMs' operands.

    `gain`: its norms' gains: fp32, bf16, or mx, in blocks like the forward's W. `vector_ops`: fp32, bf16, or code, the
    mixture of both in the paper's public code. `norm_ops`: the same for the norms only; null: as `vector_ops`;
    code_skipped has the roundings that remain in that code when it is meant to round nothing. `freeze_norm_bias`:
    LayerNorm's bias stays 0, as in that code's MX runs.
    """

    gain: Literal["fp32", "bf16", "mx"] = "fp32"
    vector_ops: Literal["fp32", "bf16", "code"] = "fp32"
    norm_ops: Literal["fp32", "bf16", "code", "code_skipped"] | None = None
    freeze_norm_bias: bool = False


@schema
class Teacher:
    """`kind`: the teacher of the paper's public code or of its text, or the code's with each layer's rows at RMS 1.

    `quantized`: it runs in the student's precision, with GELU in bf16 by its tanh form, as in the code's MX runs; where
    that is random, it draws the numbers of step 0 in every step.
    `from_disk`: its stored targets contain noise, and each step adds noise again, so the variance doubles, as in the
    code's interventions. `redrawn`: its weights are not those of the data seed, as in the version of the code that its
    intervention scripts name.
    """

    kind: Literal["code", "paper", "scaled"] = "code"
    quantized: bool = False
    from_disk: bool = False
    redrawn: bool = False

    def __post_init__(self) -> None:
        require(
            not (self.quantized and self.from_disk),
            "from_disk: stored targets were computed in FP32; set from_disk or quantized to false",
        )


@schema
class Adam:
    kind: Literal["adam"] = "adam"
    betas: tuple[float, float] = (0.9, 0.999)  # decay of the two moments
    eps: float = 1e-8  # added to the root of the second moment

    def __post_init__(self) -> None:
        for beta in self.betas:
            require(0 <= beta < 1, f"betas: must lie in 0 .. 1, below 1, not {list(self.betas)}")
        require(self.eps >= 0, f"eps: must not be negative, not {self.eps}")


@schema
class SGD:
    kind: Literal["sgd"] = "sgd"
    momentum: float = 0.0  # fraction of the last step that is kept; 0: none

    def __post_init__(self) -> None:
        require(0 <= self.momentum < 1, f"momentum: must lie in 0 .. 1, below 1, not {self.momentum}")


StudentOptimizer = Adam | SGD


@schema
class StackTrain:
    """`batch_size`: samples per step, shared by all replicas. `compute`: dtype of unquantised operands and results."""

    steps: int  # updates of the weights
    batch_size: int = 2048
    compute: Literal["bf16", "fp32"] = "bf16"
    # auto takes a GPU if there is one; the device type that it resolves to is hashed instead
    device: Literal["auto", "cpu", "cuda"] = cosmetic("auto")
    compile: bool = True  # compile the step by Inductor

    def __post_init__(self) -> None:
        require_at_most(self, {"steps": MOST_STEPS, "batch_size": MOST_FEATURES})


@schema
class StudentGradientBias(Scheduled):
    """A run's gradients against FP32 gradients at the same weights and batch: ratio and cosine by layer.

    `coupled`: also against those of an FP32 run with the same seeds, trained beside it, as the instability paper does.
    """

    coupled: bool = cosmetic(False)


@schema
class Sharpness(Scheduled):
    """The largest eigenvalue of the FP32 loss's Hessian at the run's weights and batch; with Adam also preconditioned.

    `iterations` of the power method, which starts from the vector of the last measurement; each costs about as much as
    a step. The first measurement starts from a random vector, so its value is a few percent low. Checkpoints contain
    the vectors, so a resumed run measures the same.
    """

    iterations: int = cosmetic(20)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.iterations > 0, f"iterations: must be positive, not {self.iterations}")


@schema
class StudentProbes:
    last_bin: LastBin = LastBin()
    gradient_bias: StudentGradientBias = StudentGradientBias()
    sharpness: Sharpness = Sharpness()


@schema
class Intervention:
    """The changes of a fork to its parent; null keeps the parent's value, and a fork without changes is the control.

    With `vector_ops` and without `norm_ops`, the norms' operations follow `vector_ops`. `freeze_norm_bias`: true keeps
    a bias as the parent has trained it; false starts a bias that the parent did not train at 0, with its optimizer
    state at step one.

    The public code's forks differ from their parent in more than they state. `targets`: disk takes the targets of an
    FP32 teacher with noise added twice, redrawn takes those of another teacher. `new_optimizer`: start without the
    parent's moments, at step one. The code's version that its intervention scripts name has redrawn targets and a
    new optimizer; the last version of the code has the targets `disk`.

    `perturbed_weight`: flip one bit of this element of the first linear's weight, counted row by row: the last bit of
    the mantissa that E4M3 keeps, so that the GEMMs see the change. A fork with only this change is a redraw of the
    parent's run, and the control for all forks that change the computation. The table of forks says whether its first
    step differs from the parent's.
    """

    plan: dict[str, str] | None = None  # the recipes from then on
    scale_rule: Literal["floor", "ceil", "rceil", "even", "code_bump"] | None = None  # see precision.scale_rule
    gain: Literal["fp32", "bf16", "mx"] | None = None  # see student.gain
    vector_ops: Literal["fp32", "bf16", "code"] | None = None
    norm_ops: Literal["fp32", "bf16", "code", "code_skipped"] | None = None
    freeze_norm_bias: bool | None = None
    targets: Literal["disk", "redrawn"] | None = None
    new_optimizer: bool = False
    compute: Literal["bf16", "fp32"] | None = None  # see train.compute
    perturbed_weight: int | None = None

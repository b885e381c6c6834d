"""The student: a residual MLP without embedding and output head (instability paper, Eq. 1).

    A_{k+1} = A_k + W2 phi(W1 LN(A_k)) + b        A_0 = x, and A_L is the output

Before each such block there may be self-attention (`mxstudy.students.attention`).
Shapes: T samples, D hidden size; a stack of S replicas has a leading [S]. With `compute` bf16 every GEMM's result has
bf16 values; the vector operations between two GEMMs are rounded as VECTOR_OPS says.
"""

from __future__ import annotations

import copy
import math
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxstudy import config
from mxstudy.blocks.norm_mlp import NormMLP, hold, norm_mlp, why_not
from mxstudy.config.casts import BlockCast, Gemms
from mxstudy.kernels.operators import Held
from mxstudy.model.fusable import Fusable, Target, check_hooks, why_not_known
from mxstudy.model.linear import MXLinear, NormLinear
from mxstudy.model.modules import modules_of
from mxstudy.model.norm import Norm, Output, build_norm, kernel_norm, why_no_kernel_norm
from mxstudy.model.seeds import generator_for
from mxstudy.numerics.formats import look_up
from mxstudy.numerics.vector_ops import Gain
from mxstudy.reader import require
from mxstudy.students.attention import SelfAttention

FP32, BF16 = torch.float32, torch.bfloat16


class VectorOps(NamedTuple):
    """How vector operations are rounded.

    `norm`: the norm's output. The dtypes of the others' results: `gate`, silu of swiglu's gate; `activation`, also that
    of attention's softmax; `bias`, the sum with b; `residual`, the sum with A_k.
    """

    norm: Output
    gate: torch.dtype
    activation: torch.dtype
    bias: torch.dtype
    residual: torch.dtype


VECTOR_OPS = {
    "fp32": VectorOps("fused", FP32, FP32, FP32, FP32),
    "bf16": VectorOps("rounded", BF16, BF16, BF16, BF16),  # instability paper, appendix A.1
    "code": VectorOps("op_by_op", BF16, FP32, BF16, FP32),  # what the paper's public code does
}

# The rounding of norms alone, for configs that set it separately.
NORM_OPS: dict[str, Output] = {name: ops.norm for name, ops in VECTOR_OPS.items()} | {
    "code_skipped": "op_by_op_skipped"  # as when that code is told not to round norms: most roundings remain
}


class StudentActivation(NamedTuple):
    parts: int  # how many are fused in the first linear
    apply: Callable[[Tensor, VectorOps], Tensor]  # [..., parts * inner] -> [..., inner]


def swiglu(gate_up: Tensor, ops: VectorOps) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.to(ops.gate)).to(ops.activation) * up.to(ops.activation)


ACTIVATIONS = {
    "relu": StudentActivation(1, lambda h, ops: F.relu(h.to(ops.activation))),
    "gelu": StudentActivation(1, lambda h, ops: F.gelu(h.to(ops.activation))),
    "gelu_tanh": StudentActivation(1, lambda h, ops: F.gelu(h.to(ops.activation), approximate="tanh")),
    "swiglu": StudentActivation(2, swiglu),
}


KERNEL_ACTIVATIONS = dict(ACTIVATIONS)  # a copy: an activation that is added or replaced later has no kernel


class StudentInit(NamedTuple):
    """How a weight [out, in] is initialised: its std by fan-in and fan-out, and how numbers with this std are drawn."""

    std: Callable[[int, int], float]
    draw: Callable[[Tensor, float, torch.Generator], Tensor]
    bias: bool  # whether the bias is drawn like the weight before it; else it is 0


def uniform(x: Tensor, std: float, generator: torch.Generator) -> Tensor:
    return x.uniform_(-math.sqrt(3) * std, math.sqrt(3) * std, generator=generator)


INITS = {
    "torch": StudentInit(lambda fan_in, fan_out: (3 * fan_in) ** -0.5, uniform, True),  # bounded by fan_in^-0.5
    "xavier": StudentInit(
        lambda fan_in, fan_out: 0.5 * math.sqrt(2 / (fan_in + fan_out)),
        lambda x, std, generator: x.normal_(0, std, generator=generator),
        False,
    ),
}


class StudentBlock(Fusable):
    """One block of the student: an MLP with its norm, optionally after self-attention.

    `fused`: the settings of the fused block that computes norm, both linears and activation; None runs them one by one.
    `held`: the cast operands of up and down, if the optimizer keeps them up to date; None casts in every forward.
    """

    fused: NormMLP | None = None
    held: tuple[Held, Held] | None = None

    def __init__(self, model: config.ResidualMLP, norm: config.Norm | None, cast: BlockCast, ops: VectorOps) -> None:
        super().__init__()
        self.ops, self.residual = ops, model.residual
        self.activation_name, self.activation = model.activation, ACTIVATIONS[model.activation]
        size, inner, fused = model.hidden_size, model.ffn_size, self.activation.parts * model.ffn_size
        std = INITS[model.init].std
        self.attention = None
        if model.attention_heads:
            qkv = after_norm(norm, size, 3 * size, std(size, size), cast, ops)  # three linears, concatenated
            out = MXLinear(size, size, std(size, size))
            self.attention = SelfAttention(qkv, out, model.attention_heads, model.sequence_length)
        self.up = after_norm(norm, size, fused, std(size, fused), cast, ops)
        self.down = MXLinear(inner, size, std(inner, size))
        self.bias = nn.Parameter(torch.zeros(size)) if model.residual else None

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.attention is not None:
            x_TD = x_TD + self.attention(x_TD, self.ops.activation).to(self.ops.residual)
        if self.fused is not None:
            return self.forward_fused(x_TD, self.fused).to(self.ops.residual)
        y_TD = self.down(self.activation.apply(self.up(x_TD), self.ops))
        if self.bias is None:
            return y_TD.to(self.ops.residual)
        y_TD = y_TD.to(self.ops.bias) + self.bias.to(self.ops.bias)
        return x_TD + y_TD.to(self.ops.residual)

    def forward_fused(self, x_TD: Tensor, settings: NormMLP) -> Tensor:
        """Return the MLP's output, residual included, computed by the fused block."""
        check_hooks((self.up, self.down))  # neither is called
        gain, bias = self.up.gain_and_bias(x_TD) if isinstance(self.up, NormLinear) else (None, None)
        up, down = self.held or (self.up.weight, self.down.weight)
        return norm_mlp(x_TD, gain, bias, up, down, self.bias, settings)

    def set_fused(self, fused: bool) -> None:
        """Switch to kernels, in the linears' current formats, or back to the reference."""
        self.fused = self.held = None
        for linear in (self.up, self.down):
            linear.on_tensor_cores = fused and self.has_fp32_kernel(linear)
        if fused and self.why_not_fused_mlp() is None:
            up, fold_gain = self.up, isinstance(self.up, NormLinear) and self.up.norm.fold_gain
            self.fused = NormMLP(
                kernel_norm(up.norm) if isinstance(up, NormLinear) else None,
                self.activation_name,
                up.gemms,
                self.down.gemms,
                up.cast,
                fold_gain=fold_gain,
                round_norm=self.ops.norm == "rounded" and self.ops.residual == BF16 and not fold_gain,
                gate_dtype=self.ops.gate,
                dtype=self.ops.activation,
                bias_dtype=self.ops.bias,
            )

    @property
    def left_to_reference(self) -> str | None:
        return None if self.attention is None else "the MLP; attention runs by the reference"

    def use_kernels(self) -> None:
        """Switch to kernels if this block has any, on any device."""
        self.set_fused(self.why_no_kernel() is None)

    def why_not_fused(self, target: Target) -> str | None:
        return self.why_no_kernel() if target.device.type == "cuda" else "the kernels of students run on a GPU"

    def why_no_kernel(self) -> str | None:
        """Return why the block has neither the fused MX kernel nor an FP32 linear's kernel, or None if it has one."""
        if any(self.has_fp32_kernel(linear) for linear in (self.up, self.down)):
            return None
        return self.why_not_fused_mlp()

    def why_not_fused_mlp(self) -> str | None:
        """Return why the block's MLP has no fused kernel, or None if it has one."""
        up, down = self.up, self.down
        for name, linear in (("first linear", up), ("second linear", down)):
            if reason := why_not_known(name, linear, NormLinear if isinstance(linear, NormLinear) else MXLinear):
                return reason
        if up.compute != BF16:
            return f"the fused kernel computes in bf16, and train.compute is {up.compute}"
        if self.activation_name not in KERNEL_ACTIVATIONS:
            return f"its activation ({self.activation_name}) has no kernel"
        if self.activation is not KERNEL_ACTIVATIONS[self.activation_name]:
            return f"its activation is not the {self.activation_name} that the kernel computes"
        outputs = ("fused", "rounded")
        if isinstance(up, NormLinear) and (reason := why_no_kernel_norm(up.norm, up.cast.block_size, outputs)):
            return reason
        return why_not(up.gemms, up.cast) or why_not(down.gemms, down.cast)

    def has_fp32_kernel(self, linear: MXLinear) -> bool:
        """Return whether the kernel for FP32 GEMMs, as three TF32 products, computes that linear."""
        in_fp32 = self.ops.residual == self.ops.activation == FP32  # the kernel takes FP32 inputs of both linears
        plain = not isinstance(linear, NormLinear) or not (linear.norm.fold_gain or linear.norm.is_op_by_op)
        return in_fp32 and plain and linear.compute == FP32 and linear.gemms == Gemms()

    def hold(self) -> dict[Tensor, Held]:
        """Use held operands from now on, and return {weight: operands} for the optimizer to keep up to date."""
        if self.fused is None or self.fused.fold_gain:
            return {}
        up, down = (hold(linear.weight, linear.gemms, linear.cast) for linear in (self.up, self.down))
        self.held = up, down
        return {self.up.weight: up, self.down.weight: down}


def after_norm(
    norm: config.Norm | None, size: int, out: int, init_std: float, cast: BlockCast, ops: VectorOps
) -> MXLinear:
    """Return a linear size -> out, fused with its own norm if the student has norms."""
    if norm is None:
        return MXLinear(size, out, init_std)
    built = build_norm(norm, size, cast)
    built.output = ops.norm
    return NormLinear(built, out, init_std)


class ResidualMLP(nn.Module):
    """Map x [T, D] to [T, D], both float32; as a stack (`mxstudy.students.replicas`), [T, D] or [S, T, D] to [S, T, D].

    With attention, T must be a multiple of the config's sequence_length. `norm`: None for no norms. `gain`: fp32, bf16
    or mx. `vector_ops`: a row of VECTOR_OPS. `norm_ops`: one of NORM_OPS, or None for that of `vector_ops`.
    `freeze_norm_bias`: keep LayerNorm's bias at 0, as in the MX runs of the paper's public code. Raises ConfigError for
    options that the norm does not have.
    """

    def __init__(
        self,
        model: config.ResidualMLP,
        norm: config.Norm | None,
        cast: BlockCast,
        compute: torch.dtype,
        *,
        gain: Gain = "fp32",
        vector_ops: str = "fp32",
        norm_ops: str | None = None,
        freeze_norm_bias: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.ops = model, look_up(VECTOR_OPS, vector_ops, "vector_ops")
        if norm_ops is not None:
            require(norm is not None, "norm_ops: there is no norm; set it to null")
            self.ops = self.ops._replace(norm=look_up(NORM_OPS, norm_ops, "norm_ops"))
        self.layers = nn.ModuleList(StudentBlock(model, norm, cast, self.ops) for _ in range(model.num_layers))
        require(norm is not None or gain == "fp32", "gain: there is no norm to round the gain of; leave it at fp32")
        biases = [norm.bias for norm in modules_of(self, Norm).values() if norm.bias is not None]
        require(bool(biases) or not freeze_norm_bias, "freeze_norm_bias: the norm has no bias; set it to false")
        for bias in biases:
            bias.requires_grad_(not freeze_norm_bias)
        for module in self.modules():
            if isinstance(module, MXLinear):
                module.cast, module.compute = cast, compute
            if isinstance(module, NormLinear):
                check_norm(module.norm, gain, vector_ops, norm_ops)
                module.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        replicas = next(self.parameters()).shape[:-2]
        x = x.expand(*replicas, *x.shape[-2:]).to(self.ops.residual)
        for layer in self.layers:
            x = layer(x)
        return x.to(FP32)

    @property
    def blocks(self) -> list[StudentBlock]:
        return [typing.cast(StudentBlock, layer) for layer in self.layers]

    def use_kernels(self) -> None:
        """Call `StudentBlock.use_kernels` on every block."""
        for block in self.blocks:
            block.use_kernels()

    def hold(self) -> dict[Tensor, Held]:
        """Call `StudentBlock.hold` on every block, and return {weight: operands} of all blocks."""
        return {weight: operands for block in self.blocks for weight, operands in block.hold().items()}

    def sharing(self, fused: bool = False) -> ResidualMLP:
        """Return a copy that shares the parameters and casts them in every forward.

        Its blocks run module by module, or with `fused` as this model's blocks do.
        """
        held = [tensor for block in self.blocks for each in block.held or () for tensor in (each.forward, each.dgrad)]
        shared = copy.deepcopy(self, {id(tensor): tensor for tensor in [*self.parameters(), *held]})
        for block in shared.blocks:
            block.held = None
            if not fused:
                block.fused = None
        return shared

    @torch.no_grad()
    def init_weights(self, seeds: Sequence[int], prefix: str = "") -> None:
        """Reset the norms, and draw the rest from each replica's seed and the parameter's name.

        The numbers are equal in stacks of any width. `prefix` is put before the names, so that another model of the
        same sizes and seed has other numbers.
        """
        init = INITS[self.config.init]
        for norm in modules_of(self, Norm).values():
            norm.reset_parameters()
        for name, parameter, std in self.drawn():
            replicas = parameter if parameter.ndim > 2 else parameter[None]
            require(
                len(seeds) == len(replicas), f"seeds: {len(seeds)} for {len(replicas)} replicas; give one per replica"
            )
            for replica, seed in zip(replicas, seeds, strict=True):
                replica.copy_(init.draw(torch.empty(replica.shape), std, generator_for(seed, prefix + name)))

    def drawn(self) -> Iterator[tuple[str, nn.Parameter, float]]:
        """Yield name, parameter and standard deviation of every weight and bias to draw."""
        for name, module in self.named_modules():
            if isinstance(module, MXLinear):
                yield f"{name}.weight", module.weight, module.init_stds[0]
            if isinstance(module, StudentBlock) and module.bias is not None:
                yield f"{name}.bias", module.bias, module.down.init_stds[0] * INITS[self.config.init].bias


def check_norm(norm: Norm, gain: Gain, vector_ops: str, norm_ops: str | None) -> None:
    """Raise ConfigError for options of gain and rounding that the norm does not have."""
    require(
        norm_ops is None or not norm.fold_gain,
        "norm_ops: with a folded gain the norm is fused with the linear and its output is not rounded; set it to null",
    )
    require(
        norm_ops != "bf16" or VECTOR_OPS[vector_ops].residual == BF16,
        f"norm_ops: bf16 rounds to the residual stream's dtype, which is FP32 with vector_ops={vector_ops}; use code",
    )
    require(
        VECTOR_OPS[vector_ops].norm != "op_by_op" or not norm.fold_gain,
        f"vector_ops: {vector_ops} rounds every step of the norm, but with a folded gain the norm is fused with the "
        "linear; use bf16",
    )
    require(norm.weight is not None or gain == "fp32", f"gain: the norm has none to round to {gain}; leave it at fp32")

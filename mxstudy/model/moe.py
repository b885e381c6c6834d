"""A mixture of experts in place of a decoder's MLP: a router sends each token to some of many MLPs, the experts.

    scores = gate(x / rms * gain . Wr^T)     the K experts with the largest scores + bias; the first among equals
    y = sum_j score_j / sum_k score_k * expert_j(norm(x)) + shared experts(norm(x))

Router, scores and the sum are FP32. One norm serves the router and all experts. The linears of each expert are
quantised separately (`mxstudy.numerics.experts`). No token is dropped. All experts' weights are one tensor.

Shapes: B sequences, T tokens, D hidden size, E experts, K experts a token, N dispatched rows.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxstudy import config
from mxstudy.config.casts import BlockCast
from mxstudy.model.feed_forward import INITS, MLPS
from mxstudy.model.fusable import Target
from mxstudy.model.linear import MXLinear, NormLinear, Sources, bounds_for
from mxstudy.model.modules import modules_of
from mxstudy.model.norm import Norm, build_norm
from mxstudy.model.seeds import normal_weight
from mxstudy.numerics.dispatch import Dispatch, combine, dispatch_of, to_rows
from mxstudy.numerics.experts import Grouped
from mxstudy.numerics.grouped_gemm import GROUPED_BLOCKS
from mxstudy.numerics.norm_linear import center, row_mean
from mxstudy.numerics.readers import NormOutput, normed, read_norm, read_rows

ALIGN = 8  # bf16 rows: the grouped GEMM's contraction axis must be a multiple of this
TINY = 1e-20  # keeps a sum of scores above 0
GATES: dict[str, Callable[[Tensor], Tensor]] = {"softmax": lambda logits: logits.softmax(-1), "sigmoid": torch.sigmoid}


class Routed(NamedTuple):
    """The routing of a mixture's tokens. `loads_E`: int64, tokens that went to each expert.

    `entropy`: of the router's probabilities, in nats, the mean over tokens. `balance_loss`: times its coefficient; None
    without an auxiliary loss. `padding`: the share of the dispatched rows that hold no token.
    """

    loads_E: Tensor
    entropy: Tensor
    balance_loss: Tensor | None
    padding: float


class Router(nn.Module):
    """Choose each token's experts, in FP32. `bias`: only affects the choice; the training moves it after a step."""

    def __init__(self, model: config.Decoder) -> None:
        super().__init__()
        self.moe = model.moe
        self.init_stds = (INITS[model.init].linear(model, model.hidden_size),)
        self.weight = nn.Parameter(normal_weight((model.moe.num_experts, model.hidden_size), self.init_stds))
        self.register_buffer("bias", torch.zeros(model.moe.num_experts) if self.moe.balance == "bias" else None)
        self.bias: Tensor | None

    def forward(self, y_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the experts of each token (int64 [T, K]), their weights (float32 [T, K]) and probabilities [T, E]."""
        scores_TE = GATES[self.moe.gate](F.linear(y_TD, self.weight))
        ranked_TE = scores_TE.detach() if self.bias is None else scores_TE.detach() + self.bias
        order_TE = torch.sort(ranked_TE, dim=-1, descending=True, stable=True).indices  # of equal ones the first
        experts_TK = order_TE[:, : self.moe.top_k]
        weights_TK = scores_TE.gather(-1, experts_TK)
        if self.moe.top_k > 1:  # Switch: one expert's weight is its score, or the router would have no gradient
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + TINY)
        return experts_TK, weights_TK, scores_TE / (scores_TE.sum(-1, keepdim=True) + TINY)

    @torch.no_grad()
    def move_bias(self, loads_E: Tensor, diverged: Tensor) -> None:
        """Move the bias of experts with less than the mean load up, and of those with more down (DeepSeek-V3).

        If `diverged`, bool [] on the device, the bias stays, and the host need not know.
        """
        if self.bias is not None:
            off_E = loads_E.sum() - loads_E * len(loads_E)  # E times the distance to the mean: whole numbers
            moved_E = self.bias + self.moe.bias_rate * off_E.sign()
            self.bias.copy_(torch.where(diverged, self.bias, moved_E))


class ExpertLinear(MXLinear):
    """The linears of all experts, applied to rows that are already dispatched."""

    is_of_experts = True

    def sources(self, x: Tensor, *more: Any) -> Sources:
        weight, (dispatch, _) = self.weight_as(x), more
        return Sources(x, weight, weight, None, Grouped(self.arithmetic, dispatch, self.out_features).linear)

    def forward(self, x_NI: Tensor, dispatch: Dispatch, is_grouped: bool) -> Tensor:  # type: ignore[override]
        return read_rows(x_NI, self.weight_as(x_NI), self.arithmetic, x_NI.dtype, dispatch, is_grouped)


class ExpertNormLinear(NormLinear):
    """A norm, and the linears of all experts that read it."""

    is_of_experts = True

    def normed(self, x_TD: Tensor) -> NormOutput:
        """Return the norm's output, for all its readers."""
        gain_D, bias_D = self.gain_and_bias(x_TD)
        with torch.no_grad():
            mean_T1 = row_mean(x_TD) if self.norm.centers else None
            rms_T1 = self.rms(center(x_TD, mean_T1))
        return normed(x_TD, mean_T1, rms_T1, gain_D, bias_D, self.bounds, self.norm.fold_gain)

    def sources(self, x: Tensor, *more: Any) -> Sources:
        _, dispatch, _ = more
        found, linear = super().sources(x), Grouped(self.arithmetic, dispatch, self.out_features).linear
        return found._replace(x_TI=to_rows(found.x_TI, dispatch), linear=linear)

    def forward(  # type: ignore[override]
        self, x_TD: Tensor, norm_output: NormOutput, dispatch: Dispatch, is_grouped: bool
    ) -> Tensor:
        """Return the experts' output rows [N, out] from the output of the norm of x."""
        return read_norm(norm_output, self.weight_as(x_TD), self.arithmetic, x_TD.dtype, dispatch, is_grouped)


class SharedUp(MXLinear):
    """The first linear of the shared experts. `reads`: the norm of the other experts, which is not a submodule here."""

    def __init__(self, norm: Norm, out_features: int, init_std: tuple[float, ...]) -> None:
        super().__init__(norm.size, out_features, init_std)
        self.reads = (norm,)

    def sources(self, x: Tensor, *more: Any) -> Sources:
        norm_output, weight = self.own(*more), self.weight_as(x)
        forward_weight, bounds = norm_output.weight_and_bounds(weight)
        return Sources(norm_output.y_TI, forward_weight, weight, bounds, self.arithmetic)

    def forward(self, x_TD: Tensor, norm_output: NormOutput) -> Tensor:  # type: ignore[override]
        return read_norm(self.own(norm_output), self.weight_as(x_TD), self.arithmetic, x_TD.dtype)

    def own(self, norm_output: NormOutput) -> NormOutput:
        """Return the norm's output with the bounds that hold under this linear's transform."""
        return norm_output._replace(bounds=bounds_for(self.reads[0], self.gemms))


class SharedExperts(nn.Module):
    """The experts that see every token, as one MLP."""

    def __init__(self, model: config.Decoder, norm: Norm, output_std: float) -> None:
        super().__init__()
        row, size = MLPS[model.moe.activation], model.moe.num_shared * model.ffn_size
        self.up_name, self.activation = row.up, row.activation
        self.add_module(self.up_name, SharedUp(norm, row.parts * size, row.init_stds(model, output_std)))
        self.w2 = MXLinear(size, model.hidden_size, output_std)

    def forward(self, x_TD: Tensor, norm_output: NormOutput) -> Tensor:
        return typing.cast(Tensor, self.w2(self.activation(getattr(self, self.up_name)(x_TD, norm_output))))


class MixtureOfExperts(nn.Module):
    """Experts, their router and shared experts, with the norm before them.

    `is_grouped`: compute all experts in one grouped GEMM instead of one after the other. `align`: the experts' rows
    come in multiples of it; all blocks and transforms of the token axis divide it.
    """

    is_grouped = False
    align = ALIGN

    def __init__(self, model: config.Decoder, norm: config.Norm, cast: BlockCast, output_std: float) -> None:
        super().__init__()
        self.moe, row = model.moe, MLPS[model.moe.activation]
        self.up_name, self.activation = row.up, row.activation
        experts, built = (model.moe.num_experts,), build_norm(norm, model.hidden_size, cast)
        stds = row.init_stds(model, output_std)
        self.router = Router(model)
        self.add_module(self.up_name, ExpertNormLinear(built, row.parts * model.ffn_size, stds, experts))
        self.w2 = ExpertLinear(model.ffn_size, model.hidden_size, output_std, experts)
        self.shared = SharedExperts(model, built, output_std) if model.moe.num_shared else None

    @property
    def up(self) -> ExpertNormLinear:
        return typing.cast(ExpertNormLinear, getattr(self, self.up_name))

    @property
    def idle_params(self) -> int:
        """Return the number of parameters of the experts that a token does not go to."""
        share = self.up.weight.numel() + self.w2.weight.numel()
        return share // self.moe.num_experts * (self.moe.num_experts - self.moe.top_k)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Routed]:
        """Return the output [B, T, D], and the routing of the tokens."""
        x_TD = x_BTD.flatten(0, 1)
        norm_output = self.up.normed(x_TD)
        experts_TK, weights_TK, probabilities_TE = self.router(norm_output.unfolded)
        dispatch = dispatch_of(experts_TK, self.moe.num_experts, self.align)
        rows = self.up(x_TD, norm_output, dispatch, self.is_grouped)
        rows = self.w2(self.activation(rows), dispatch, self.is_grouped)
        y_TD = combine(rows, weights_TK, dispatch)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD, norm_output).float()
        return y_TD.to(x_BTD.dtype).view_as(x_BTD), self.routing(dispatch, probabilities_TE)

    def routing(self, dispatch: Dispatch, probabilities_TE: Tensor) -> Routed:
        """Return the routing. Switch's loss is E times the sum over experts of load share times probability."""
        copies, loss = dispatch.rows_TK.numel(), None
        if self.moe.balance == "loss":
            shares_E = dispatch.loads_E / copies
            loss = self.moe.loss_coefficient * self.moe.num_experts * (shares_E * probabilities_TE.mean(0)).sum()
        entropy = torch.special.entr(probabilities_TE.detach()).sum(-1).mean()
        return Routed(dispatch.loads_E, entropy, loss, 1 - copies / len(dispatch.copies_N))


def mixtures_of(model: nn.Module) -> dict[str, MixtureOfExperts]:
    return modules_of(model, MixtureOfExperts)


def why_not_one_gemm(mixture: MixtureOfExperts, target: Target) -> str | None:
    """Return why a mixture's experts cannot be computed in one grouped GEMM, or None if they can."""
    if target.device.type != "cpu" and target.compute != torch.bfloat16:
        return f"the grouped GEMM of its experts is in bf16, and train.compute is {target.compute}"
    for linear in (mixture.up, mixture.w2):
        for size in (linear.in_features, linear.out_features):
            if size % ALIGN:
                return f"the grouped GEMM takes multiples of {ALIGN}, and its experts have a side of {size}"
    return next((reason for linear in (mixture.up, mixture.w2) if (reason := why_not_in_groups(linear))), None)


def why_not_in_groups(linear: MXLinear) -> str | None:
    """Return why the operands of experts' linears cannot be cast for all experts at once, or None if they can."""
    for operand, cast in linear.gemms.casts():
        if cast.scale == "FP32" and cast.block_size not in GROUPED_BLOCKS:
            return (
                f"the grouped GEMM has FP32 scales for blocks of {', '.join(map(str, GROUPED_BLOCKS))}, and those of "
                f"the experts' {operand} are of {cast.block_size}"
            )
    if columns := scaled_by_columns(linear):
        return (
            f"the grouped GEMM has no scale for each column, and the experts' {columns} has one; "
            "outer_scale: tensor has one for each expert"
        )
    return None


def scaled_by_columns(*linears: MXLinear) -> str | None:
    """Return the first operand of experts' linears that has an outer scale for each column of an expert, or None.

    Only X after a norm has a bound; anywhere else the cast takes each row's own scale in its place. The rows of wgrad's
    operands are the columns of X and dH, because its contraction axis is the tokens.
    """
    for linear in linears:
        by_row = ("row",) if isinstance(linear, NormLinear) else ("row", "bound")
        for operand, cast in linear.gemms.casts():
            if operand.startswith("wgrad") and cast.outer_scale in by_row:
                return operand
    return None

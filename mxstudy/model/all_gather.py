"""Gather a block's weights over the ranks as MX codes and scales (`train.all_gather=mx`), not in the compute dtype.

    forward    row-wise codes and scales of W, or of W * gain where the norm folds its gain
    backward   column-wise codes and scales of W, which dgrad reads

FSDP2 gathers a block before its forward and again before its backward. Each time it asks every weight's shard what to
send, and makes a weight from what all ranks sent. A rank casts its own rows, so a weight costs 1.03 bytes a parameter
and direction where bf16 costs 2, and the operands have the bits of a cast of the whole weight. A folded gain is
multiplied before the cast, so each rank has the whole gain beside its shard; it is gathered anew before every forward.
Norms, biases, embedding and head are gathered in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from mxstudy.compat.torch_fsdp import extend_all_gather, is_gathered_for_backward
from mxstudy.config.casts import Cast, Gemms
from mxstudy.distributed import gather_over_ranks, own_part, world_size
from mxstudy.kernels.implements import Implements
from mxstudy.model.decoder import Decoder
from mxstudy.model.fusable import linears_in
from mxstudy.model.linear import MXLinear, NormLinear
from mxstudy.model.modules import modules_of
from mxstudy.model.moe import mixtures_of
from mxstudy.numerics.formats import FORMATS, SCALE_RULES
from mxstudy.numerics.gathered_weight import Coding, GatheredWeight
from mxstudy.numerics.grid import to_dtype
from mxstudy.numerics.norm_linear import times_gain
from mxstudy.reader import require

ELSE = "take train.all_gather=compute"
WEIGHT_AXES = {"forward_w": -1, "dgrad_w": -2}  # the weight as an operand, and its contraction axis
# The casts that give a row the same result without the other rows: any block size, other fields at their default.
BY_ROWS = Implements(
    "gathered shards",
    cast={
        "format": tuple(name for name, row in FORMATS.items() if row.scale == "E8M0"),
        "block_size": (int,),
        "scale_rule": tuple(SCALE_RULES),
        "rounding": ("even", "away"),
        "pre_round": (False, True),
        "pad": (False,),
    },
)


# ------------------------------------------------------------------------------------------------ what is refused


class Width(NamedTuple):
    """The settings that decide the number of bytes of a weight's codes and scales."""

    bits: int
    block_size: int


def check_all_gather(model: Decoder, ranks: int) -> dict[str, Width]:
    """Return each gathered weight's width. Raises ConfigError for a weight whose cast cannot be gathered."""
    require(
        not mixtures_of(model), "train.all_gather: mx gathers single matrices, and model.mlp=moe has stacks; " + ELSE
    )
    linears = {name: m for name, m in modules_of(model, MXLinear).items() if name.startswith("layers.")}
    widths = {}
    require(
        not any(isinstance(m, NormLinear) and m.norm.fold_gain_in_dgrad for m in linears.values()),
        "train.all_gather: mx gathers no weights but codes, and norm.fold_gain_in_dgrad takes the gain's gradient from "
        "the weight; set that to false, or " + ELSE,
    )
    for name, linear in linears.items():
        reason = why_not_gathered(linear.gemms)
        require(reason is None, f"train.all_gather: mx cannot gather {name}: {reason}; {ELSE}")
        forward, dgrad = (width_of(getattr(linear.gemms, operand)) for operand in WEIGHT_AXES)
        require(
            forward == dgrad,
            f"train.all_gather: mx gathers as many bytes for dgrad as for the forward, and {name} has codes of "
            f"{forward.bits} bits in blocks of {forward.block_size}, and of {dgrad.bits} in blocks of "
            f"{dgrad.block_size}; make them equal, or {ELSE}",
        )
        share = linear.out_features / ranks
        require(
            share % forward.block_size == 0,
            f"train.all_gather: mx cuts the {linear.out_features} rows of {name} into {share:g} for each of {ranks} "
            f"ranks, and no block of {forward.block_size} may be cut; take other ranks, or {ELSE}",
        )
        widths[name] = forward
    return widths


def why_not_gathered(gemms: Gemms) -> str | None:
    """Return why ranks cannot gather a weight as that recipe's operands, or None if they can."""
    for operand in WEIGHT_AXES:
        if gemms.cast_of(operand) is None:
            return f"{operand} is not quantised"
    of_weights = Gemms(
        **{name: getattr(gemms, name) for name in (*WEIGHT_AXES, "forward_transform", "dgrad_transform")}
    )
    if reason := BY_ROWS.why_not(of_weights):
        return reason
    return "its backward reads what the forward quantised" if gemms.reads_forward else None


def width_of(chosen: Cast) -> Width:
    return Width(FORMATS[chosen.format].bits, chosen.block_size or 0)


# ------------------------------------------------------------------------------------------------------- the gather


def gather_in_mx(model: Decoder) -> None:
    """Have FSDP2 gather the weights of the model's blocks in MX, in the formats that their linears have at each gather.

    The model must be sharded, with memory allocated.
    """
    gains = WholeGains(model)
    model.register_forward_pre_hook(gains.gather, prepend=True)  # before FSDP2's, which begins to gather
    for block in model.layers:
        for linear in linears_in(block):
            extend_all_gather(linear.weight, MXGather(linear, block, gains))


class WholeGains:
    """The folded gains of a model's norms, whole on each rank."""

    def __init__(self, model: Decoder) -> None:
        self.compute = model.compute
        linears = [linear for linear in linears_in(model) if isinstance(linear, NormLinear)]
        self.linears = [linear for linear in linears if linear.norm.fold_gain]
        self.whole: dict[nn.Module, Tensor] = {}

    @torch.no_grad()
    def gather(self, *_: Any) -> None:
        """Gather all gains at once, in the compute dtype, which the forward would use."""
        if not self.linears:
            return
        shards = [own_part(cast(Tensor, linear.norm.weight)) for linear in self.linears]
        gathered = gather_over_ranks(to_dtype(torch.cat(shards), self.compute)).view(world_size(), -1)
        for linear, gain in zip(self.linears, gathered.split([len(shard) for shard in shards], 1), strict=True):
            self.whole[linear] = gain.flatten()


class MXGather(NamedTuple):
    """The `Extension` of a shard: how a linear's weight is gathered."""

    linear: MXLinear
    block: nn.Module
    gains: WholeGains

    def send(self, mesh: Any, size: torch.Size, stride: Sequence[int], module: Any, policy: Any) -> tuple[Any, Coding]:
        """Return this rank's codes and scales for the next direction, and how `receive` must read them."""
        operand = "dgrad_w" if is_gathered_for_backward(self.block) else "forward_w"
        coding = Coding(size, getattr(self.linear.gemms, operand), WEIGHT_AXES[operand])
        shard = to_dtype(own_part(self.linear.weight), policy.param_dtype)
        gain = self.gains.whole.get(self.linear)
        return coding.encode(times_gain(shard, gain) if operand == "forward_w" and gain is not None else shard), coding

    def receive(
        self, gathered: tuple[Tensor, ...], needed: Coding, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the gathered weight, or fill `out`; FSDP2 frees the codes and scales itself."""
        codes, scales = gathered
        if out is not None:
            assert isinstance(out, GatheredWeight)
            out.filled(needed, codes, scales)
            return None
        return GatheredWeight.of(needed, codes, scales, dtype), ()

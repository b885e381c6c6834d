"""Set the roundings of a decoder's vector operations: gains and biases of its norms, each operation of norm and MLP.

They are settings of the precision plan (`precision.gain`, `precision.vector_ops`), for all steps alike. A gain in mx is
cast like the forward's X of the linear that reads the norm; the plan may change that cast between steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn

from mxstudy import config
from mxstudy.config.settings import casts_of
from mxstudy.model.activation_functions import OP_BY_OP
from mxstudy.model.decoder import Attention, Decoder
from mxstudy.model.feed_forward import MLPS, FeedForward
from mxstudy.model.linear import MXLinear, NormLinear
from mxstudy.model.modules import modules_of
from mxstudy.model.moe import mixtures_of
from mxstudy.model.norm import Norm
from mxstudy.numerics.vector_ops import VectorCast, along_vector
from mxstudy.reader import ConfigError, require


class Read(NamedTuple):
    """A norm and the linear that reads it; for the norms of queries and keys, the linear that makes them."""

    norm: Norm
    linear: MXLinear


def norms_of(model: Decoder) -> dict[str, Read]:
    """Return {name: norm with its linear} of every norm of the decoder, in the order of its modules."""
    found: dict[str, Read] = {}
    for name, module in model.named_modules():
        if isinstance(module, NormLinear):
            found[f"{name}.norm"] = Read(module.norm, module)
        elif isinstance(module, Attention):
            for own in ("q_norm", "k_norm"):
                if (norm := getattr(module, own)) is not None:
                    found[f"{name}.{own}"] = Read(norm, module.wqkv)
    return found | {"norm": Read(model.norm, model.output)}


def apply_vector_settings(model: nn.Module, precision: config.Precision, compute: str) -> None:
    """Set the rounding of every norm and activation, given the current casts of the linears.

    Raises ConfigError for a setting that the model cannot take.
    """
    if not isinstance(model, Decoder):
        for name in ("gain", "vector_ops"):
            asked = getattr(precision, name)
            require(
                asked == getattr(config.Precision, name),
                f"precision.{name}: {asked} is for language models; students take student.{name}",
            )
        return
    norms = norms_of(model)
    if precision.gain is not None:
        check_gain(precision, norms)
    if precision.vector_ops == "bf16":
        check_op_by_op(model, norms, compute)
    for name, (norm, linear) in norms.items():
        norm.rounding = rounding_of(precision, name, norm, linear)
        norm.output = "op_by_op" if precision.vector_ops == "bf16" else "fused"
    for mlp in modules_of(model, FeedForward).values():
        exact = MLPS[mlp.kind].activation
        mlp.activation = OP_BY_OP[exact] if precision.vector_ops == "bf16" else exact


def check_gain(precision: config.Precision, norms: dict[str, Read]) -> None:
    """Raise ConfigError if the norms have no gains, or for mx if these are folded or no linear quantises its X."""
    require(
        all(norm.weight is not None for norm, _ in norms.values()),
        f"precision.gain: the norms have none to round to {precision.gain}; leave it out, or set norm.affine=true",
    )
    if precision.gain == "mx":
        require(
            not any(norm.fold_gain for norm, _ in norms.values()),
            "precision.gain: mx would be cast twice with a folded gain, alone and in the weight; take fp32 or bf16, or "
            "a norm that does not fold",
        )
        require(
            any(linear.gemms.forward_x is not None for _, linear in norms.values())
            or quantises_at_other_steps(precision),
            "precision.gain: mx is the cast of the forward's X, which no linear after a norm quantises; take fp32 or "
            "bf16",
        )


def quantises_at_other_steps(precision: config.Precision) -> bool:
    """Return whether the schedule has several rows, of which one has a recipe that quantises the forward's X."""
    return len(precision.schedule) > 1 and any(operand == "forward_x" for _, operand in casts_of(precision))


def check_op_by_op(model: Decoder, norms: dict[str, Read], compute: str) -> None:
    """Raise ConfigError if operations of the model cannot be rounded to bf16 one by one."""
    require(
        compute == "bf16",
        f"precision.vector_ops: bf16 is between GEMMs whose results are bf16, and train.compute is {compute}; make "
        "them equal",
    )
    require(
        not any(norm.fold_gain for norm, _ in norms.values()),
        "precision.vector_ops: bf16 rounds every operation of a norm, but with a folded gain the norm is fused with "
        "the linear; take fp32, or a norm that does not fold",
    )
    require(
        not mixtures_of(model),
        "precision.vector_ops: bf16 is for dense models, and a mixture of experts computes its norm and its router in "
        "FP32; take fp32",
    )


def rounding_of(precision: config.Precision, name: str, norm: Norm, linear: MXLinear) -> VectorCast | None:
    """Return how that norm rounds gain and bias, or None for the compute dtype. Raises ConfigError for a bad cast."""
    if precision.gain is None:
        return None
    if precision.gain != "mx":
        return VectorCast(precision.gain, away=precision.operand_pre_round)
    if (cast := linear.gemms.forward_x) is None:
        return None
    try:
        along_vector(cast)
    except ConfigError as error:
        raise ConfigError(f"precision.{error}") from None
    size, of = cast.block_size or 1, "precision.block_size"
    require(
        bool(cast.pad) or norm.size % size == 0,
        f"{of}: {size} does not divide {name}'s {norm.size} gains (precision.gain=mx); take another, or fill blocks up "
        "with zeros: precision.pad_blocks=true",
    )
    return VectorCast("mx", cast)


@contextmanager
def exact_vectors(model: Decoder) -> Iterator[None]:
    """Run without `precision.gain` and `precision.vector_ops` inside the `with` block, then restore them."""
    norms = [(norm, norm.rounding, norm.output) for norm, _ in norms_of(model).values()]
    mlps = [(mlp, mlp.activation) for mlp in modules_of(model, FeedForward).values()]
    try:
        for norm, _, _ in norms:
            norm.rounding, norm.output = None, "fused"
        for mlp, _ in mlps:
            mlp.activation = MLPS[mlp.kind].activation
        yield
    finally:
        for norm, rounding, output in norms:
            norm.rounding, norm.output = rounding, output
        for mlp, activation in mlps:
            mlp.activation = activation

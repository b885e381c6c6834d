"""A shadow pass over one sequence beside the training, to capture the GEMMs' operands or gradients in other formats.

It runs eagerly, even if the blocks are compiled, and uses `torch.autograd.grad`, so that `.grad` does not change. The
model is borrowed: the pass restores everything that it sets, also after an error. A probe measures after the optimiser
step, so the weights are those with which the next step begins; both passes of one measurement use the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxstudy.config.casts import Gemms
from mxstudy.model.backends import cast_by_kernels
from mxstudy.model.decoder import Block, Decoder
from mxstudy.model.fusable import Target, linears_in
from mxstudy.model.linear import MXLinear, Sources
from mxstudy.model.modules import modules_of
from mxstudy.model.moe import mixtures_of
from mxstudy.model.precision import token_block
from mxstudy.model.vector_settings import exact_vectors
from mxstudy.probes.base import TrainingSequence
from mxstudy.reader import require


@dataclass(frozen=True)
class Captured:
    """A linear, its arguments, and the gradient of its output [T, out] in the compute dtype."""

    linear: MXLinear
    inputs: tuple[Any, ...]
    dh_TO: Tensor

    @torch.no_grad()
    def sources(self) -> Sources:
        """Return the tensors that the operands are quantised from, with the same bits as in the linear."""
        return self.linear.sources(*self.inputs)


def whole_blocks(model: nn.Module, sequence: TrainingSequence) -> TrainingSequence:
    """Return the sequence cut to whole blocks if wgrad has blocks along the tokens; else all of it.

    Training cuts a whole micro-batch into blocks, so its sequences need not be multiples of a block. The dropped tokens
    are the last ones, which no earlier token sees. Raises ConfigError if the sequence is shorter than a block.
    """
    length = sequence[0].shape[1]
    block_size = check_sequence(model, length)
    tokens, targets = (part[:, : length // block_size * block_size] for part in sequence)
    return tokens, targets


def check_sequence(model: nn.Module, length: int) -> int:
    """Return the size of a block or transform along the tokens. Raise ConfigError if a sequence is shorter than it."""
    block_size = token_block(model)
    require(
        length >= block_size,
        f"train.sequence_length: {length} tokens are fewer than the {block_size} of one block or transform, and the "
        f"probes saturation and gradient_bias measure one sequence; make it {block_size} or more, "
        "or switch these probes off",
    )
    return block_size


def shadow_gradients(
    model: Decoder, sequence: TrainingSequence, gemms: Gemms | None = None, compute: torch.dtype | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean cross-entropy over the sequence, nats (0-dim), and its gradient by parameter, float32.

    `gemms`: formats of every linear, by default those of the plan; with others, norms and activations ignore the plan's
    roundings. `compute`: dtype, by default the model's.
    """
    parameters = dict(model.named_parameters())
    with borrowed(model, gemms, compute), exact_vectors(model) if gemms is not None else nullcontext():
        loss = sum_loss(model, sequence) / sequence[0].numel()
        gradients = torch.autograd.grad(loss, list(parameters.values()))
    return loss.detach(), dict(zip(parameters, gradients, strict=True))


def capture_linears(model: Decoder, sequence: TrainingSequence, tokens: int) -> dict[str, Captured]:
    """Return inputs and output gradients of every linear that quantises an operand, by the linear's name.

    The gradients are those of the summed loss divided by `tokens`.
    """
    linears = {name: m for name, m in modules_of(model, MXLinear).items() if any(m.gemms.casts())}
    seen: dict[str, tuple[tuple[Any, ...], Tensor]] = {}
    with borrowed(model):
        with ExitStack() as hooks:  # removed before the backward, in which checkpointed blocks run again
            for name, linear in linears.items():

                def keep(module: nn.Module, inputs: tuple[Any, ...], output: Tensor, name: str = name) -> None:
                    seen[name] = (inputs[0].detach(), *inputs[1:]), output

                hooks.callback(linear.register_forward_hook(keep).remove)
            loss = sum_loss(model, sequence) / tokens
        outputs = [output for _, output in seen.values()]
        gradients = torch.autograd.grad(loss, outputs) if outputs else ()
    return {
        name: Captured(linears[name], seen[name][0], dh.flatten(0, -2))
        for name, dh in zip(seen, gradients, strict=True)
    }


def sum_loss(model: Decoder, sequence: TrainingSequence) -> Tensor:
    tokens_BT, targets_BT = sequence
    return F.cross_entropy(model(tokens_BT).float().flatten(0, 1), targets_BT.flatten(), reduction="sum")


@contextmanager
def borrowed(model: Decoder, gemms: Gemms | None = None, compute: torch.dtype | None = None) -> Iterator[None]:
    """Make the model eager and unwatched, in the given formats and compute dtype, then restore it.

    On a GPU kernels make the operands with plain casts, but for experts, with the same bits as PyTorch.

    Compiled code stays valid: its guards check the objects that are restored, which are the same ones.
    """
    linears = linears_in(model)
    blocks = list(modules_of(model, Block).values())
    grouped = [mixture for mixture in mixtures_of(model).values() if mixture.is_grouped]
    of_linears = [(linear.gemms, linear.casts_by_kernel) for linear in linears]
    before = model.watchers, model.compute, of_linears, [block.fused for block in blocks]
    device = next(model.parameters()).device
    try:
        model.watchers, model.compute = (), compute or model.compute
        for linear in linears:
            linear.gemms = gemms or linear.gemms
        cast_by_kernels(linears, True, Target(model.compute, device))
        for block in blocks:
            block.fused = None  # it was built for the plan's formats
        for mixture in grouped:
            mixture.is_grouped = False  # the grouped GEMM does not take FP32
        with (
            torch.compiler.set_stance("force_eager"),
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.enable_grad(),
        ):
            yield
    finally:
        model.watchers, model.compute, plan, fused = before
        for linear, own in zip(linears, plan, strict=True):
            linear.gemms, linear.casts_by_kernel = own
        for block, settings in zip(blocks, fused, strict=True):
            block.fused = settings
        for mixture in grouped:
            mixture.is_grouped = True

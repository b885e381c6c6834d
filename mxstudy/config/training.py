"""The schema of training: optimizer, schedule, steps, validation, checkpoints."""

from __future__ import annotations

import math
from typing import Literal

from mxstudy.reader import Unbounded, cosmetic, require, schema

MOST_STEPS = 10**9
MOST_TOKENS = 2**31  # a step; 300 times the largest batch of the papers


@schema
class AdamW:
    kind: Literal["adamw"] = "adamw"
    lr: float  # learning rate at its peak
    betas: tuple[float, float] = (0.9, 0.95)  # decay of the two moments
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.1  # shrinks weights by lr times this a step
    max_grad_norm: Unbounded = Unbounded(1.0)  # gradients are scaled down to this norm; inf: never

    def __post_init__(self) -> None:
        require(0 < self.lr < math.inf, f"lr: must be positive and finite, not {self.lr}")
        for beta in self.betas:
            require(0 <= beta < 1, f"betas: must lie in 0 .. 1, below 1, not {list(self.betas)}")
        for name in ("eps", "weight_decay"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"{name}: must be finite and not negative, not {value}")
        require(self.max_grad_norm > 0, f"max_grad_norm: must be positive (inf: none), not {self.max_grad_norm}")


@schema
class Schedule:
    """Learning rate as a fraction of lr: linear warm-up from `initial_ratio`, then the shape `kind` to `final_ratio`.

    `warmup_steps`: the length of the warm-up in steps; null: `warmup_fraction` of all steps. wsd decays over the last
    `decay_fraction` of the steps; cosine and linear decay from the end of the warm-up on.
    """

    kind: Literal["cosine", "linear", "wsd", "constant"]
    warmup_fraction: float = 0.1  # the length of the warm-up over that of the run, unless `warmup_steps` gives it
    initial_ratio: float = 0.0
    final_ratio: float = 0.01
    decay_fraction: float = 0.2  # the length of wsd's decay over that of the run
    warmup_steps: int | None = None

    def __post_init__(self) -> None:
        if self.warmup_steps is not None:
            require(self.warmup_steps > 0, f"warmup_steps: must be positive or null, not {self.warmup_steps}")
            require(
                self.warmup_fraction == 0.1,
                f"warmup_fraction: {self.warmup_fraction} is set beside warmup_steps={self.warmup_steps}; give one",
            )
        for name in ("warmup_fraction", "initial_ratio", "final_ratio", "decay_fraction"):
            require(0 <= getattr(self, name) <= 1, f"{name}: must lie in 0..1, not {getattr(self, name)}")
        if self.kind != "wsd":
            require(self.decay_fraction == 0.2, f"decay_fraction: only for wsd, not for {self.kind}; leave it out")
        if self.kind == "constant":
            require(self.final_ratio == 0.01, "final_ratio: a constant schedule does not decay; leave it out")
        if self.warmup_fraction == 0:
            require(self.initial_ratio == 0, "initial_ratio: there is no warm-up (warmup_fraction is 0); leave it out")
        require(
            self.kind != "wsd" or self.warmup_steps is not None or self.warmup_fraction + self.decay_fraction <= 1,
            "decay_fraction: warm-up and decay together are longer than the run; lower it or warmup_fraction",
        )

    def warmup(self, steps: int) -> int:
        """Return the number of warm-up steps in a run of `steps` steps."""
        return round(self.warmup_fraction * steps) if self.warmup_steps is None else self.warmup_steps

    def decay(self, steps: int) -> int:
        """Return the number of steps over which wsd decays, at the end of a run of `steps` steps."""
        return round(self.decay_fraction * steps)

    def check_steps(self, steps: int) -> None:
        """Raise ConfigError, with the full key, if a run of `steps` steps is too short for `warmup_steps`."""
        if self.warmup_steps is not None:
            decay = self.decay(steps) if self.kind == "wsd" else 0
            require(
                self.warmup_steps + decay < steps,
                f"schedule.warmup_steps: {self.warmup_steps} steps of warm-up and {decay} of decay do not fit into "
                f"{steps} steps; lower it, or set it to null for schedule.warmup_fraction",
            )


@schema
class Validation:
    """Loss on `sequences` windows spread over the validation split: at the end, and every `every_steps` (0: never)."""

    sequences: int = 64
    every_steps: int = cosmetic(0)

    def __post_init__(self) -> None:
        require(self.sequences >= 1, f"sequences: must be at least 1, not {self.sequences}")
        require(self.every_steps >= 0, f"every_steps: must not be negative, not {self.every_steps}")


@schema
class Checkpoint:
    """Checkpoints every `every_steps` steps; the newest `keep_last` are kept.

    With 0 steps there is one at the end, on a signal and on divergence alone.
    """

    every_steps: int = cosmetic(0)
    keep_last: int = cosmetic(2)  # the newest checkpoints that are kept

    def __post_init__(self) -> None:
        require(self.every_steps >= 0, f"every_steps: must not be negative, not {self.every_steps}")
        require(self.keep_last >= 1, f"keep_last: must be at least 1, not {self.keep_last}")


@schema
class Train:
    """`batch_size`: sequences per step over all ranks; `micro_batch_size`: per pass of a rank (null: all of them).

    `all_gather`: how ranks gather the blocks' weights: in `compute`, or mx: as the codes and scales that the GEMMs
    read, with the same numbers, but only without `compile`. `recompute_mlp`: this many of the first blocks do not keep
    the product of their MLP's first linear, their largest tensor, but compute it again in the backward, with the same
    numbers. Every block saves the same memory for the same time, so choose as many blocks as the memory requires.
    `verify`: compare the shards with their sha256 before the first step.
    """

    steps: int  # updates of the weights
    batch_size: int
    sequence_length: int  # of every sample
    micro_batch_size: int | None = None
    compute: Literal["bf16", "fp32"] = "bf16"  # dtype of unquantised operands and results
    # auto takes a GPU if there is one; the device type that it resolves to is hashed instead
    device: Literal["auto", "cpu", "cuda"] = cosmetic("auto")
    compile: bool = False  # compile each block by Inductor
    activation_checkpointing: Literal["none", "full"] = "none"  # full keeps a block's input and recomputes the rest
    recompute_mlp: int = cosmetic(0)
    deterministic: bool = False  # the same bits when it is run or resumed again on the same device
    all_gather: Literal["compute", "mx"] = cosmetic("compute")
    verify: bool = cosmetic(True)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "sequence_length"):
            require(getattr(self, name) > 0, f"{name}: must be positive, not {getattr(self, name)}")
        require(self.steps <= MOST_STEPS, f"steps: must be at most {MOST_STEPS:,}, not {self.steps:,}")
        tokens = self.batch_size * self.sequence_length
        require(
            tokens <= MOST_TOKENS,
            f"batch_size: {self.batch_size:,} sequences are {tokens:,} tokens a step; must be at most {MOST_TOKENS:,}",
        )
        micro = self.micro_batch_size
        require(
            micro is None or (micro > 0 and self.batch_size % micro == 0),
            f"micro_batch_size: batch_size {self.batch_size} does not divide into micro-batches of {micro}",
        )
        require(self.recompute_mlp >= 0, f"recompute_mlp: must not be negative, not {self.recompute_mlp}")
        require(
            not self.recompute_mlp or self.activation_checkpointing == "none",
            "recompute_mlp: activation_checkpointing=full computes whole blocks again; leave one of them out",
        )
        if self.all_gather == "mx":
            require(
                not self.recompute_mlp,
                "recompute_mlp: the backward would need the weight's codes for the forward, but all_gather=mx gathers "
                "only those for dgrad then; set it to 0, or take all_gather=compute",
            )
            require(
                self.activation_checkpointing == "none",
                "all_gather: a recomputed forward would need the codes of both directions at once, more bytes than in "
                "bf16; take mx with activation_checkpointing=none, or compute",
            )
            require(
                not self.compile,
                "all_gather: mx gives a weight other codes in the backward than in the forward, which the compiler "
                "does not support; take mx with compile=false, or compute",
            )

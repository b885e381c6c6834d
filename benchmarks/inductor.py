"""Compile blocks as a user of torch does: with Inductor's own settings, or recomputing all but GEMMs and attention.

Inductor's own settings drop roundings: between operations that it fuses, a bf16 number stays in FP32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mxstudy.compat.torch_compiler import entries_that_drop_roundings

aten = torch.ops.aten
# The results of GEMMs and of the attention, which are kept for the backward where the rest is recomputed.
PRODUCTS = {
    aten.mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}


class OwnSettings:
    """Inductor's own settings.

    Raises RuntimeError if `configure_torch` has changed them, because that cannot be undone.
    """

    def __init__(self) -> None:
        import torch._inductor.config as inductor
        import torch.compiler.config as compiler
        from torch._inductor.codegen.cpp import CppKernel

        if inductor.emulate_precision_casts:
            raise RuntimeError("Inductor keeps roundings already: take its own settings before configure_torch")
        self.options: dict[str, Any] = {"emulate_precision_casts": inductor.emulate_precision_casts}
        if hasattr(inductor, "eager_numerics"):
            self.options["eager_numerics.division_rounding"] = inductor.eager_numerics.division_rounding
        self.tag, self.conversions = compiler.cache_key_tag, CppKernel.cache_dtype_convert
        self.passes = entries_that_drop_roundings()

    def compile(self, block: nn.Module) -> None:
        block.compile(fullgraph=True, options=self.options)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Compile with these settings within the `with` block, and restore the settings from before."""
        import torch.compiler.config as compiler
        from torch._inductor.codegen.cpp import CppKernel

        tag, conversions = compiler.cache_key_tag, CppKernel.cache_dtype_convert
        compiler.cache_key_tag, CppKernel.cache_dtype_convert = self.tag, self.conversions  # type: ignore[method-assign]
        added = [[entry for entry in dropping if entry not in entries] for entries, dropping in self.passes]
        for (entries, _), own in zip(self.passes, added, strict=True):
            entries += own
        try:
            yield
        finally:
            compiler.cache_key_tag, CppKernel.cache_dtype_convert = tag, conversions  # type: ignore[method-assign]
            for (entries, _), own in zip(self.passes, added, strict=True):
                entries[:] = [entry for entry in entries if entry not in own]


def recompute_between_products(block: nn.Module) -> None:
    """Keep for the backward only the results of GEMMs and attention. Call it before the block is compiled."""
    forward, contexts = block.forward, partial(create_selective_checkpoint_contexts, keep_products)
    block.forward = lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts)


def keep_products(_: Any, operation: Any, *inputs: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE

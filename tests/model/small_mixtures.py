"""Make small decoders whose MLPs are mixtures of experts, and return what their forward and backward give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mxstudy import config
from mxstudy.config.casts import OPERANDS
from mxstudy.model.decoder import Decoder
from mxstudy.model.moe import mixtures_of
from mxstudy.model.precision import DTYPES, apply_precision
from mxstudy.reader import read

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DENSE = config.Decoder(hidden_size=64, ffn_size=96, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=128)
MOE = replace(DENSE, mlp="moe", moe=config.MoE(num_experts=6, top_k=2, num_shared=1))
ONE = replace(DENSE, mlp="moe", moe=config.MoE(num_experts=1, top_k=1, gate="softmax", balance="none"))
NORMS = {
    "rmsnorm": config.RMSNorm(),
    "mxnorm": config.MXNorm(p=2.0),
    "folded": config.RMSNorm(fold_gain=True),
    "layernorm": config.LayerNorm(bias=True),
}
NVFP4 = {"format": "NVFP4", "scale": "E4M3", "block_size": 16, "outer_scale": "tensor", "chain": "training"}
BOUND, ROW = ({**NVFP4, "outer_scale": outer} for outer in ("bound", "row"))
WHOLE = dict.fromkeys(OPERANDS, NVFP4)
OUTER_SCALES = {  # recipes of the linears after a norm, and of all others, where a bound is each row's own scale
    "bounds": (WHOLE | {"forward_x": BOUND, "wgrad_x": BOUND}, WHOLE | {"forward_x": BOUND}),
    "rows": (WHOLE | dict.fromkeys(("forward_x", "forward_w", "dgrad_dh", "dgrad_w"), ROW),) * 2,
}


def plan(row: str, backend: str = "auto", **changed: Any) -> config.Precision:
    return config.Precision(schedule=(config.PrecisionRow(plan={"layers.*": row}),), backend=backend, **changed)


def outer_scaled(name: str) -> config.Precision:
    """Return NVFP4 with the outer scales of that row of OUTER_SCALES."""
    after_norm, others = OUTER_SCALES[name]
    patterns = {"layers.*": "others", "layers.*.wqkv": "after_norm", "layers.*.w13": "after_norm"}
    recipes = {"after_norm": after_norm, "others": others}
    return read(config.Precision, {"schedule": [{"plan": patterns}], "recipes": recipes})


def build(
    model: config.Decoder, norm: str, row: str, device: torch.device = CPU, compiled: bool = False, **changed: Any
) -> Decoder:
    precision, compute = plan(row, **changed), "fp32" if row == "fp32" else "bf16"
    decoder = Decoder(model, NORMS[norm], precision.settings, DTYPES[compute])
    decoder.init_weights(0)
    apply_precision(decoder, precision, 0, compute, device, compiled=compiled)
    for module in decoder.modules():
        if hasattr(module, "fold_gain") and getattr(module, "weight", None) is not None:
            with torch.no_grad():  # with gains of 1 a fold would do nothing
                module.weight += 0.1 * torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(1))
    return decoder


def tokens(rows: int = 2) -> Tensor:
    return torch.randint(0, 128, (rows, 64), generator=torch.Generator().manual_seed(3))


def gradients(model: Decoder) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(tokens())
    logits.float().square().sum().backward()
    return logits, {name: weight.grad.clone() for name, weight in model.named_parameters()}


def group(model: Decoder, is_grouped: bool) -> Decoder:
    for mixture in mixtures_of(model).values():
        mixture.is_grouped = is_grouped
    return model

"""Make a small decoder, and apply a plan to it."""

from __future__ import annotations

import torch

from mxstudy import config
from mxstudy.config import BlockCast
from mxstudy.model import Decoder
from mxstudy.model.precision import apply_precision

MODEL = config.Decoder(hidden_size=64, ffn_size=96, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=50)
RMSNORM = config.RMSNorm()


def applied(plan, model=MODEL, step=0, compute="bf16", norm=RMSNORM, device="cpu", **settings):
    decoder = Decoder(model, norm, BlockCast(), torch.bfloat16)
    rows = plan if isinstance(plan, tuple) else (config.PrecisionRow(plan=plan),)
    precision = config.Precision(schedule=rows, **settings)
    return decoder, apply_precision(decoder, precision, step, compute, torch.device(device))

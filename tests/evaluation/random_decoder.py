"""Make a decoder with random weights and with gains that matter."""

from __future__ import annotations

import torch

from mxstudy import config
from mxstudy.model.decoder import Decoder
from mxstudy.numerics.cast import BlockCast


def random_decoder(model: config.Decoder, norm: config.Norm, seed: int) -> Decoder:
    """Return an FP32 model with weights drawn by `seed`, gains (around 1) and biases (around 0) by the next seed."""
    built = Decoder(model, norm, BlockCast(), torch.float32)
    built.init_weights(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.copy_(("norm" in name) + 0.3 * torch.randn(parameter.shape, generator=generator))
    return built

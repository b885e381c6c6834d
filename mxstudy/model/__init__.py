"""The decoder, and the norms and linear layers whose GEMMs run in MX formats."""

from mxstudy.model.decoder import Decoder
from mxstudy.model.linear import MXLinear, NormLinear
from mxstudy.model.norm import LayerNorm, MXNorm, PostRoundMXNorm, RMSNorm
from mxstudy.numerics.norm_linear import rms_coefficient

__all__ = [
    "Decoder",
    "LayerNorm",
    "MXLinear",
    "MXNorm",
    "NormLinear",
    "PostRoundMXNorm",
    "RMSNorm",
    "rms_coefficient",
]

"""Models built from norms and linears whose GEMMs run in MX formats."""

from mxstudy.model.decoder import Decoder
from mxstudy.model.linear import MXLinear, NormLinear
from mxstudy.model.norm import LayerNorm, MXNorm, PostRoundMXNorm, RMSNorm
from mxstudy.model.residual_mlp import ResidualMLP
from mxstudy.model.stacks import stack
from mxstudy.model.teacher import build_teacher
from mxstudy.numerics.norm import rms_coefficient

__all__ = [
    "Decoder",
    "LayerNorm",
    "MXLinear",
    "MXNorm",
    "NormLinear",
    "PostRoundMXNorm",
    "RMSNorm",
    "ResidualMLP",
    "build_teacher",
    "rms_coefficient",
    "stack",
]

"""MX numerics: formats, the block cast, the three GEMMs of a linear layer, norms from block scales."""

from mxstudy.numerics.cast import BlockCast, Quantized, fake_quantize, quantize
from mxstudy.numerics.formats import FORMATS

__all__ = ["FORMATS", "BlockCast", "Quantized", "fake_quantize", "quantize"]

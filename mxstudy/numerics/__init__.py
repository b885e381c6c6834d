"""The reference numerics of MX: formats, the block cast, a linear layer's three GEMMs, norms from block absmax."""

from mxstudy.numerics.cast import BlockCast, fake_quantize, quantize
from mxstudy.numerics.formats import FORMATS
from mxstudy.numerics.quantized import Quantized

__all__ = ["FORMATS", "BlockCast", "Quantized", "fake_quantize", "quantize"]

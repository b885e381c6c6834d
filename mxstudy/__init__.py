"""mxstudy: a laboratory for training language models in microscaling (MX) formats.

As a library: `mxstudy.quantize(x, "E4M3")`, `mxstudy.MXNorm(256, p=2.0)`, `mxstudy.run("+experiment=quickstart")`,
`mxstudy.results.load(folders, "metrics")`. A name is imported when it is first used: `import mxstudy` loads no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxstudy import config as config
    from mxstudy import model as model
    from mxstudy import numerics as numerics
    from mxstudy import results as results
    from mxstudy.library import build_model as build_model
    from mxstudy.library import compose as compose
    from mxstudy.library import run as run
    from mxstudy.model import Decoder as Decoder
    from mxstudy.model import LayerNorm as LayerNorm
    from mxstudy.model import MXLinear as MXLinear
    from mxstudy.model import MXNorm as MXNorm
    from mxstudy.model import NormLinear as NormLinear
    from mxstudy.model import PostRoundMXNorm as PostRoundMXNorm
    from mxstudy.model import RMSNorm as RMSNorm
    from mxstudy.model import rms_coefficient as rms_coefficient
    from mxstudy.numerics import FORMATS as FORMATS
    from mxstudy.numerics import fake_quantize as fake_quantize
    from mxstudy.numerics import quantize as quantize
    from mxstudy.probes import spike_score as spike_score

PACKAGES = ("config", "model", "numerics", "results")
NAMES = {
    "library": ("build_model", "compose", "run"),
    "model": (
        *("Decoder", "LayerNorm", "MXLinear", "MXNorm", "NormLinear", "PostRoundMXNorm", "RMSNorm"),
        "rms_coefficient",
    ),
    "numerics": ("FORMATS", "fake_quantize", "quantize"),
    "probes": ("spike_score",),
}
PLACES = {name: place for place, names in NAMES.items() for name in names}
__all__ = sorted((*PACKAGES, *PLACES))


def __getattr__(name: str) -> Any:
    if name in PACKAGES:
        return importlib.import_module(f"mxstudy.{name}")
    if name in PLACES:
        return getattr(importlib.import_module(f"mxstudy.{PLACES[name]}"), name)
    raise AttributeError(f"module 'mxstudy' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

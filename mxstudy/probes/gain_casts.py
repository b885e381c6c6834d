"""Say which casts of gains the probe `last_bin` can measure. A launch checks this, so nothing slow is imported here."""

from __future__ import annotations

from mxstudy.config.casts import Cast
from mxstudy.config.settings import written
from mxstudy.reader import require

MEASURED = {"scale": "E8M0", "headroom": 1.0, "candidates": (1.0,)}  # fields of the casts that `last_bins` knows


def check_gain_cast(name: str, cast: Cast, key: str) -> None:
    """Raise ConfigError if the probe cannot measure the gains of that norm or linear, which the run rounds by `cast`.

    `key`: the key that is mx.
    """
    for field, known in MEASURED.items():
        own = getattr(cast, field)
        require(
            own == known,
            f"probe.last_bin.every_steps: {key}=mx rounds the gains of {name} with {field}={written(own)}, but the "
            f"probe measures casts with {field}={written(known)} alone; set it to 0, or {key} to bf16",
        )

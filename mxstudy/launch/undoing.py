"""Find the overrides that undo what an experiment or a sweep sets of the precision.

Such an override has an effect although its value is a default. Any other override with a default may have none
(`mxstudy.config.settings`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from mxstudy.compat.hydra import Override
from mxstudy.config import Precision
from mxstudy.config.casts import SETTINGS
from mxstudy.config.settings import OF_THE_PLAN

DEFAULTS = {f"precision.{name}": getattr(Precision, name) for name in (*SETTINGS.values(), *OF_THE_PLAN)}


def undoing(
    overrides: Collection[Override],
    values: Collection[Override],
    config: Mapping[str, Any],
    swept: Collection[str],
    composed: Callable[[tuple[str, ...]], Mapping[str, Any]],
) -> frozenset[str]:
    """Return the lines that set a setting of the precision to its default where it would have another value.

    `values`: the overrides of single values, on which no setting depends. `config`: the job's. `swept`: the keys that
    the sweep's file sets. `composed`: returns the config of other lines.
    """
    named = {override.key: override.line for override in overrides if has_default(config, override.key)}
    if not named:
        return frozenset()
    others = composed(tuple(o.line for o in overrides if o not in values and o.key not in named))
    return frozenset(line for key, line in named.items() if key in swept or not has_default(others, key))


def has_default(config: Mapping[str, Any], key: str) -> bool:
    """Return whether the key is a setting of the precision that has its default in this config."""
    precision, name = config.get("precision") or {}, key.removeprefix("precision.")
    return key in DEFAULTS and name in precision and bool(precision[name] == DEFAULTS[key])

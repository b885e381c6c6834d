"""The table of recipes that a precision plan can name: the cast of each operand of a linear's three GEMMs."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from mxstudy.config.casts import OPERANDS, BlockCast, Cast, Gemms
from mxstudy.reader import ConfigError, suggest


def formats(*names: str | None) -> Gemms:
    """Return the recipe of MX casts with these element formats, in the order of OPERANDS, all other fields open."""
    casts = (name and Cast(format=name) for name in names)
    return Gemms(**dict(zip(OPERANDS, casts, strict=True)))  # type: ignore[arg-type]


def tensor_scaled(name: str) -> Cast:
    return Cast(format=name, scale="none", outer_scale="tensor")


E4M3, E5M2, E3M2, E2M3, E2M1 = "E4M3", "E5M2", "E3M2", "E2M3", "E2M1"

# The recipes that a plan may name. Add a recipe as a file of conf/precision with `recipes`, not as a row here.
#                              forward X  W     dgrad dH  W     wgrad dH  X
PRECISIONS = {
    "fp32": Gemms(),
    "bf16": Gemms(),
    "mxfp8": formats(E4M3, E4M3, E4M3, E4M3, E4M3, E4M3),
    "mxfp8_e5m2_grad": formats(E4M3, E4M3, E5M2, E4M3, E5M2, E4M3),  # MXNorm paper; HYBRID in Transformer Engine
    "mx_mix": formats(E4M3, E4M3, E5M2, E5M2, E5M2, E4M3),  # instability paper
    "mxfp8_forward_only": formats(E4M3, E4M3, None, None, None, None),
    "mxfp8_e5m2_forward_only": formats(E5M2, E5M2, None, None, None, None),
    "mxfp8_backward_only": formats(None, None, E4M3, E4M3, E4M3, E4M3),
    "mxfp8_bf16_act_fwd": formats(None, E4M3, E4M3, E4M3, E4M3, None),
    "mxfp8_bf16_act": formats(None, E4M3, None, E4M3, None, None),
    "mxfp8_e5m2_bf16_act": formats(None, E5M2, None, E5M2, None, None),
    "mxfp6_e2m3_bf16_act": formats(None, E2M3, None, E2M3, None, None),
    "mxfp8_bf16_weight": formats(E4M3, None, E4M3, None, E4M3, E4M3),
    "mxfp8_bf16_weight_fwd": formats(E4M3, None, E4M3, E4M3, E4M3, E4M3),
    "mxfp8_act_only": formats(E4M3, None, None, None, None, E4M3),  # only weights: mxfp8_bf16_act
    "mxfp8_e5m2": formats(E5M2, E5M2, E5M2, E5M2, E5M2, E5M2),
    "mxfp8_e5m2_weight": formats(E4M3, E5M2, E4M3, E5M2, E4M3, E4M3),
    "mxfp8_e5m2_act": formats(E5M2, E4M3, E4M3, E4M3, E4M3, E5M2),
    "mxfp8_e5m2_act_grad": formats(E5M2, E4M3, E5M2, E4M3, E5M2, E5M2),  # instability paper: only the weights in E4M3
    "mxfp6_e2m3": formats(E2M3, E2M3, E2M3, E2M3, E2M3, E2M3),
    "mxfp6_e3m2": formats(E3M2, E3M2, E3M2, E3M2, E3M2, E3M2),
    "mxfp4": formats(E2M1, E2M1, E2M1, E2M1, E2M1, E2M1),
    "fp8_tensor": Gemms(  # the MXFP8 recipe's baseline
        forward_x=tensor_scaled(E4M3),
        forward_w=tensor_scaled(E4M3),
        dgrad_dh=tensor_scaled(E5M2),
        dgrad_w=tensor_scaled(E4M3),
        wgrad_dh=tensor_scaled(E5M2),
        wgrad_x=tensor_scaled(E4M3),
    ),
    "nvfp4_forward_only": Gemms(
        forward_x=Cast(format="NVFP4", scale="E4M3", outer_scale="bound"),
        forward_w=Cast(format="NVFP4", scale="E4M3", outer_scale="tensor"),
    ),
}

# Rows that enter a fingerprint by name, because they are older than recipes as values. A later row is hashed by its
# computation, so do not add its name here.
NAMED = frozenset(
    [
        "fp32",
        "bf16",
        "mxfp8",
        "mxfp8_e5m2_grad",
        "mx_mix",
        "mxfp8_forward_only",
        "mxfp8_e5m2_forward_only",
        "mxfp8_backward_only",
        "mxfp8_bf16_act_fwd",
        "mxfp8_bf16_act",
        "mxfp8_e5m2_bf16_act",
        "mxfp6_e2m3_bf16_act",
        "mxfp8_bf16_weight",
        "mxfp8_bf16_weight_fwd",
        "mxfp8_act_only",
        "mxfp8_e5m2",
        "mxfp8_e5m2_weight",
        "mxfp8_e5m2_act",
        "mxfp8_e5m2_act_grad",
        "mxfp6_e2m3",
        "mxfp6_e3m2",
        "mxfp4",
        "fp8_tensor",
        "nvfp4_forward_only",
    ]
)


def look_up_recipe(name: str, recipes: Mapping[str, Gemms]) -> Gemms:
    """Return the recipe of that name, from `recipes` or PRECISIONS. Raises ConfigError with the nearest name."""
    rows = {**PRECISIONS, **recipes}
    if name not in rows:
        raise ConfigError(f"{name!r} is not a choice; {suggest(name, rows)}")
    return rows[name]


@functools.cache
def named_by_casts(settings: BlockCast) -> Mapping[Gemms, str]:
    """Return the names of NAMED by their casts, filled with the settings; the first name of equal ones."""
    return {PRECISIONS[name].filled(settings): name for name in sorted(NAMED, reverse=True)}

"""Name the arms of the sweeps fp4_* by the fields of their recipes, which are columns of the runs' configs."""

from __future__ import annotations

from analysis.units import PLAN, Arm

TRANSFORM = "wgrad_transform"
BF16: Arm = {PLAN: "bf16"}
MX, NV = "mxfp4_parts", "nvfp4_parts"
SCALES = {"MX": MX, "NV": NV}
GEMMS = {"F": ("forward_x", "forward_w"), "D": ("dgrad_dh", "dgrad_w"), "W": ("wgrad_dh", "wgrad_x")}


def arm(recipe: str, **fields: object) -> Arm:
    """Return the arm of that recipe whose runs have these fields, `operand__field`, in their configs."""
    own = {f"config.precision.recipes.{recipe}.{name.replace('__', '.')}": value for name, value in fields.items()}
    return {PLAN: recipe} | own


def of_gemms(quantised: str, fmt: str = "E2M1") -> dict[str, object]:
    """Return the fields that say which GEMMs are quantised, as in 'FD': forward and dgrad."""
    return {f"{name}__format": fmt if gemm in quantised else None for gemm, names in GEMMS.items() for name in names}


def gradients(rounding: str, headroom: float = 1.0, **more: object) -> dict[str, object]:
    """Return the fields of the output gradient's two casts."""
    fields = {"rounding": rounding, "headroom": headroom} | more
    return {f"{name}__{field}": value for name in ("dgrad_dh", "wgrad_dh") for field, value in fields.items()}


def transform(
    size: int | None, signs: str | None = "none", vector: int | None = None, after: bool | None = False
) -> dict[str, object]:
    """Return the fields of wgrad's Hadamard transform. `vector` is the first of its written signs."""
    fields = {"size": size, "signs": signs, "vector__0": vector, "signs_after": after}
    return {f"{TRANSFORM}__{field}": value for field, value in fields.items()}


NONE, PLUS = transform(None, None, after=None), transform(16)
SIGNS = {
    "none": NONE,
    "all +1": PLUS,
    "one vector": transform(16, vector=1),
    "by step": transform(16, "step"),
    "by call": transform(16, "call"),
    "by call, after": transform(16, "call", after=True),
}
N, S = gradients("even", 0.75), gradients("stochastic", 0.75)
CLIPPING = {"floor": (None, 1.0), "floor, 3/4": (None, 0.75), "ceil": ("ceil", 1.0)}  # {name: scale rule, headroom}
HORIZONS = {"600 steps": 600, "2400 steps": 2400}
SIXTEEN_OF_17 = 16 / 17

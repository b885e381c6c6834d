"""The schema of a precision: which linears run in which formats, from which step on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from mxstudy.config.casts import BlockCast, Gemms
from mxstudy.config.recipes import NAMED, PRECISIONS, look_up_recipe, named_by_casts
from mxstudy.reader import ConfigError, changed, plain, require, schema

EARLIER_BACKENDS = {"joined": "fused"}  # {name in stored configs: name of now}; both have the same fingerprint
BLOCKS = "layers.*"  # the pattern of a plan that matches the linears of every block


@schema
class PrecisionRow:
    """The recipe of each linear from step `from_step` on, by a pattern of its module name.

    A recipe is one of the config's `recipes`, or a row of PRECISIONS. If several patterns match a linear, the last one
    wins; a linear that no pattern matches runs in `train.compute`.
    """

    from_step: int = 0  # the step from which the plan holds
    plan: dict[str, str]  # from patterns of module names to the recipes of the matching linears


@schema
class Precision:
    """The recipe of each linear, and the settings for the fields that a recipe leaves open.

    `recipes`: the config's own recipes, by the names that the plan uses: the cast of each operand, and the transform of
    each GEMM. `operand_pre_round`: round operands to bf16, ties away from zero, before they are quantised
    (microxcaling). `scale_rule`: code_bump is floor with the "bump of the exponent" of the instability paper's public
    code, which raises the scales of wrong elements (`mxstudy.numerics.scales.code_bump`); rceil raises the right ones.
    `pad_blocks`: fill a block that the end of an axis leaves incomplete with zeros (microxcaling); if false, sizes must
    be multiples of `block_size`. An operand that fixes a setting keeps its own value, and a setting that no operand
    uses is refused (`mxstudy.config.settings`).

    `backend`: reference computes module by module in PyTorch; fused uses fused kernels; native uses the hardware's MX
    GEMM, compute capability 10.0 (SM100) and later. auto takes the fastest that each block supports; emulated is auto
    without native; joined is an earlier name of fused. An explicit backend that is not available is an error.
    `head`: the output linear takes the recipe that the plan gives all blocks (pattern `layers.*`). `skip_blocks`: this
    many of the first and of the last blocks, or [first, last], stay in `train.compute`, whatever the plan says; tail:
    the number of last blocks nearest to 15 % of the linears, at least one.

    `gain`: how a language model's norms round their gains and biases: null keeps them in `train.compute`; mx is the
    cast of the forward's X of the linear that reads the norm, along the vector (of queries and keys: that of the linear
    that makes them); a norm whose reader quantises no X keeps `train.compute`. `vector_ops`: fp32 rounds the result of
    a norm or an activation once; bf16 rounds each of their operations, GELU by its tanh form, as microxcaling does.
    """

    schedule: tuple[PrecisionRow, ...]
    block_size: Literal[16, 32, 64] = 32  # elements that share a scale
    scale_rule: Literal["floor", "ceil", "rceil", "even", "code_bump"] = "rceil"  # how scales are rounded
    rounding: Literal["even", "away", "stochastic"] = "even"  # of elements: even and away decide where a half goes
    operand_pre_round: bool = False
    pad_blocks: bool = False
    backend: Literal["auto", "emulated", "reference", "fused", "joined", "native"] = "auto"  # what computes a block
    head: bool = False
    skip_blocks: int | tuple[int, int] | Literal["tail"] = 0
    gain: Literal["fp32", "bf16", "mx"] | None = None
    vector_ops: Literal["fp32", "bf16"] = "fp32"
    recipes: dict[str, Gemms] = field(default_factory=dict)

    def __post_init__(self) -> None:
        starts = [row.from_step for row in self.schedule]
        require(
            starts[:1] == [0] and starts == sorted(set(starts)),
            f"schedule: rows must start at step 0 and ascend, not {starts}",
        )
        require(
            not self.head or all(BLOCKS in row.plan for row in self.schedule),
            f"head: takes the recipe of the plan's pattern {BLOCKS!r}, which is missing; use a pattern 'output'",
        )
        ends = self.skip_blocks if isinstance(self.skip_blocks, tuple) else (self.skip_blocks,)
        require(
            all(end == "tail" or end >= 0 for end in ends),
            f"skip_blocks: must not be negative, not {plain(self.skip_blocks)}",
        )
        require(len(set(ends)) == len(ends), f"skip_blocks: write {ends[0]} instead of {plain(self.skip_blocks)}")
        named = {name for row in self.schedule for name in row.plan.values()}
        for name in self.recipes:
            require(name not in PRECISIONS, f"recipes.{name}: is a built-in recipe's name; choose another name")
            require(name in named, f"recipes.{name}: no plan of the schedule uses it; use it, or leave it out")

    def recipe(self, name: str) -> Gemms:
        """Return the recipe of that name. Raises ConfigError with the nearest name if there is none."""
        return look_up_recipe(name, self.recipes)

    def filled(self, name: str) -> Gemms:
        """Return the recipe of that name with its open fields filled from the settings. Raises ConfigError."""
        recipe = self.recipe(name)
        try:
            return recipe.filled(self.settings)
        except ConfigError as error:
            raise ConfigError(f"recipe {name}, {error}") from None

    def with_plan(self, plan: dict[str, str]) -> Precision:
        """Return the same precision with this plan from the first step on, and those recipes that it uses."""
        recipes = {name: gemms for name, gemms in self.recipes.items() if name in plan.values()}
        return changed(self, schedule=(PrecisionRow(plan=plan),), recipes=recipes)

    @property
    def settings(self) -> BlockCast:
        """Return the values that fill the fields that recipes leave open."""
        return BlockCast(self.block_size, self.scale_rule, self.rounding, self.operand_pre_round, self.pad_blocks)

    def canonical(self) -> Mapping[str, Any]:
        """Return {recipe name: what a fingerprint hashes in its place}, a recipe or a name of NAMED.

        A recipe enters as its casts, filled with the settings. A recipe equal to a row of NAMED enters as that row's
        name, and names of NAMED themselves are left out.
        """
        others = sorted({name for row in self.schedule for name in row.plan.values()} - NAMED)
        named_rows = named_by_casts(self.settings) if others else {}
        canonical: dict[str, Any] = {}
        for name in others:
            try:
                gemms = self.filled(name)
            except ConfigError:  # which is raised again when the plan is applied
                continue
            canonical[name] = named_rows.get(gemms, gemms)
        return canonical

"""The linears that each pattern of a plan is for, and the blocks at the ends that stay unquantised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Literal

from mxstudy.config import Precision, PrecisionRow
from mxstudy.config.casts import Gemms
from mxstudy.config.precision_plan import BLOCKS
from mxstudy.config.settings import written
from mxstudy.reader import ConfigError, require, suggest

HEAD = "output"  # the module's name in the decoder
TAIL = Fraction(15, 100)  # of the linears stay in bf16: Transformer Engine's advice for NVFP4 (arXiv 2509.25149)


def plan_of(precision: Precision, row: PrecisionRow) -> dict[str, str]:
    """Return the plan of a row of the schedule, with the head's recipe if `head` gives it one.

    Raises ConfigError if the plan has a recipe for the head itself.
    """
    if not precision.head:
        return row.plan
    require(
        HEAD not in row.plan,
        f"precision.head: true gives {HEAD!r} the recipe of {BLOCKS!r}, and the plan from step {row.from_step} has a "
        f"pattern {HEAD!r} of its own; leave that out, or write precision.head=false",
    )
    return row.plan | {HEAD: row.plan[BLOCKS]}


def match_plan(plan: Mapping[str, str], names: list[str], default: str) -> dict[str, str]:
    """Return {linear's name: recipe}; the last pattern that matches wins, and `default` applies where none does."""
    return dict.fromkeys(names, default) | {name: plan[pattern] for name, pattern in winners(plan, names).items()}


def winners(plan: Mapping[str, str], names: list[str]) -> dict[str, str]:
    """Return {linear's name: the last pattern that matches it}.

    Raises ConfigError for a pattern that matches nothing, or only what later ones match too.
    """
    matches: dict[str, list[str]] = {}
    for pattern in plan:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            patterns = dict.fromkeys(f"{name.partition('.')[0]}.*" for name in names if "." in name)
            near = suggest(pattern, [*patterns, *names])
            raise ConfigError(f"precision.schedule: pattern {pattern!r} matches no linear; {near}")
        matches[pattern] = matched
    won = {name: pattern for pattern, matched in matches.items() for name in matched}
    for pattern, matched in matches.items():
        later = dict.fromkeys(repr(won[name]) for name in matched)
        require(
            repr(pattern) in later,
            f"precision.schedule: pattern {pattern!r} has no effect, because later ones match all of its linears: "
            f"{', '.join(later)}; leave it out, or move it behind these",
        )
    return won


def end_blocks(names: list[str], skip_blocks: int | tuple[int, int] | Literal["tail"]) -> list[str]:
    """Return the linears of the blocks at both ends that `skip_blocks` names.

    Raises ConfigError if no block is left between them.
    """
    if not skip_blocks:
        return []
    blocks = {name: int(name.split(".")[1]) for name in names if name.startswith("layers.")}
    if skip_blocks == "tail":
        first, last = 0, tail_of(Counter(blocks.values()))
    else:
        first, last = skip_blocks if isinstance(skip_blocks, tuple) else (skip_blocks, skip_blocks)
    between = range(first, max(blocks.values()) + 1 - last)
    if not between:
        asked = f"{skip_blocks} at both ends" if isinstance(skip_blocks, int) else written(skip_blocks)
        raise ConfigError(f"precision.skip_blocks: {asked} leave none of {len(set(blocks.values()))} blocks")
    return [name for name, block in blocks.items() if block not in between]


def check_skipped(precision: Precision, names: list[str], skipped: Collection[str]) -> None:
    """Raise ConfigError if `skip_blocks` takes no linear that is quantised, or all linears of a pattern of a plan.

    Not if nothing is quantised in any row: then an experiment may have it for its other arms (`config/settings.py`).
    """
    plans = [plan_of(precision, row) for row in precision.schedule] if precision.skip_blocks else []
    won = [(plan, winners(plan, names)) for plan in plans]
    quantised = {n for plan, own in won for n, pattern in own.items() if precision.recipe(plan[pattern]) != Gemms()}
    key = f"precision.skip_blocks: {written(precision.skip_blocks)}"
    require(
        not quantised or not quantised.isdisjoint(skipped),
        f"{key} has no effect, because no plan quantises a linear of these blocks; write precision.skip_blocks=0, or "
        "skip other blocks",
    )
    for plan, own in won if quantised else ():
        kept = {pattern for name, pattern in own.items() if name not in skipped}
        for pattern in plan:
            require(
                pattern in kept,
                f"{key} takes all linears from the plan's pattern {pattern!r}; leave that out, or skip other blocks",
            )


def tail_of(linears: Mapping[int, int]) -> int:
    """Return the number of last blocks, at least one, nearest to TAIL of all linears; between two, the smaller number.

    `linears`: the number of linears in each block.
    """
    counts = [linears[block] for block in sorted(linears, reverse=True)]
    return 1 + min(range(len(counts)), key=lambda n: abs(sum(counts[: n + 1]) - TAIL * sum(counts)))

"""List what Transformer Engine's page on MXFP8 claims."""

from __future__ import annotations

from functools import partial
from math import inf

from analysis.ledger import arithmetic as sums
from analysis.ledger import measured as table
from analysis.ledger.claim import ARITHMETIC, KERNEL, PRETRAINING, Claim
from analysis.ledger.recipe import PERPLEXITY
from analysis.ledger.rules import between, equal, none_of_them
from analysis.ledger.training import Difference, without_blackwell
from analysis.recipe.arms_23m import ARMS, RECIPE
from analysis.stated import PLANNED_PAIRS

BOTH, COLUMNS_TWICE = "rows, columns", "columns, columns of the cast rows"
BACK, SHARDS = "rows, rows of the cast columns", "rows, rows of each shard"

arithmetic = partial(Claim, kind=ARITHMETIC, there="any")
by_study = partial(Claim, kind=ARITHMETIC, there="any", here="random tensors, this code on a CPU")


def casts(which: str, column: str, extreme: str) -> partial[float]:
    return partial(table.differ, casts=which, column=column, which=extreme)


CLAIMS = (
    arithmetic(
        id="te-float-to-e8m0",
        where="scaling factors, step 2",
        says="the FP32 exponent, one more where the mantissa is not 0, is the ceiling of log2",
        judge=sums.computed(sums.bits_against_log2),
        rule=none_of_them("of 8,388,608 significands with another scale"),
    ),
    by_study(
        id="te-fits",
        where="scaling factors",
        says="the largest number of each block fits without overflow",
        judge=table.in_table("quality", partial(table.overflow, rule="rceil", which="max", format="E4M3")),
        rule=between(-inf, 1e-12, "none"),
    ),
    by_study(
        id="te-rows-columns-stored",
        where="handling transposes",
        says="a tensor cast along rows and one cast along columns are numerically different, as stored",
        judge=table.in_table("orientations", casts(BOTH, "stored_differ", "min")),
        rule=between(0.01, inf, "ours: 1 % of the elements"),
    ),
    *(
        by_study(
            id=f"te-{name}",
            where="handling transposes",
            says=says,
            judge=table.in_table("orientations", casts(which, "decoded_differ", "min")),
            rule=between(0, inf, "any element, by every scale rule"),
        )
        for name, which, says in (
            ("rows-columns-decoded", BOTH, "they are numerically different once they are decoded"),
            ("columns-from-rows", COLUMNS_TWICE, "the cast along columns cannot be derived from that along rows"),
            ("rows-from-columns", BACK, "the cast along rows cannot be derived from that along columns"),
        )
    ),
    by_study(
        id="te-no-synchronization",
        where="distributed training",
        says="shards are cast as the whole tensor is: scales need not be synchronized",
        judge=table.in_table("orientations", casts(SHARDS, "stored_differ", "max")),
        rule=between(-inf, 1e-12, "no element"),
    ),
    arithmetic(
        id="te-scale-overhead",
        where="block size, figure 1",
        says="one scale of 8 bits for 32 elements makes 8.25 bits an element",
        judge=sums.computed(lambda: 8 + 8 / 32),
        rule=between(8.24, 8.26, "arithmetic"),
    ),
    arithmetic(
        id="te-swizzle",
        where="swizzling scaling factors, figure 5",
        says="the interleaved order 0, 32, 64, 96, 1, ... has each of 128 rows once",
        judge=sums.computed(sums.swizzled),
        rule=none_of_them("rows missing, twice, or elsewhere"),
    ),
    Claim(
        id="te-e4m3-backward",
        kind=PRETRAINING,
        where="FP8 format",
        says="E4M3 gradients have enough range: runs with them end as runs with E5M2 gradients do",
        there="not stated",
        arms="E5M2 gradients, E4M3",
        judge=Difference((RECIPE.sweep,), ARMS["E5M2 gradients"], ARMS["E4M3"]),
        rule=equal(PERPLEXITY[0], "0.50 % of perplexity, the MXFP8 recipe's section 3.3"),
        needs=PLANNED_PAIRS,
        page=RECIPE.sweep,
    ),
    Claim(
        id="te-layouts",
        kind=KERNEL,
        where="handling transposes",
        says="matrix products of all layouts need no explicit transposition",
        there="Blackwell",
        judge=without_blackwell,
        rule=none_of_them("layouts that do"),
    ),
)

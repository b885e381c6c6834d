"""List the instability paper's claims about formulas and examples, which arithmetic and random tensors decide."""

from __future__ import annotations

from functools import partial
from math import inf

from analysis.ledger import arithmetic as sums
from analysis.ledger import measured as table
from analysis.ledger.claim import ARITHMETIC, Claim
from analysis.ledger.rules import between, none_of_them

EXACT = "rounding of the last printed digit"

arithmetic = partial(Claim, kind=ARITHMETIC, there="any")

CLAIMS = (
    arithmetic(
        id="instability-codes",
        where="section 5.1",
        says="E4M3 has 126 positive numbers",
        judge=sums.computed(lambda: len(sums.codes("E4M3")) - 126),
        rule=none_of_them("numbers more or fewer"),
    ),
    arithmetic(
        id="instability-gaps",
        where="section 5.1, figure 3 left",
        says="within an exponent the relative gap falls from 12.5 % to 6.6 %",
        judge=sums.printed(sums.relative_gaps()),
        rule=between(-inf, 0.1, EXACT),
    ),
    arithmetic(
        id="instability-eq-2",
        where="Eq. 2",
        says="what overflows is what is larger than 0.875 of its block's absmax",
        judge=sums.computed(lambda: sums.clamped_blocks()[0] / sums.clamped_blocks()[1]),
        rule=between(0.9, 1.1, "ours: 10 % of the fraction of normal numbers that overflow"),
    ),
    arithmetic(
        id="instability-example-scale",
        where="section 5.1",
        says="the scale of the block of gains [0.897, ..., 0.904] is 2^-8",
        judge=sums.computed(sums.exponent_of_gains),
        rule=between(-8.5, -7.5, "a whole exponent"),
    ),
    arithmetic(
        id="instability-example-clamped",
        where="section 5.1",
        says="all gains of that block overflow",
        judge=sums.computed(sums.clamped_gains),
        rule=none_of_them("gains that do not"),
    ),
    arithmetic(
        id="instability-e5m2-overflows",
        where="section 5.1",
        says="E5M2 avoids the overflow that E4M3 has",
        there="random tensors",
        here="random tensors, this code on a CPU",
        judge=table.in_table(
            "quality", partial(table.overflow, rule="floor", which="min", input="gaussian", format="E5M2")
        ),
        rule=between(-inf, 0.001, "ours: 0.1 % of normal numbers; E4M3 has 0.9 %"),
    ),
    arithmetic(
        id="instability-tight-gains",
        where="section 5.1",
        says="gains that lie closely below 1 overflow in nearly all blocks",
        there="log-normal gains",
        here="gains of 0.99 with a standard deviation of 0.003, this code on a CPU",
        judge=table.in_table(
            "quality", partial(table.overflow, rule="floor", which="min", input="gain 0.99 +- 0.003", format="E4M3")
        ),
        rule=between(0.75, inf, 'its "nearly 75 %"'),
    ),
    arithmetic(
        id="instability-rceil-avoids",
        where="section 5.1, section 7",
        says="the scale of the MXFP8 recipe avoids the overflow",
        there="any",
        here="all inputs, formats and roundings of the study, this code on a CPU",
        judge=table.in_table("quality", partial(table.overflow, rule="rceil", which="max")),
        rule=between(-inf, 1e-12, "none"),
    ),
    arithmetic(
        id="instability-swiglu-size",
        where="section 4.1, footnote 2",
        says="a SwiGLU of hidden size 8/3 has the parameters of a layer of hidden size 4",
        judge=sums.computed(sums.swiglu_parameters),
        rule=between(0.99, 1.01, "ours: 1 %"),
    ),
    arithmetic(
        id="instability-forward-cap",
        where="section 6",
        says="a free forward saves at most 33 % of a step whose backward costs twice the forward",
        judge=sums.computed(lambda: 1 / (1 + 2)),
        rule=between(0.325, 0.335, EXACT),
    ),
    arithmetic(
        id="instability-table-2-a",
        where="appendix G, table 2",
        says="the column a is beta / (alpha + beta)",
        judge=sums.printed(sums.exponents()),
        rule=between(-inf, 0.0101, EXACT),
    ),
    arithmetic(
        id="instability-zeta-2",
        where="appendix B.1, figure 5",
        says="the ratio to which gradients that have nothing in common tend is 2",
        judge=sums.computed(sums.unrelated_gradients),
        rule=between(1.9, 2.1, "ours: 5 %; its square is 2, which is what the public code plots"),
    ),
)

"""List the MXNorm paper's claims about arithmetic and kernels: coefficients, bounds, figure 2, speedups."""

from __future__ import annotations

from functools import partial
from math import inf, log

from analysis.ledger import arithmetic as sums
from analysis.ledger import measured as table
from analysis.ledger.claim import ARITHMETIC, KERNEL, Claim
from analysis.ledger.rules import between, higher, none_of_them

GB200 = "GB200, torch.compile"
CUDA = "H200, torch.compile"
EXACT = "rounding of the last printed digit"

arithmetic = partial(Claim, kind=ARITHMETIC, there="any")
by_study = partial(Claim, kind=ARITHMETIC, there="random tensors", here="random tensors, this code on a CPU")
kernel = partial(Claim, kind=KERNEL, there=GB200, here=CUDA, page="kernels", needs=85)

CLAIMS = (
    arithmetic(
        id="mxnorm-table-1",
        where="table 1",
        says="FP4 matrix units of GB200 are 80 times a V100's, elementwise units 5.1 times, memory 8.9 times",
        judge=sums.printed(sums.improvements()),
        rule=between(-inf, 0.1, EXACT),
    ),
    arithmetic(
        id="mxnorm-reduction",
        where="abstract",
        says="with blocks of 32 the norm reduces 32 times fewer numbers",
        judge=sums.computed(lambda: 4096 / (4096 / 32)),
        rule=between(31.5, 32.5, "the ratio of row length to blocks"),
    ),
    *(
        by_study(
            id=f"mxnorm-theorem-1-{name.lower()}",
            where="section 3.3, theorem 1",
            says=f"in {name} rows {words}",
            judge=table.in_table("convergence", partial(table.off_limit, distribution=name.lower())),
            rule=between(-inf, 4, "standard errors of the mean, of the two exponents the larger"),
        )
        for name, words in (
            ("Gaussian", "the scaled p-mean of block absmaxes tends to the RMS"),
            ("uniform", "it tends to a constant of that distribution (Eq. 6)"),
            ("Laplace", "it tends to a constant of that distribution (Eq. 6)"),
        )
    ),
    by_study(
        id="mxnorm-theorem-1-depends",
        where="section 3.3, theorem 1",
        says="the constant depends on the distribution: other rows' is not the Gaussian's",
        judge=table.in_table("convergence", table.limits_of_others),
        rule=between(0.05, inf, "ours: 5 % of the RMS"),
    ),
    arithmetic(
        id="mxnorm-coefficients",
        where="appendix F",
        says="RMS over p-mean is 0.4814, 0.4688, 0.4261, 0.4185, 0.3852, 0.3803 for blocks of 16, 32, 64, p = 1, 2",
        judge=sums.printed([(v, sums.coefficient(*key)) for key, v in sums.COEFFICIENTS.items()]),
        rule=between(-inf, 1e-4, "one unit of the last digit, of a Monte Carlo estimate"),
    ),
    *(
        by_study(
            id=f"mxnorm-lemma-{name}",
            where=f"section 3.5, lemma {name[0]}",
            says=says,
            judge=table.in_table("bounds", partial(table.over_bound, norm=norm)),
            rule=between(-inf, 1 + 1e-6, "rounding in FP32"),
        )
        for name, norm, says in (
            ("1", "RMSNorm", "RMSNorm's outputs are bounded by sqrt(D)"),
            ("2-p1", "MXNorm p=1", "the outputs of MXNorm p=1 are bounded by K / c"),
            ("2-p2", "MXNorm p=2", "the outputs of MXNorm p=2 are bounded by sqrt(K) / c"),
        )
    ),
    arithmetic(
        id="mxnorm-bounds-of-proxy",
        where="section 4.2",
        says="at D = 1024 in blocks of 16 the bounds are 17.06 (p=2), 32 (RMSNorm) and 132.95 (p=1)",
        judge=sums.printed(
            [(17.06, 8 / sums.coefficient(16, 2)), (32, 1024**0.5), (132.95, 64 / sums.coefficient(16, 1))]
        ),
        rule=between(-inf, 0.02, "the rounding of c to four digits"),
    ),
    by_study(
        id="mxnorm-bound-p2-tighter",
        where="sections 3.5, 4.2",
        says="p=2 bounds outputs more tightly than RMSNorm",
        judge=table.in_table("bounds", partial(table.bound_ratio, norm="MXNorm p=2")),
        rule=between(-inf, 1, "RMSNorm's bound"),
    ),
    by_study(
        id="mxnorm-bound-p1-looser",
        where="sections 3.5, 4.2",
        says="p=1 bounds outputs less tightly than RMSNorm",
        judge=table.in_table("bounds", partial(table.bound_ratio, norm="MXNorm p=1")),
        rule=between(1, inf, "RMSNorm's bound"),
    ),
    by_study(
        id="mxnorm-output-rms",
        where="section 3.3",
        says="on Gaussian rows MXNorm's outputs have an RMS of 1",
        judge=table.in_table("bounds", table.output_rms),
        rule=between(-inf, 0.01, "ours: 1 %"),
    ),
    *(
        by_study(
            id=f"mxnorm-fig-2-{name}",
            where=f"section 3.6, figure 2 {panel}",
            says=f"MXNorm's {words} are distributed almost as those of RMSNorm and cast",
            judge=table.in_table("distributions", partial(table.unlike, quantity=quantity)),
            rule=between(-inf, 0.01, "ours: total variation of 1 %"),
        )
        for name, panel, words, quantity in (
            ("scales", "left", "block scales", "scale exponent"),
            ("values", "middle", "elements", "element"),
        )
    ),
    by_study(
        id="mxnorm-fig-2-fit",
        where="section 3.6, figure 2 right",
        says="r^2 against RMSNorm and cast is excellent from 1024 elements on (32 blocks of 32)",
        judge=table.in_table("fidelity", partial(table.fit, blocks=32, block_size=32)),
        rule=between(0.99, inf, "ours: 1 % of the variance is left"),
    ),
    by_study(
        id="mxnorm-fig-2-rises",
        where="section 3.6, figure 2 right",
        says="r^2 rises towards 1 with the number of blocks",
        judge=table.in_table("fidelity", table.falling_fits),
        rule=none_of_them("doublings after which the mean r^2 is not higher"),
    ),
    arithmetic(
        id="mxnorm-scale-rule",
        where="Eq. 3, algorithm 1",
        says="2^ceil(log2(m / 256)) is the scale of the rule that its experiments use, RCEIL of m / 448",
        judge=sums.computed(sums.other_scales),
        rule=between(-inf, 0.01, "ours: 1 % of normal blocks"),
    ),
    arithmetic(
        id="mxnorm-folded-gain",
        where="Eq. 11",
        says="the gain can be applied to the weights instead of the norm's outputs",
        judge=sums.computed(sums.folded_gain),
        rule=between(-inf, 1e-12, "rounding in FP64"),
    ),
    arithmetic(
        id="mxnorm-gradient",
        where="appendix E, Eqs. 16 to 21",
        says="the printed gradient is that of RMSNorm",
        judge=sums.computed(sums.norm_backward),
        rule=between(-inf, 1e-6, "central differences in FP64"),
    ),
    arithmetic(
        id="mxnorm-tokens",
        where="appendix G, table 3",
        says="batch, sequence and training tokens make a round number of steps for all sizes",
        judge=sums.computed(sums.steps),
        rule=between(-inf, 0.005, "rounding of the printed tokens"),
    ),
    arithmetic(
        id="mxnorm-ffn-size",
        where="appendix G, table 3",
        says="the printed FFN size makes the 8B model one of 8 billion parameters",
        judge=sums.computed(sums.nearest_size),
        rule=between(-0.1, 0.1, "ours: 10 %"),
    ),
    arithmetic(
        id="mxnorm-benchmark-sizes",
        where="appendix H.1, table 4",
        says="{1, 3, 5, 7} x 2^r within 2^10 to 2^14 are the powers of 2 with three evenly spaced sizes between two",
        judge=sums.computed(sums.grid_of_sizes),
        rule=none_of_them("sizes that only one of both has"),
    ),
    arithmetic(
        id="mxnorm-postround-formula",
        where="appendix K.1",
        says="the printed sum is the mean rounded absmax of a block",
        judge=sums.computed(lambda: sums.rounded_scale(1.0, sign=-1) / sums.rounded_scale(1.0) - 1),
        rule=between(-0.01, 0.01, "ours: 1 % of the sum with the sign turned, 1.779"),
    ),
    arithmetic(
        id="mxnorm-postround-inverse",
        where="appendix K.2",
        says="the mean rounded absmax rises with sigma, so that it can be inverted",
        judge=sums.computed(sums.falls),
        rule=none_of_them("of 1,000 steps of sigma without a rise"),
    ),
    arithmetic(
        id="mxnorm-postround-octave",
        where="appendix K.2",
        says="twice the sigma has twice the mean rounded absmax",
        judge=sums.computed(lambda: sums.rounded_scale(2.0) / sums.rounded_scale(1.0)),
        rule=between(2 - 1e-9, 2 + 1e-9, "rounding in FP64"),
    ),
    arithmetic(
        id="mxnorm-table-2-leads",
        where="section 4.1, table 2",
        says="RMSNorm and p=2 each lead in five of ten tasks",
        judge=sums.printed(sums.leads()),
        rule=between(-inf, 0.5, "a count"),
    ),
    # -------------------------------------------------------------------------------------------------------- kernels
    kernel(
        id="mxnorm-kernel-most",
        where="abstract, section 4.3, figure 8",
        says="the largest speedup of MXNorm over RMSNorm and cast, both by torch.compile, is 2.4",
        judge=table.largest("compiled_over_compiled_rmsnorm"),
        rule=between(2.35, inf, "the printed 2.4, rounded"),
    ),
    kernel(
        id="mxnorm-kernel-almost-all",
        where="section 4.3, figure 8",
        says="in almost all shapes there is a speedup",
        judge=table.faster("compiled_over_compiled_rmsnorm"),
        rule=between(0.9, inf, "ours: nine shapes of ten"),
    ),
    *(
        kernel(
            id=f"mxnorm-kernel-{name}",
            where="section 4.3",
            says=f"in {words} the mean speedup is {100 * (mean - 1):.1f} %",
            judge=table.shapes(table.column("compiled_over_compiled_rmsnorm"), format=fmt, block_size=block_size),
            rule=between(log(mean), inf, "log of the printed mean: at least as much"),
        )
        for name, words, fmt, block_size, mean in (
            ("mxfp8", "MXFP8 (E4M3, blocks of 32)", "E4M3", 32, 1.417),
            ("nvfp4", "NVFP4's format (E2M1, blocks of 16)", "E2M1", 16, 1.312),
        )
    ),
    kernel(
        id="mxnorm-kernel-tokens",
        where="section 4.3",
        says="the speedup grows with the number of tokens",
        judge=table.by_tokens("compiled_over_compiled_rmsnorm"),
        rule=higher(0.01, "ours: 1 %"),
        needs=17,
    ),
    kernel(
        id="mxnorm-kernel-one-pass",
        where="section 4.3",
        says="MXNorm is faster than RMSNorm and cast (here both in this package's kernels of one pass)",
        here="H200, one-pass Triton",
        judge=table.shapes(table.column("over_one_pass_rmsnorm")),
        rule=higher(0.01, "ours: 1 %"),
    ),
    *(
        kernel(
            id=f"mxnorm-layer-{precision.lower()}",
            where="abstract, section 4.3",
            says=f"layers of Llama 3 8B are {percent} % faster in {precision}",
            judge=table.layers("compiled", precision),
            rule=between(log(1 + (percent - 0.05) / 100), inf, "log of the printed mean, rounded: at least as much"),
            needs=10,
        )
        for precision, percent in (("MXFP8", 1.3), ("NVFP4", 2.6))
    ),
    kernel(
        id="mxnorm-layer-narrower",
        where="section 4.3",
        says="layers gain more in NVFP4 than in MXFP8",
        judge=table.more_in_nvfp4("compiled"),
        rule=higher(0.01, "ours: 1 %"),
        needs=10,
    ),
)

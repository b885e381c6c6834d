"""List what the MXFP8 recipe claims (Recipes for Pre-training LLMs with MXFP8)."""

from __future__ import annotations

from functools import partial
from math import inf, log, log2

from analysis.ledger import arithmetic as sums
from analysis.ledger import measured as table
from analysis.ledger.claim import ARITHMETIC, EVALUATION, KERNEL, PRETRAINING, Claim
from analysis.ledger.rules import between, equal, higher, none_of_them
from analysis.ledger.training import Dies, Difference, Scores, at_scale, without_blackwell
from analysis.units import MLP, NORM, PLAN, SCALE_RULE, STEPS, WIDTH

BF16, MXFP8, FP8 = {PLAN: "bf16"}, {PLAN: "mxfp8"}, {PLAN: "fp8_tensor"}
EXPERTS = {MLP: "moe", NORM: "rmsnorm"}
PERPLEXITY = (log(1.005), "0.50 % of perplexity, section 3.3")
OF_TASKS = (2.1, "half of p=1's deficit in the MXNorm paper's table 2; this one states none")
SHORT, LONG = "843M, 300B tokens", "843M, 1T tokens"
# What tells a sweep's tokens and sizes apart.
TOKENS_300B: dict[str, object] = {STEPS: 286_102, WIDTH: 1024}
TOKENS_1T: dict[str, object] = {STEPS: 953_674, WIDTH: 1024}
FIRST_MXFP8 = TOKENS_300B | MXFP8
MIDDLE_1T: dict[str, object] = {STEPS: 953_674, WIDTH: 2048}
LARGE_1T: dict[str, object] = {STEPS: 238_419, WIDTH: 4096}
FIRST, SECOND = (8.43e8, 3.0e11, 8), (8.43e8, 1.0e12, 8)
MIDDLE, FINAL = (2.0e9, 1.0e12, 8), (8.0e9, 1.5e13, 8)
MAIN = "8B, 15T tokens"
FORMATS_TABLE, ROUNDING = ("element_formats",), ("scale_rounding",)

arithmetic = partial(Claim, kind=ARITHMETIC, there="any")
by_study = partial(Claim, kind=ARITHMETIC, there="any", here="random tensors, this code on a CPU")
pretraining = partial(Claim, kind=PRETRAINING)

NUMBERS = (
    arithmetic(
        id="recipe-table-1-max",
        where="table 1",
        says="the largest normal numbers of E4M3, E5M2, E2M3, E3M2 and E2M1",
        judge=sums.of_formats(0, lambda codes: codes[-1]),
        rule=none_of_them("formats with another"),
    ),
    arithmetic(
        id="recipe-table-1-min",
        where="table 1",
        says="the smallest subnormal numbers of these formats",
        judge=sums.of_formats(1, lambda codes: codes[0]),
        rule=none_of_them("formats with another"),
    ),
    arithmetic(
        id="recipe-table-1-binades",
        where="table 1",
        says="the binades of these formats",
        judge=sums.of_formats(2, sums.binades),
        rule=none_of_them("formats with others"),
    ),
    arithmetic(
        id="recipe-binades-ratio",
        where="section 3.1",
        says="E5M2 has about 1.8 times the binades of E4M3",
        judge=sums.computed(lambda: sums.binades(sums.codes("E5M2")) / sums.binades(sums.codes("E4M3"))),
        rule=between(1.75, 1.85, "rounding of the last printed digit"),
    ),
    arithmetic(
        id="recipe-samples-a-binade",
        where="section 3.2",
        says="E4M3 has 8 numbers a binade, E5M2 4",
        judge=sums.printed(
            [(n, ((sums.codes(name) >= 1) & (sums.codes(name) < 2)).sum()) for n, name in ((8, "E4M3"), (4, "E5M2"))]
        ),
        rule=none_of_them("more or fewer"),
    ),
    by_study(
        id="recipe-e4m3-precision",
        where="section 3.2",
        says="within a block E4M3 is more precise than E5M2",
        judge=table.in_table("quality", table.decibels),
        rule=between(3, inf, "ours: 3 dB of normal numbers; one bit more is 6"),
    ),
    by_study(
        id="recipe-ocp-overflows",
        where="section 3.1",
        says="scales rounded down map amax above the largest number, which is clamped",
        judge=table.in_table("quality", partial(table.overflow, rule="floor", which="min", input="gaussian")),
        rule=between(1e-3, inf, "ours: 0.1 % of normal numbers, in every format"),
    ),
    by_study(
        id="recipe-round-up-fits",
        where="section 3.1, algorithm 1",
        says="scales rounded up map amax to at most the largest number",
        judge=table.in_table("quality", partial(table.overflow, rule="rceil", which="max")),
        rule=between(-inf, 1e-12, "none, in any format"),
    ),
    arithmetic(
        id="recipe-scale-range",
        where="appendix A.1",
        says="amax over the largest number never exceeds 2^127",
        judge=sums.computed(sums.largest_ratio),
        rule=between(-inf, 127, "log2; of the five formats the least of the largest numbers"),
    ),
    arithmetic(
        id="recipe-log2-rounds",
        where="appendix A.1",
        says="with log2 in FP32 algorithm 1 can give another scale than the bits",
        judge=sums.computed(sums.log2_in_fp32),
        rule=between(0.5, inf, "ratios of 2^100 to 2^101 with another scale"),
    ),
    arithmetic(
        id="recipe-bits-are-ceil",
        where="appendix A.1",
        says="rounding up in the bits is the ceiling of log2",
        judge=sums.computed(sums.bits_against_log2),
        rule=none_of_them("of 8,388,608 significands with another scale"),
    ),
    Claim(
        id="recipe-throughput",
        kind=KERNEL,
        where="table 1, section 3.3",
        says="matrix products in MXFP8 have twice the throughput of bf16",
        there="GB200",
        judge=without_blackwell,
        rule=between(1.9, inf, "ours: 5 % of 2"),
    ),
    Claim(
        id="recipe-fp4-throughput",
        kind=KERNEL,
        where="table 1",
        says="matrix products in MXFP4 have four times the throughput of bf16",
        there="Blackwell",
        judge=without_blackwell,
        rule=between(3.8, inf, "ours: 5 % of 4"),
    ),
    Claim(
        id="recipe-emulation",
        kind=KERNEL,
        where="section 3.3",
        says="emulated MXFP8 trains as the hardware's does",
        there="2B",
        judge=without_blackwell,
        rule=none_of_them("losses that differ"),
    ),
)


def rounding(name: str, words: str, plan: str, where: str, there: str, cost: tuple[float, float, int]) -> Claim:
    size = TOKENS_1T if there == LONG else TOKENS_300B
    arms = [size | {PLAN: plan, SCALE_RULE: rule} for rule in ("floor", "rceil")]
    return pretraining(
        id=f"recipe-ocp-worse-{name}",
        where=where,
        says=f"with scales rounded down the loss is higher than with scales rounded up, {words}",
        there=there,
        arms="floor, RCEIL",
        judge=at_scale(*cost, Difference(ROUNDING, arms[0], arms[1])),
        rule=higher(*PERPLEXITY),
    )


TRAINED = (
    rounding("cfg1", "E4M3 throughout", "mxfp8", "section 3.1, figure 2a", SHORT, FIRST),
    rounding("cfg2", "with E5M2 gradients", "mxfp8_e5m2_grad", "section 3.1, figure 2a", SHORT, FIRST),
    rounding("cfg1-long", "E4M3 throughout, for longer", "mxfp8", "section 3.1, figure 2b", LONG, SECOND),
    rounding("cfg2-long", "with E5M2 gradients, for longer", "mxfp8_e5m2_grad", "section 3.1, figure 2b", LONG, SECOND),
    pretraining(
        id="recipe-ocp-diverges",
        where="section 3.1, figure 2a",
        says="with scales rounded down training diverges",
        there=SHORT,
        arms="floor, RCEIL",
        judge=at_scale(
            *FIRST, Dies(ROUNDING, FIRST_MXFP8 | {SCALE_RULE: "floor"}, FIRST_MXFP8 | {SCALE_RULE: "rceil"})
        ),
        rule=higher(0.1, "ours: one run of ten"),
    ),
    *(
        pretraining(
            id=f"recipe-round-up-{name}{suffix}",
            where=f"section 3.1, figure 2{part}",
            says=f"with scales rounded up MXFP8 {words} ends as bf16 does",
            there=there,
            arms=f"MXFP8 {words} by RCEIL, bf16",
            judge=at_scale(*cost, Difference(ROUNDING, tokens | {PLAN: plan, SCALE_RULE: "rceil"}, tokens | BF16)),
            rule=equal(*PERPLEXITY),
        )
        for name, words, plan in (("e4m3", "in E4M3", "mxfp8"), ("e5m2-grad", "with E5M2 gradients", "mxfp8_e5m2_grad"))
        for suffix, part, there, cost, tokens in (
            ("", "a", SHORT, FIRST, TOKENS_300B),
            ("-long", "b", LONG, SECOND, TOKENS_1T),
        )
    ),
    *(
        pretraining(
            id=f"recipe-e5m2-{name}",
            where="section 3.2, figure 3a",
            says=f"E5M2 {words} end higher than E4M3",
            there=LONG,
            arms=f"E5M2 {words}, E4M3",
            judge=at_scale(*SECOND, Difference(FORMATS_TABLE, TOKENS_1T | {PLAN: plan}, TOKENS_1T | MXFP8)),
            rule=higher(*PERPLEXITY),
        )
        for name, words, plan in (
            ("weights", "weights", "mxfp8_e5m2_weight"),
            ("activations", "activations", "mxfp8_e5m2_act"),
        )
    ),
    pretraining(
        id="recipe-e5m2-gradients-small",
        where="section 3.2, figure 3a",
        says="in a small model E5M2 gradients end as E4M3's do",
        there=LONG,
        arms="E5M2 gradients, E4M3",
        judge=at_scale(*SECOND, Difference(FORMATS_TABLE, TOKENS_1T | {PLAN: "mxfp8_e5m2_grad"}, TOKENS_1T | MXFP8)),
        rule=equal(*PERPLEXITY),
    ),
    *(
        pretraining(
            id=f"recipe-{name}-2b",
            where="section 3.2",
            says=says,
            there="2B; the tokens are those of the other sizes, 1T",
            arms=words,
            judge=at_scale(*MIDDLE, Difference(FORMATS_TABLE, MIDDLE_1T | arm, MIDDLE_1T | baseline)),
            rule=rule(*PERPLEXITY),
        )
        for name, says, words, arm, baseline, rule in (
            ("e4m3-gradients", "from 2B on E4M3 gradients end as bf16 does", "E4M3, bf16", MXFP8, BF16, equal),
            (
                "e5m2-gradients",
                "from 2B on E5M2 gradients end higher than E4M3's",
                "E5M2 gradients, E4M3",
                {PLAN: "mxfp8_e5m2_grad"},
                MXFP8,
                higher,
            ),
        )
    ),
    pretraining(
        id="recipe-e5m2-gradients-8b",
        where="section 3.2, figure 3b",
        says="at 8B E5M2 gradients end higher than E4M3's",
        there="8B, 1T tokens",
        arms="E5M2 gradients, E4M3",
        judge=at_scale(
            8.0e9, 1.0e12, 8, Difference(FORMATS_TABLE, LARGE_1T | {PLAN: "mxfp8_e5m2_grad"}, LARGE_1T | MXFP8)
        ),
        rule=higher(*PERPLEXITY),
    ),
    pretraining(
        id="recipe-mxfp8-is-bf16-8b",
        where="section 3.3, figure 5",
        says="at 8B the validation perplexity is within 0.50 % of bf16's throughout",
        there=MAIN,
        arms="MXFP8, bf16",
        judge=at_scale(*FINAL),
        rule=equal(*PERPLEXITY),
    ),
    pretraining(
        id="recipe-mixture-of-experts",
        where="appendix A.4, figure 6",
        says="a mixture of experts ends within 0.1 % of bf16's loss",
        there="16B, 2.5B active, 1T tokens",
        arms="MXFP8, bf16; RMSNorm",
        judge=Difference(("moe",), MXFP8 | EXPERTS, BF16 | EXPERTS, is_relative=True),
        rule=equal(0.001, "0.1 %, relative"),
        page="moe",
    ),
    Claim(
        id="recipe-mmlu",
        kind=EVALUATION,
        where="section 3.3, figure 5",
        says="MXFP8 answers MMLU (5 shots) as bf16 does",
        there=MAIN,
        arms="MXFP8, bf16",
        judge=at_scale(*FINAL, Scores(("nvidia_reasoning",), ("mxfp8_vs_bf16",), MXFP8, BF16, "mmlu", "mcf")),
        rule=equal(*OF_TASKS),
    ),
    Claim(
        id="recipe-nine-tasks",
        kind=EVALUATION,
        where="section 3.3, figure 5",
        says="MXFP8 answers nine tasks (1 shot) as bf16 does",
        there=MAIN,
        arms="MXFP8, bf16",
        judge=at_scale(*FINAL, Scores(("nvidia_reasoning",), ("mxfp8_vs_bf16",), MXFP8, BF16, form="cf")),
        rule=equal(*OF_TASKS),
    ),
    Claim(
        id="recipe-fp8-tasks",
        kind=EVALUATION,
        where="section 3.3, figure 5",
        says="MXFP8 answers as per-tensor FP8 with its first and last blocks in bf16 does",
        there=MAIN,
        arms="MXFP8, FP8",
        judge=at_scale(*FINAL, Scores(("nvidia_reasoning",), ("mxfp8_vs_bf16",), MXFP8, FP8, form="cf")),
        rule=equal(*OF_TASKS),
    ),
    pretraining(
        id="recipe-fp8-loss",
        where="section 3.3",
        says="MXFP8 without any bf16 layer ends as FP8 with two does",
        there=MAIN,
        arms="MXFP8, FP8",
        judge=at_scale(*FINAL, Difference(("mxfp8_vs_bf16",), MXFP8, FP8)),
        rule=equal(*PERPLEXITY),
    ),
    arithmetic(
        id="recipe-two-copies",
        where="section 3.2",
        says="a tensor cast along rows and columns needs two copies, which together are larger than one in bf16",
        judge=sums.computed(lambda: 2 * (8 + 8 / 32)),
        rule=between(16, inf, "bits an element"),
    ),
    arithmetic(
        id="recipe-e8m0-range",
        where="section 2",
        says="an E8M0 scale is a power of 2 from 2^-127 to 2^127, or NaN: 255 powers in 8 bits",
        judge=sums.computed(lambda: log2(2.0**127 / 2.0**-127) + 1 + 1 - 2**8),
        rule=none_of_them("codes too many or too few"),
    ),
)

CLAIMS = (*NUMBERS, *TRAINED)

"""The papers' claims about training runs, and functions that judge them by a set of runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from analysis.compare import Mean, differing, ended, paired

REPRODUCED, NOT, UNCLEAR, NOT_RUN = "reproduced", "not reproduced", "cannot tell", "not run"


@dataclass(frozen=True)
class Verdict:
    state: str
    evidence: str


@dataclass(frozen=True)
class Claim:
    source: str
    says: str
    judge: Callable[[pd.DataFrame], Verdict]


def choice(runs: pd.DataFrame, **wanted: str) -> pd.Series:
    """Return which runs have the given choices, group=choice; bool, one per run."""
    chosen = pd.Series(True, index=runs.index)
    for group, name in wanted.items():
        column = f"choice.{group}"
        chosen &= runs[column] == name if column in runs else False
    return chosen


def difference(
    column: str, arm: dict[str, str], baseline: dict[str, str], judge: Callable[[Mean], str]
) -> Callable[[pd.DataFrame], Verdict]:
    """Return a judge of the claim that two arms differ in one column, paired by seed."""

    def verdict(runs: pd.DataFrame) -> Verdict:
        one, other = choice(runs, **arm), choice(runs, **baseline)
        if not (one.any() and other.any()):
            return Verdict(NOT_RUN, "an arm is missing")
        mixed = [name for own in (one, other) for name in differing(runs[own]) if name.split(".")[1] in arm]
        if mixed:
            return Verdict(UNCLEAR, f"{mixed[0].removeprefix('config.')} differs within an arm")
        found = paired(runs, column, one, other, varied=arm)
        name = column.removeprefix("config.").replace("_", " ")
        evidence = f"{name}, {words(arm)} less {words(baseline)}: {found}"
        return Verdict(judge(found) if found.count > 1 else UNCLEAR, evidence)

    return verdict


def spikes_more(arm: dict[str, str], baseline: dict[str, str]) -> Callable[[pd.DataFrame], Verdict]:
    """Return a judge of the claim that an arm has higher spike scores; without any spike they only measure noise."""
    compared = difference("spike_score", arm, baseline, is_higher)

    def verdict(runs: pd.DataFrame) -> Verdict:
        found, either = compared(runs), choice(runs, **arm) | choice(runs, **baseline)
        if found.state == NOT_RUN or runs.loc[either, "spikes"].any():
            return found
        return Verdict(UNCLEAR, f"no run has a spike; {found.evidence}")

    return verdict


def words(arm: dict[str, str]) -> str:
    return " ".join(arm.values())


def is_higher(found: Mean) -> str:
    if not found.excludes_zero:
        return UNCLEAR
    return REPRODUCED if found.value > 0 else NOT


def is_within(margin: float) -> Callable[[Mean], str]:
    """Return a judge of whether the whole interval lies within +- margin, or the whole interval outside."""

    def judge(found: Mean) -> str:
        if abs(found.value) + found.half_width < margin:
            return REPRODUCED
        return NOT if abs(found.value) - found.half_width > margin else UNCLEAR

    return judge


def diverges(**arm: str) -> Callable[[pd.DataFrame], Verdict]:
    """Return a judge of the claim that all runs of an arm diverge and no others do."""

    def verdict(runs: pd.DataFrame) -> Verdict:
        chosen = choice(runs, **arm)
        if not chosen.any():
            return Verdict(NOT_RUN, "the arm is missing")
        ours = runs[chosen]["state"] == "diverged"
        others = runs[~chosen]["state"] == "diverged"
        evidence = (
            f"diverged: {ours.sum()} of {len(ours)} of {words(arm)}, {others.sum()} of {len(others)} of the others"
        )
        if not ours.any():
            return Verdict(NOT if len(ours) > 1 else UNCLEAR, evidence)
        return Verdict(REPRODUCED if ours.all() and not others.any() else UNCLEAR, evidence)

    return verdict


def by_rule(runs: pd.DataFrame) -> Verdict:
    """Judge whether scales rounded down end worse than scales rounded up, paired over all else that varies."""
    column = "config.precision.scale_rule"
    if column not in runs or not {"floor", "rceil"} <= set(runs[column]):
        return Verdict(NOT_RUN, "an arm is missing")
    quantised = runs["choice.precision"] != "bf16"
    down, up = (quantised & (runs[column] == rule) for rule in ("floor", "rceil"))
    key = runs.rename(columns={column: "scale_rule"})  # renamed so that it does not count as a difference
    found = paired(key, "validation_loss", down, up, varied=())
    return Verdict(is_higher(found) if found.count > 1 else UNCLEAR, f"validation loss, floor less rceil: {found}")


P1, P2, RMS = {"norm": "mxnorm_p1"}, {"norm": "mxnorm_p2"}, {"norm": "rmsnorm"}
SAME_LOSS_NATS = 0.03  # the paper's own difference at 125M: 3.090 +- 0.004 against 3.116 +- 0.010

CLAIMS = (
    Claim(
        "MXNorm, section 4.1",
        f"p=1 ends within {SAME_LOSS_NATS} nats of RMSNorm at small scale",
        difference("validation_loss", P1, RMS, is_within(SAME_LOSS_NATS)),
    ),
    Claim(
        "MXNorm, section 4.1",
        f"p=2 ends within {SAME_LOSS_NATS} nats of RMSNorm at small scale",
        difference("validation_loss", P2, RMS, is_within(SAME_LOSS_NATS)),
    ),
    Claim(
        "MXNorm, section 4.2",
        "p=1 spikes more than RMSNorm",
        spikes_more(P1, RMS),
    ),
    Claim(
        "MXNorm, section 4.2",
        "p=1 spikes more than p=2",
        spikes_more(P1, P2),
    ),
    Claim(
        "MXNorm, appendix K",
        "the RMS from rounded scales ends worse than p=2",
        difference("validation_loss", {"norm": "mxnorm_postround"}, P2, is_higher),
    ),
    Claim(
        "MXFP8 recipe, section 3.1",
        "scales rounded down end worse than scales rounded up",
        by_rule,
    ),
    Claim(
        "MXFP8 recipe, section 3.2",
        "E5M2 weights end worse than E4M3",
        difference("validation_loss", {"precision": "mxfp8_e5m2_weight"}, {"precision": "mxfp8"}, is_higher),
    ),
    Claim(
        "MXFP8 recipe, section 3.2",
        "E5M2 activations end worse than E4M3",
        difference("validation_loss", {"precision": "mxfp8_e5m2_act"}, {"precision": "mxfp8"}, is_higher),
    ),
    Claim(
        "MXFP8 recipe, section 3.3",
        "MXFP8 ends within 0.01 nats of bf16",
        difference("validation_loss", {"precision": "mxfp8"} | RMS, {"precision": "bf16"} | RMS, is_within(0.01)),
    ),
    Claim(
        "MXFP8 recipe, section 3.2",
        "E5M2 gradients end worse than E4M3",
        difference("validation_loss", {"precision": "mxfp8_e5m2_grad"}, {"precision": "mxfp8"}, is_higher),
    ),
    Claim(
        "Instability paper, section 6",
        "E4M3 weights with bf16 activations end within 0.01 nats of bf16",
        difference("validation_loss", {"precision": "mxfp8_bf16_act"}, {"precision": "bf16"}, is_within(0.01)),
    ),
    Claim(
        "Instability paper, section 6",
        "E4M3 in the forward alone ends within 0.01 nats of bf16",
        difference("validation_loss", {"precision": "mxfp8_forward_only"}, {"precision": "bf16"}, is_within(0.01)),
    ),
    Claim("Instability paper, section 3.2", "E5M2 in all operands diverges", diverges(precision="mxfp8_e5m2")),
)


def judged(runs: pd.DataFrame) -> list[tuple[Claim, Verdict]]:
    """Return each claim with its verdict by the runs that have ended."""
    return [(claim, claim.judge(ended(runs))) for claim in CLAIMS]

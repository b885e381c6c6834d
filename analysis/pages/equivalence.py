"""Make the parts of the page about the main comparison of norms, by the rule stated before in results/prestated.md."""

from __future__ import annotations

from functools import cache

import pandas as pd

from analysis.ledger import mxnorm_training
from analysis.ledger.claim import Claim, Judged, judge
from analysis.ledger.tables import Tables
from analysis.pages.language_models import LOSS, NORM_CHOICE, NORMS
from analysis.pages.marks import Parts, rows_of
from analysis.pages.pilot import BASELINE, PILOT
from analysis.units import SEED
from mxstudy.results import markdown

CLAIM_OF = {  # {norm: the claim that was stated about it}
    "mxnorm_p1": "mxnorm-loss-125m-p1",
    "mxnorm_p2": "mxnorm-loss-125m-p2",
    "mxnorm_postround": "mxnorm-postround-worse",
}
WORDS = NORMS | {"mxnorm_postround": "MXNorm p=2, post-round"}
LEVEL = 1 - 0.1 / len(CLAIM_OF)  # as stated: 90 %, corrected for the comparisons


def runs() -> pd.DataFrame:
    return rows_of("runs", "mxnorm_equivalence")


@cache
def losses() -> pd.DataFrame:
    """Return validation losses by seed (rows) and norm (columns)."""
    return runs().pivot(index=SEED, columns=NORM_CHOICE, values=LOSS)


def less(norm: str) -> pd.Series:
    """Return the norm's losses minus RMSNorm's, by seed."""
    return losses()[norm] - losses()[BASELINE]


def interval(norm: str) -> tuple[float, float]:
    """Return the interval that decides."""
    evidence = judged(norm).evidence
    assert evidence is not None
    return evidence.found.interval(LEVEL)


@cache
def judged(norm: str) -> Judged:
    return judge(claims()[CLAIM_OF[norm]], Tables())


def claims() -> dict[str, Claim]:
    return {claim.id: claim for claim in mxnorm_training.CLAIMS}


def table() -> str:
    cells = [(WORDS[BASELINE], f"{losses()[BASELINE].mean():.4f}", "", "", "", "", "")]
    for norm, claim in CLAIM_OF.items():
        own, (low, high) = less(norm), interval(norm)
        spread = f"{own.min():+.4f} .. {own.max():+.4f}"
        numbers = f"{losses()[norm].mean():.4f}", f"{own.mean():+.4f}", f"{low:+.4f} .. {high:+.4f}", spread
        cells.append((WORDS[norm], *numbers, claims()[claim].says, judged(norm).verdict))
    columns = [
        "norm",
        "mean loss",
        "minus RMSNorm",
        f"{100 * LEVEL:.2f} % interval",
        "least .. most",
        "claim",
        "verdict",
    ]
    return markdown(columns, cells, left=["norm", "claim", "verdict"])


def changes() -> pd.Series:
    """Return the absolute change of the final loss of each run that was made twice."""
    again = rows_of("runs", "mxnorm_equivalence_repeat").set_index("fingerprint")[LOSS]
    return (again - runs().set_index("fingerprint")[LOSS]).dropna().abs()


EQUIVALENCE: Parts = {
    **PILOT,
    "comparison": table,
    "pairs": lambda: str(len(losses())),
    "all finished": lambda: f"{(runs()['state'] == 'finished').sum()} of {len(runs())}",
    "p1": lambda: f"{less('mxnorm_p1').mean():+.4f}",
    "p2": lambda: f"{less('mxnorm_p2').mean():+.4f}",
    "post-round": lambda: f"{less('mxnorm_postround').mean():+.4f}",
    "p1 at most": lambda: f"{interval('mxnorm_p1')[1]:.4f}",
    "above": lambda: f"{sum((less(norm) > 0).sum() for norm in CLAIM_OF)} of {len(losses()) * len(CLAIM_OF)}",
    "made twice": lambda: str(len(changes())),
    "least change": lambda: f"{changes().min():.4f}",
    "largest change": lambda: f"{changes().max():.4f}",
}

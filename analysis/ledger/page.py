"""Judge all claims from the tables in results/, and write results/claims.md, results/claims.json and the README's sums.

python -m analysis.ledger.page
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from analysis.command import command
from analysis.ledger.claim import IMPOSSIBLE, KINDS, NOT_RUN, Judged
from analysis.ledger.documents import judged
from analysis.ledger.rules import CONTRADICTED, REPRODUCED, UNCLEAR
from analysis.ledger.tables import RESULTS, Tables
from analysis.statistics import LEAST_UNITS, Effect, Found
from mxstudy import results
from mxstudy.results import ConfigError

README = Path("README.md")
BEGIN, END = "<!-- make claims -->", "<!-- /make claims -->"
VERDICTS = (REPRODUCED, CONTRADICTED, UNCLEAR, NOT_RUN, IMPOSSIBLE)
COLUMNS = ("id", "where", "claim", "kind", "there", "here", "arms", "rule", "needs", "n", "effect", "verdict", "page")
NOISE = 1e-9  # differences that machines make when they round the same arithmetic
ABOUT = f"""\
# What the documents claim, and what the tables here say

Every row is one claim of a document, with the rule that decides it. `make claims` writes this page and
`claims.json` from the tables in this folder alone: no verdict is written by hand; a claim without tables is not run.

- **Unit.** What is independent: the data seed of students, whose initial seeds are averaged first; two language models
  with equal seeds; a shape that a kernel was timed at. Arithmetic has none. Runs of two codes are not pooled: only
  the code in which most units have all arms is used.
- **Effect.** The mean over units with its interval: the smallest that contains Student's, from eight units on the
  bootstrap's (BCa), and for fractions Wilson's or Newcombe's, cut where fractions and their differences end. Fractions
  are of all runs at the stated step; where a row says so, without students that are up at the end for too few steps to
  have diverged.
- **Reproduced**: the 95 % interval lies in the range that the rule names; where arms are claimed to be equal, the 90 %
  one (two one-sided tests). **Contradicted**: it lies wholly on the other side, or arms that are claimed to differ are
  equal within the margin. In all other cases: **cannot tell**. A verdict holds only at the scale in the column "here".
  Claims that were stated together are corrected by their number. Where a rule was [stated before](prestated.md) its
  runs, that rule decides, and what the general rules say is added where they differ.
- **N units would tell**: with so many units of the mean and spread that these have, the rule would decide.
- **needs** is how many units were planned; **n** is how many there are. From {LEAST_UNITS} units on there is a verdict;
  fewer count as not run.
- A run that died is in no mean; it is counted, and no arm with one is called equal to another.
- **Random tensors** are those of `make approximation`: its tables are `approximation_*.parquet`, whose metadata name
  the commit, exported by `python -m analysis.export --runs runs/approximation_recipes --name approximation`.
- **M minutes of an H200 for {LEAST_UNITS} units** is what a verdict takes at measured rates: runs of one code, with all
  arms that the claims of a sweep share. Evaluations and measurements by probes are not in it.
- **Not possible here** names the hardware that is missing, or what the claim's own scale takes at the measured rate,
  if one run takes more than 25 minutes of a GPU on average, the limit that was set for runs here."""


def sums(found: Iterable[tuple[str, Judged]], title: str, order: Iterable[str]) -> str:
    """Return a Markdown table of how many claims have which verdict, by name."""
    counts = Counter((name, one.counted_as) for name, one in found)
    rows = {name: [counts[name, verdict] for verdict in VERDICTS] for name in order}
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    cells = [(name, *row, sum(row)) for name, row in rows.items()]
    return results.markdown((title, *VERDICTS, "claims"), cells, left=[title])


def page(found: dict[str, list[Judged]]) -> str:
    everything = [one for claims in found.values() for one in claims]
    parts = [
        ABOUT,
        sums(by_source(found), "source", found),
        sums(((one.claim.kind, one) for one in everything), "kind", KINDS),
    ]
    for source, claims in found.items():
        parts += [f"## {source}", results.markdown(COLUMNS, map(row, claims), left=[c for c in COLUMNS if c != "n"])]
    return "\n\n".join(parts) + "\n"


def by_source(found: dict[str, list[Judged]]) -> Iterable[tuple[str, Judged]]:
    return ((source, one) for source, claims in found.items() for one in claims)


def row(one: Judged) -> tuple[object, ...]:
    claim = one.claim
    return (
        claim.id,
        claim.where,
        claim.says,
        claim.kind,
        claim.there,
        here(one),
        claim.arms,
        claim.rule.words,
        claim.needs if is_sampled(one) else "-",
        one.units or "-",
        effect(one).replace("|", "\\|"),
        verdict(one, "**"),
        f"[{claim.page}]({claim.page}.md)" if claim.page else "-",
    )


def here(one: Judged) -> str:
    """Return the scale at which a claim was judged."""
    return one.evidence.here or one.claim.here if one.evidence else "-"


def is_sampled(one: Judged) -> bool:
    return one.evidence is None or isinstance(one.evidence.found, Effect)


def verdict(one: Judged, marks: str = "") -> str:
    """Return the verdict between these marks, or 'not run' with the reason if it has too few units to count."""
    if one.counted_as != one.verdict:
        return f"{marks}{one.counted_as}{marks}, fewer than {LEAST_UNITS} units"
    return f"{marks}{one.shown_verdict}{marks}"


def effect(one: Judged) -> str:
    """Return what was found, an effect with its interval and the judge's words, or why there is nothing."""
    if one.evidence is None:
        return note_of(one)
    return "; ".join(filter(None, (shown(one.evidence.found, one.claim.rate), note_of(one))))


def note_of(one: Judged) -> str:
    """Return what the judge says beside the numbers, how many units are left out and why, and how many would tell."""
    if one.evidence is None:
        return "; ".join(filter(None, (one.why, one.cost)))
    counts = {"of other code": one.evidence.others, "without all runs": one.evidence.incomplete}
    left = [f"{one.evidence.unit} {why}: {count}" for why, count in counts.items() if count]
    price = f"{one.price} would tell" if one.price else ""
    return "; ".join(filter(None, (one.evidence.note, *left, one.cost, price)))


def shown(found: Found, rate: float) -> str:
    value, low, high = (tidy(number) for number in (found.value, *found.interval(1 - rate)))
    if value is None or not isinstance(found, Effect):
        return f"{value:g}" if value is not None else "-"
    return f"{value:+.3g}" + (f" ({low:+.3g} .. {high:+.3g}, {100 * (1 - rate):.4g} %)" if low is not None else "")


def tidy(value: float) -> float | None:
    """Return a number to four digits, without differences of rounding alone, or None for NaN."""
    if value != value:
        return None
    return float(f"{value:.4g}") if abs(value) >= NOISE else 0.0


def record(source: str, one: Judged) -> dict[str, Any]:
    """Return a claim as a row of the JSON.

    Its `effect` and `interval` are those of its comparison, null where there is none.
    """
    claim = one.claim
    found, level = one.evidence.found if one.evidence else None, 1 - claim.rate
    low, high = map(tidy, found.interval(level)) if found else (None, None)
    about = {name: getattr(claim, name) for name in ("id", "where", "kind", "there", "arms", "needs", "page")}
    return about | {
        "claim": claim.says,
        "source": source,
        "here": here(one),
        "rule": claim.rule.words,
        "unit": one.evidence.unit if one.evidence else None,
        "n": one.units,
        "effect": tidy(found.value) if found else None,
        "interval": None if low is None else [low, high],
        "level": tidy(level) if found else None,
        "note": note_of(one),
        "verdict": one.verdict,
        "counted_as": one.counted_as,
    }


def pages(tables: Tables) -> dict[Path, str]:
    """Return the text of each file that the command writes."""
    found = judged(tables)
    rows = [json.dumps(record(source, one), ensure_ascii=False) for source, one in by_source(found)]
    text = README.read_text()
    if [text.count(mark) for mark in (BEGIN, END)] != [1, 1]:
        raise ConfigError(f"{README}: the sums stand between {BEGIN} and {END}; each must be there once")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    block = f"{BEGIN}\n{sums(by_source(found), 'source', found)}\n{END}"
    return {
        RESULTS / "claims.md": page(found),
        RESULTS / "claims.json": "[\n" + ",\n".join(rows) + "\n]\n",  # one claim per line
        README: f"{before}{block}{after}",
    }


@command
def main() -> None:
    for path, text in pages(Tables()).items():
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    main()

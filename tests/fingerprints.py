"""Record the fingerprints of every experiment and of every sweep's jobs, by which runs are found years later.

    python tests/fingerprints.py [--replace]

adds those of new experiments and sweeps to tests/fixtures/fingerprints.json, and says which others have changed. With
--replace it writes these too. Device and corpus are the same for all, so that only the config's part is recorded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from composing import handed_over

from mxstudy.cli import composing
from mxstudy.config import fingerprint, read_run
from mxstudy.help.group_choices import groups

PATH = Path(__file__).parent / "fixtures" / "fingerprints.json"
KINDS = ("experiment", "sweep")
FORKED, READ = ["parent=RUN", "at_step=9"], ["checkpoint=RUN"]
# What they cannot do without. It is not in the fingerprint's config, but in its corpus.
GIVEN = {
    "interventions": FORKED,
    "interventions_public_code": FORKED,
    "shakespeare": ["data.paths=[book.txt]"],
} | dict.fromkeys(("olmes", "nvidia_reasoning", "perplexity"), READ)
GIVEN["generate"] = [*READ, "prompt=text"]


def names() -> list[str]:
    """Return the names of all experiments and sweeps, like sweep/quickstart."""
    return [f"{kind}/{name}" for kind in KINDS for name in sorted(groups()[kind])]


def fingerprint_of(config: Any) -> str:
    """Return the first twelve digits of its fingerprint, on a GPU with no corpus."""
    return fingerprint(config, "cuda", {})[:12]


def composed(name: str) -> list[str]:
    """Return the fingerprints of its jobs, in order."""
    kind, _, choice = name.partition("/")
    loader, master, jobs = handed_over(f"+{kind}={choice}", *GIVEN.get(choice, []))
    return [fingerprint_of(read_run(one.values)) for one in composing.compose(loader, master, jobs)]


def recorded(name: str) -> list[str]:
    """Return its recorded fingerprints. Raises KeyError if it has none yet."""
    found = all_recorded()
    if name not in found:
        raise KeyError(f"{name} has no fingerprints in {PATH.name}; `python tests/fingerprints.py` adds them")
    return found[name]


def all_recorded() -> dict[str, list[str]]:
    return {name: words.split() for name, words in json.loads(PATH.read_text()).items()} if PATH.exists() else {}


def write(found: dict[str, list[str]]) -> None:
    """Write one line per name."""
    PATH.write_text(json.dumps({name: " ".join(found[name]) for name in sorted(found)}, indent=0) + "\n")


def main() -> int:
    before, now = all_recorded(), {name: composed(name) for name in names()}
    changed = [name for name in now if name in before and now[name] != before[name]]
    replaces = "--replace" in sys.argv[1:]
    write(now if replaces else now | {name: before[name] for name in changed})
    print("\n".join([f"{name}: other fingerprints" for name in changed]))
    print(f"{len(now)} recorded, {len(now.keys() - before.keys())} new, {len(changed)} changed")
    return int(bool(changed) and not replaces)


if __name__ == "__main__":
    sys.exit(main())

"""Record the code of earlier commits as digests, because older runs recorded their commit alone.

    python tests/code_by_commit.py

adds to mxstudy/tracking/code_by_commit.json every commit that a table in results/ names in place of its runs' code. A
table whose runs have the code `unknown` is exported once more after that.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from mxstudy.config import STUDIES
from mxstudy.tracking.code import BY_COMMIT, UNKNOWN, decides, digests_of, recorded

ROOT = Path(__file__).parent.parent


def git(*arguments: str, given: str = "") -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], input=given.encode(), check=True, stdout=-1).stdout


def sources_at(commit: str) -> dict[str, str]:
    """Return the files of mxstudy/ at a commit, by their paths below it."""
    names = [name for name in git("ls-tree", "-r", "--name-only", commit, "mxstudy").decode().split() if is_code(name)]
    text = git("cat-file", "--batch", given="".join(f"{commit}:{name}\n" for name in names))
    found = {}
    for name in names:
        head, _, text = text.partition(b"\n")
        size = int(head.split()[-1])
        found[name.removeprefix("mxstudy/")] = text[:size].decode()
        text = text[size + 1 :]
    return found


def is_code(name: str) -> bool:
    return name.endswith(".py")


def codes_at(commit: str) -> dict[str, str]:
    """Return the digest of each kind of run at a commit."""
    digests = digests_of(sources_at(commit))
    return {
        study: recorded({name: digest for name, digest in digests.items() if decides(name, study)})["code"]
        for study in STUDIES
    }


def commits_in(tables: Iterable[Path]) -> list[str]:
    """Return the commits of the runs in these tables that recorded no code and had no uncommitted changes."""
    rows = [row for table in tables for row in columns_of(table, "commit", "dirty", "code")]
    no_code = [row for row in rows if row.get("code", UNKNOWN) == UNKNOWN]
    return sorted({row["commit"] for row in no_code if row["commit"] and not row["dirty"]})


def columns_of(table: Path, *names: str) -> list[dict[str, Any]]:
    """Return the rows of a table, with those of these columns that it has."""
    has = pq.read_schema(table).names
    rows: list[dict[str, Any]] = pq.read_table(table, columns=[name for name in names if name in has]).to_pylist()
    return rows


def tables_of_runs() -> list[Path]:
    return sorted((ROOT / "results").glob("*_runs.parquet"))


def main() -> None:
    known = json.loads(BY_COMMIT.read_text()) if BY_COMMIT.exists() else {}
    new = [commit for commit in commits_in(tables_of_runs()) if commit not in known]
    known |= {commit: codes_at(commit) for commit in new}
    lines = [f"  {json.dumps(commit)}: {json.dumps(known[commit])}" for commit in sorted(known)]
    BY_COMMIT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{BY_COMMIT.name}: {len(new)} of {len(known)} commits are new")


if __name__ == "__main__":
    main()

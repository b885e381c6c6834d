"""Keep 100 mutants of a session of cosmic-ray, drawn by a fixed seed, and delete the others.

`python tests/mutants.py SESSION` draws places in the code, and one mutant of each, because most operators have about
ten and tests notice them alike. Types are left out: nothing computes with them.
"""

from __future__ import annotations

import ast
import random
import sqlite3
import sys
from pathlib import Path

COUNT, SEED = 100, 0
MUTANTS = """
    select module_path, start_pos_row, start_pos_col, operator_name, operator_args, occurrence, job_id
    from mutation_specs
"""


def spans_of_types(path: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return where each annotation of a file begins and ends."""
    nodes = list(ast.walk(ast.parse(Path(path).read_text())))
    types = [getattr(node, name, None) for node in nodes for name in ("annotation", "returns")]
    return [((t.lineno, t.col_offset), (t.end_lineno, t.end_col_offset)) for t in types if t is not None]


def drawn(session: sqlite3.Connection) -> set[str]:
    """Return the ids of the mutants to keep."""
    places: dict[tuple[str, int, int], list[tuple[str, str, int, str]]] = {}
    types: dict[str, list[tuple[tuple[int, int], tuple[int, int]]]] = {}
    for path, row, column, *mutant in session.execute(MUTANTS):
        if path not in types:
            types[path] = spans_of_types(path)
        if not any(begin <= (row, column) < end for begin, end in types[path]):
            places.setdefault((path, row, column), []).append(tuple(mutant))
    draw = random.Random(SEED)
    return {draw.choice(sorted(places[place]))[-1] for place in draw.sample(sorted(places), COUNT)}


if __name__ == "__main__":
    session = sqlite3.connect(sys.argv[1])
    kept = drawn(session)
    others = [(job,) for (job,) in session.execute("select job_id from work_items") if job not in kept]
    for table in ("work_results", "mutation_specs", "work_items"):
        session.executemany(f"delete from {table} where job_id = ?", others)
    session.commit()

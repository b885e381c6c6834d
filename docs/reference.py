"""An extension of Sphinx: the contents of the site, the reference of the config, and docstrings as plain text."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mxstudy.config.run import Run
from mxstudy.help.answers import in_words, places
from mxstudy.help.group_choices import groups, said_of
from mxstudy.help.meanings import Key, first_sentence, keys, sections

CONTENTS = {
    "Start": ("tutorial", "papers"),
    "Your own": tuple(f"guides/own_{name}" for name in ("data", "experiment", "precision", "format", "norm", "probe")),
    "Run and look": (
        *("guides/sweeps", "guides/slurm", "guides/several_gpus", "guides/evaluation", "guides/generation"),
        *("guides/dashboard", "tracking_server", "guides/report"),
    ),
    "Models": ("guides/students", "guides/mixture_of_experts"),
    "Explanations": ("numerics", "backends", "runs", "architecture", "glossary"),
    "Notebooks": ("notebooks/training", "notebooks/library"),
    "Reference": tuple(f"reference/{name}" for name in ("config", "groups", "library", "numerics", "model", "results")),
    "Results": ("results", "/results/README"),
    "Project": ("/CONTRIBUTING", "/CHANGELOG"),
}
PUBLISHED = "/results/README"  # the page with the contents of the pages of results/


def contents(name: str, pages: tuple[str, ...]) -> str:
    listed = "\n".join(page if page.startswith("/") else f"/docs/{page}" for page in pages)
    return f"\n```{{toctree}}\n:caption: {name}\n:hidden:\n\n{listed}\n```\n"


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    cells = ((cell.replace("|", chr(92) + "|").replace("\n", "<br>") for cell in row) for row in rows)
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in cells])


def of_keys(rows: Iterable[Key]) -> str:
    shown = ((key, f"`{key.default}`" if key.default else "-") for key in rows)
    cells = ((f"`{key.name}`", key.meaning, key.type, default, key.unit) for key, default in shown)
    return table("| key | meaning | type | default | unit |", cells)


def every_key() -> Iterator[str]:
    """Yield the parts of the page of all keys: those of every run, and a table a class."""
    common = {key.name for key in keys(Run)}
    first = {place.cls: place for place in reversed([*places()])}
    yield f"## Every run\n\n{of_keys(keys(Run))}"
    for cls, where in sections().items():
        paths, of = [path for path in where if path], in_words(first[cls])
        shown = ", ".join(f"`{path}`" for path in paths[:3]) + (" ..." if len(paths) > 3 else "")
        title = f"## {shown}\n\nIn {of}." if paths else f"## Runs of kind {of}"
        own = [key for key in keys(cls) if paths or key.name not in common]
        yield f"{title} {first_sentence(cls)}\n\n{of_keys(own)}"


def every_group() -> Iterator[str]:
    for group, choices in groups().items():
        rows = ((f"`{choice}`", said_of(group, choice)) for choice in choices)
        yield f"## {group}\n\n{table('| choice | what it is |', rows)}"


def api(module: str) -> str:
    """Return the directive that documents what a module exports: its own names, and those imported as themselves."""
    imported = importlib.import_module(module)
    tree = ast.parse(Path(str(imported.__file__)).read_text())
    own = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    imports = (alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names)
    names = getattr(imported, "__all__", None) or [
        *own,
        *(alias.name for alias in imports if alias.asname and not alias.name.isupper()),
    ]
    return f"```{{eval-rst}}\n.. automodule:: {module}\n   :members: {', '.join(names)}\n```"


PARTS = {"<!-- every key -->": every_key, "<!-- every group -->": every_group}


def fill(app: Any, page: str, source: list[str]) -> None:
    """Write what is generated in place of its mark, and the contents on the first page, which elsewhere has none."""
    for mark, parts in PARTS.items():
        if mark in source[0]:
            source[0] = source[0].replace(mark, "\n\n".join(parts()))
    source[0] = re.sub(r"<!-- api: (\S+) -->", lambda found: api(found[1]), source[0])
    if page == "README":
        source[0] += "".join(contents(name, pages) for name, pages in CONTENTS.items())
    if page == PUBLISHED.lstrip("/"):
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"


def as_text(app: Any, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    """Escape what reStructuredText would read as markup, outside of backticks and indented code."""
    for number, line in enumerate(lines):
        if not line.startswith(" "):
            parts = re.split(r"(`[^`]+`)", line)
            lines[number] = "".join(part if part[:1] == "`" else re.sub(r"([*|_\\`])", r"\\\1", part) for part in parts)


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", fill)
    app.connect("autodoc-process-docstring", as_text)
    return {"parallel_read_safe": True}

"""An extension of Sphinx: the contents of the site, and docstrings as the plain text that they are."""

from __future__ import annotations

import re
from typing import Any

CONTENTS = {
    "Start": ("tutorial", "papers"),
    "Your own": tuple(f"guides/own_{name}" for name in ("data", "experiment", "precision", "format", "norm", "probe")),
    "Run and look": (
        *("guides/sweeps", "guides/slurm", "guides/several_gpus", "guides/evaluation"),
        *("guides/dashboard", "tracking_server", "guides/report"),
    ),
    "Models": ("guides/students", "guides/mixture_of_experts"),
    "Explanations": ("numerics", "backends", "runs", "architecture", "glossary"),
    "Reference": tuple(f"reference/{name}" for name in ("config", "groups", "numerics", "model", "results")),
    "Results": ("results", "/results/README"),
    "Project": ("/CONTRIBUTING",),
}
PUBLISHED = "/results/README"  # the page with the contents of the pages of results/


def contents(name: str, pages: tuple[str, ...]) -> str:
    listed = "\n".join(page if page.startswith("/") else f"/docs/{page}" for page in pages)
    return f"\n```{{toctree}}\n:caption: {name}\n:hidden:\n\n{listed}\n```\n"


def fill(app: Any, page: str, source: list[str]) -> None:
    """Add the contents to the first page, which GitHub shows without them."""
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


def leave_out(app: Any, what: str, name: str, of: Any, skip: bool, options: Any) -> bool | None:
    """Return True for what a module imports from others than ours, else None: as Sphinx decides."""
    module = getattr(of, "__module__", None)
    return True if module and not module.startswith("mxstudy") else None


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", fill)
    app.connect("autodoc-process-docstring", as_text)
    app.connect("autodoc-skip-member", leave_out)
    return {"parallel_read_safe": True}

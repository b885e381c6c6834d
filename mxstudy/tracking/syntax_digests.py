"""Digests of Python files that change if their computation may change, but not if files move or prose is edited.

A digest ignores docstrings, comments and positions. It also ignores an import whose name can mean only one thing. If an
import is renamed (`import a as b`), or several files of the package define its name, the digest contains the
definition.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mxstudy.garbage import without_garbage_collection

DIGITS = 12  # hex digits of a digest
ROOT = "mxstudy"


class Imported(NamedTuple):
    """`from module import name as own`; `module` is '' for `import name as own`."""

    module: str
    name: str
    own: str

    @property
    def dotted(self) -> str:
        return ".".join(filter(None, (self.module, self.name)))


def file_digests(sources: Mapping[str, str]) -> dict[str, str]:
    """Return the digest of each file; a file of docstrings and imports has none. `sources`: by paths below mxstudy/."""
    with without_garbage_collection():
        files, found = ParsedFiles(sources), {}
        for file, tree in files.trees.items():
            words = words_of(tree)
            if len(words) > 2:
                for one in files.ambiguous_imports(file):
                    words += [one.own, *files.meaning(one)]
                found[file] = digest_of(words)
    return found


def borrowed(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return for each file those whose definitions are in its digest, so that it changes with them."""
    with without_garbage_collection():
        files = ParsedFiles(sources)
        origins = {file: map(files.origin, files.ambiguous_imports(file)) for file in files.trees}
        return {file: {found[0] for found in its if found} for file, its in origins.items()}


def digest_of(words: list[str]) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:DIGITS]


def definitions_in(tree: ast.Module) -> dict[str, ast.stmt]:
    """Return the functions, classes and variables that a module defines at its top, by name."""
    found: dict[str, ast.stmt] = {}
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            found[statement.name] = statement
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        found |= {target.id: statement for target in targets if isinstance(target, ast.Name)}
    return found


def imports_in(tree: ast.Module) -> list[Imported]:
    """Return the imports of a file, those within functions too, sorted by the names that they bind."""
    found = []
    for node in _statements(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = (getattr(node, "module", None) or "") if isinstance(node, ast.ImportFrom) else ""
            found += [Imported(module, each.name, each.asname or each.name.split(".")[-1]) for each in node.names]
    return sorted(set(found), key=lambda one: (one.own, one))


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements below a statement, without visiting expressions, which are most of a tree."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from _statements(child)


class ParsedFiles:
    """The parsed files of the package, by their paths below mxstudy/, and what they define."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.trees = {name: ast.parse(text) for name, text in sources.items()}
        self.definitions = {name: definitions_in(tree) for name, tree in self.trees.items()}
        self.count = Counter(name for own in self.definitions.values() for name in own)

    def ambiguous_imports(self, file: str) -> list[Imported]:
        """Return the imports of a file whose names could mean several things, so that its digest tells which."""
        imports = imports_in(self.trees[file])
        return [one for one in imports if one.own != one.name.split(".")[-1] or self.count[one.name] > 1]

    def meaning(self, one: Imported) -> list[str]:
        """Return the meaning of an import's name as words: its definition, the whole module, or its own dotted name.

        The last is for code outside these files: other packages, and rooms that decide nothing.
        """
        if found := self.origin(one):
            return words_of(found[1])
        return [] if one.dotted.startswith(f"{ROOT}.") else [one.dotted]

    def origin(self, one: Imported) -> tuple[str, ast.AST] | None:
        """Return the file that an import's name comes from, with its definition or the whole module, or None."""
        if file := _file_of(one.dotted, self.trees):
            return file, self.trees[file]
        file = _file_of(one.module, self.trees)
        return (file, self.definitions[file][one.name]) if file and one.name in self.definitions[file] else None


def _file_of(module: str, files: Mapping[str, Any]) -> str | None:
    path = module.removeprefix(f"{ROOT}.").replace(".", "/")
    return next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in files), None)


def words_of(tree: ast.AST) -> list[str]:
    """Return a tree as words, without the parts that change no number; the same in every version of Python."""
    words: list[str] = []
    _add_words(tree, words)
    return words


def _add_words(node: ast.AST, words: list[str]) -> None:
    """Append a tree as words, without the parts that change no number; the same in every version of Python."""
    words.append(type(node).__name__)
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            value = [each for each in value if not _is_silent(each)]
        if value is None or value == [] or name in ("ctx", "kind", "type_comment"):
            continue
        words.append(name)
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, ast.AST):
                _add_words(each, words)
            else:
                words.append(repr(each))
    words.append(")")


def _is_silent(statement: Any) -> bool:
    """Return whether it is a docstring, an import or a pass."""
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass)

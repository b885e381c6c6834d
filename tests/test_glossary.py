"""docs/glossary.md agrees with the names in the package, and every module that a page names exists.

It is read from the source with `ast`, so that nothing is imported. A rule is one test, which names all that breaks it.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise

import pytest
from test_architecture import HEIGHT, MODULES, ROOT, complain, own_imports, room

GLOSSARY = (ROOT / "docs/glossary.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OURS = {name: path for name, path in MODULES.items() if name.startswith("mxstudy.")}

DOTTED = re.compile(r"\b(?:mxstudy|analysis|benchmarks|hydra_plugins)(?:\.[A-Za-z_]\w*)+")
FILE = re.compile(r"\b(?:mxstudy|analysis|benchmarks|hydra_plugins|tests|conf|sweeps|docs|results)/[\w./-]*\w")
MADE = re.compile(r"^# (\S+\.\w+)$", re.MULTILINE)  # a file that a guide lets its reader make


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def defined(module: str) -> Iterator[str]:
    """Yield every name that a module defines, at its top or inside."""
    for node in ast.walk(tree(module)):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


@functools.cache
def at_the_top(module: str) -> frozenset[str]:
    """Return the names that one can import from a module."""
    found = set()
    typed = (node.body for node in tree(module).body if isinstance(node, ast.If))  # for the type checker
    for node in itertools.chain(tree(module).body, *typed):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Assign(targets=targets):
                found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            case ast.ImportFrom(names=names) | ast.Import(names=names):
                found |= {alias.asname or alias.name for alias in names}
    return frozenset(found)


def exists(name: str) -> bool:
    """Return whether that is a module, the beginning of one, or a name in one."""
    module, _, last = name.rpartition(".")
    is_folder = (ROOT / name.replace(".", "/")).is_dir()
    return name in MODULES or is_folder or (module in MODULES and last in at_the_top(module))


def section(title: str) -> str:
    return GLOSSARY.split(f"\n## {title}\n")[1].split("\n## ")[0]


def cells(text: str, head: str) -> Iterator[list[list[str]]]:
    """Yield the rows below such a table's head. A cell is what it has in backticks, or else its text."""
    below = text.split(f"| {head} |", 1)[1].split("\n\n")[0].splitlines()[2:]
    for row in below:
        yield [re.findall(r"`([^`]+)`", cell) or [cell] for cell in row.strip("| ").split(" | ")]


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def same(names: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return {name: places for name, places in names.items() if len(places) > 1}


def test_every_module_and_file_that_a_page_names_exists() -> None:
    made = {made for page in PAGES for made in MADE.findall(page.read_text())}
    modules = {path.removesuffix(".py").replace("/", ".") for path in made}
    names = ((page.name, name) for page in PAGES for name in DOTTED.findall(page.read_text()))
    files = ((page.name, name) for page in PAGES for name in FILE.findall(page.read_text()))
    complain("modules that a page names", (f"{p}: {n}" for p, n in names if n not in modules and not exists(n)))
    complain("files that a page names", (f"{p}: {n}" for p, n in files if n not in made and not is_there(n)))


def is_there(name: str) -> bool:
    """Return whether that is a file, a folder, or a prefix of tables in results/."""
    path = ROOT / re.sub(r"/NAME\b.*", "", name)  # one that a reader would make
    return path.exists() or (name.startswith("results/") and any(path.parent.glob(f"{path.name}*")))


EVERYWHERE = {f"mxstudy.{name}" for name in ("config", "reader", "garbage", "small_files", "whole_files")}


def test_the_map_has_the_imports_of_every_room() -> None:
    short = {height.removeprefix("mxstudy."): height for height in HEIGHT}
    shown = list(cells((ROOT / "docs/architecture.md").read_text(), "room"))
    assert sorted(name for names, *_ in shown for name in names) == sorted(short)
    for names, _, below in shown:
        rooms = {short[name] for name in names}
        found = {room(own) for module in MODULES if room(module) in rooms for own in own_imports(module)}
        mapped = {short[name] for name in below if name in short}
        assert mapped == found - rooms - EVERYWHERE, names


def test_the_ways_through_the_house_are_those_of_the_code() -> None:
    """In docs/architecture.md, each function in a line of a way is defined in one of the files of that line."""
    rows = [" ".join(row.split(" | ")[:2]) for table in ways() for row in table]
    assert len(rows) > 30
    complain("functions that are not in their files", (f"{name}: {row}" for row in rows for name in not_in_files(row)))


def test_the_ways_through_the_house_go_down() -> None:
    heights = {height.removeprefix("mxstudy."): number for height, number in HEIGHT.items()}

    def height(row: str) -> int:
        file = re.findall(r"`([^`]+)`", row)[0]
        return heights[file.removesuffix(".py").partition("/")[0]]

    upward = (f"from {a}\n    to {b}" for table in ways() for a, b in pairwise(table) if height(a) < height(b))
    complain("lines that lead up", upward)


def ways() -> list[list[str]]:
    """Return the tables of the ways in docs/architecture.md, each as its rows."""
    page = (ROOT / "docs/architecture.md").read_text().split("\n## Three ways")[1].split("\n## ")[0]
    tables = [[row for row in part.splitlines() if row.startswith("| `")] for part in page.split("\n\n")]
    return [table for table in tables if table]


def not_in_files(row: str) -> Iterator[str]:
    """Yield the names in backticks that none of the files in backticks defines. `A.b` is b in the class A."""
    named = re.findall(r"`([^`]+)`", row)
    files = [name for name in named if re.search(r"/|\.py$", name)]
    known = {name for file in files for name in qualified(ast.parse((ROOT / "mxstudy" / file).read_text()))}
    yield from (name for name in named if name not in files and name not in known)


def qualified(tree: ast.AST, inside: str = "") -> Iterator[str]:
    """Yield the names of the functions, classes and values at a module's top, and of a class's methods as `A.b`."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.ClassDef(name=name):
                yield inside + name
                yield from qualified(node, f"{inside}{name}.")
            case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield inside + name
            case ast.Assign(targets=targets):
                yield from (inside + target.id for target in targets if isinstance(target, ast.Name))


def test_the_step_in_the_page_is_that_of_the_code() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/architecture.md").read_text(), re.DOTALL)
    (step,) = (node for node in tree("mxstudy.train.loop").body if getattr(node, "name", "") == "train_step")
    assert isinstance(step, ast.FunctionDef)
    step.body = step.body[1:] if ast.get_docstring(step) else step.body
    lines = [line for line in ast.unparse(step).splitlines() if "run.mark(" not in line]
    assert ast.unparse(ast.parse(shown)).splitlines() == lines


def test_a_word_is_in_the_glossary_once_with_its_place() -> None:
    rows = [row for part in GLOSSARY.split("\n## ")[1:] if "| word |" in part for row in cells(part, "word")]
    words = [word for (cell, *_) in rows for word in cell[0].split(", ")]
    complain("words that are there twice", {word for word in words if words.count(word) > 1})
    complain("words without a place", (row[0][0] for row in rows if not all(map(exists, row[2]))))
    assert len(rows) > 50


def test_two_modules_share_a_name_only_if_the_glossary_says_how_they_differ() -> None:
    listed = [(set(names), places) for names, places, _ in cells(section("Same name, two things"), "file")]

    def is_listed(stem: str, room: str) -> bool:
        return any(names in ({stem}, {"any"}) or stem in names for names, places in listed if room in places)

    names: dict[str, list[str]] = defaultdict(list)
    for module, path in OURS.items():
        if path.stem not in ("__init__", "__main__"):
            names[path.stem].append(module.rpartition(".")[0])
    shared = same(names)
    complain(
        "modules with the name of another",
        (f"{room}.{stem}" for stem, rooms in shared.items() for room in rooms if not is_listed(stem, room)),
    )
    stale = (f"{stem} in {p}" for stems, places in listed for stem in stems - {"any"} for p in places if p not in OURS)
    complain("places that the glossary lists in vain", stale)
    complain(
        "names that the glossary lists in vain", {stem for stems, _ in listed for stem in stems - {"any", *shared}}
    )


@pytest.mark.integration
def test_two_classes_share_a_name_only_as_settings_and_what_they_set() -> None:
    listed = {
        name: sorted([settings[0], thing[0]])
        for names, settings, thing in cells(section("Same name, two things"), "class")
        for name in names
    }
    names: dict[str, list[str]] = defaultdict(list)
    for module in sorted(OURS):
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names[node.name].append(module)
    assert same(names) == listed


def test_words_that_mean_two_things_are_in_the_glossary() -> None:
    twice = [word[0] for word, *_ in cells(section("Same name, two things"), "one word")]
    complain(
        "words without a row", (word for word in twice if f"\n| {word} |" not in GLOSSARY.split("## Same name")[0])
    )
    assert len(twice) > 5


@pytest.mark.integration
def test_earlier_words_are_no_names() -> None:
    words = {word[0].partition(" (")[0] for word, _ in cells(section("Earlier names"), "earlier word")}
    assert len(words) > 4
    retired = words | {f"{word}s" for word in words}
    complain("earlier words", (f"{m}.{name}" for m in OURS for name in defined(m) if snake_case(name) in retired))
    complain("earlier words as modules", (m for m in OURS if m.rpartition(".")[2] in retired))


def test_earlier_modules_do_not_come_back() -> None:
    rows = list(cells(section("Earlier names"), "earlier module"))
    assert len(rows) > 5
    earlier = (f"{room}.{name}" for names, rooms, _ in rows for room in rooms for name in names)
    complain("earlier modules", (module for module in earlier if module in OURS))

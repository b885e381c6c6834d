"""Imports go down, third-party packages stay in their rooms, files stay small: read from the source with `ast`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path for top in ("mxstudy", "hydra_plugins", "analysis", "benchmarks") for path in ROOT.glob(f"{top}/**/*.py")
)
MAX_LINES = 400

# From the bottom up; a room imports from itself and from rows below its own.
LAYERS = [
    ["mxstudy.reader"],
    ["mxstudy.config"],
    ["mxstudy.numerics"],
    ["mxstudy.model", "mxstudy.data"],
    ["mxstudy.probes", "mxstudy.tracking"],
    ["mxstudy.train"],
    ["mxstudy.evaluation"],
    ["mxstudy.results"],
    ["mxstudy.studies"],
    ["mxstudy.launch"],
    ["mxstudy.cli"],
    ["mxstudy.__main__", "hydra_plugins"],
]
HEIGHT = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}

# Who may import what from outside; what is not named here may be imported anywhere.
THIRD_PARTY = {
    "hydra": {"mxstudy.cli", "hydra_plugins"},
    "omegaconf": {"mxstudy.cli", "hydra_plugins"},
    "mlflow": {"mxstudy.tracking"},
    "datasets": {"mxstudy.data"},
    "tokenizers": {"mxstudy.data"},
    "submitit": {"mxstudy.launch"},
    "lm_eval": {"mxstudy.evaluation"},
    "torchao": {"mxstudy.numerics"},
    "triton": {"mxstudy.numerics"},
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in FILES}


def room(module: str) -> str:
    """mxstudy.data.corpus lives in mxstudy.data; outside mxstudy a top folder is one room."""
    return ".".join(module.split(".")[: 2 if module.startswith("mxstudy.") else 1])


def imports(module: str) -> Iterator[str]:
    """The full names that a module imports when it runs, at its top or inside a function."""
    body = ast.parse(MODULES[module].read_text())
    todo: list[ast.AST] = [body]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue  # for the type checker alone
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        todo += ast.iter_child_nodes(node)


def own_module(name: str) -> str | None:
    """The module of ours that an imported name is, or lives in."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def own_imports(module: str) -> set[str]:
    return {own for name in imports(module) if (own := own_module(name)) not in (None, module, "mxstudy")}


@pytest.mark.parametrize("module", MODULES)
def test_a_file_is_one_idea(module: str) -> None:
    assert len(MODULES[module].read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("module", [m for m in MODULES if room(m) in HEIGHT])
def test_imports_go_down(module: str) -> None:
    mine = room(module)
    upward = {own for own in own_imports(module) if room(own) != mine and HEIGHT[room(own)] >= HEIGHT[mine]}
    assert not upward


def test_every_module_has_a_layer() -> None:
    rooms = {room(module) for module in MODULES} - {"mxstudy", "analysis", "benchmarks"}
    assert rooms <= HEIGHT.keys()


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {module: own_imports(module) for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("module", MODULES)
def test_third_party_packages_stay_in_their_rooms(module: str) -> None:
    packages = {name.partition(".")[0] for name in imports(module)}
    astray = {p for p in packages & THIRD_PARTY.keys() if room(module) not in THIRD_PARTY[p] | {"benchmarks"}}
    assert not astray


def test_figures_read_runs_through_results_alone() -> None:
    figures = [module for module in MODULES if room(module) == "analysis"]
    assert all(own_imports(m) <= {"mxstudy.results", *figures} for m in figures)

"""Imports go down, third-party packages stay in their rooms, and files stay small, as read from the source with `ast`.

A rule is one test, which goes through all modules and names every one that breaks it.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterable, Iterator
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
    ["mxstudy.garbage", "mxstudy.small_files", "mxstudy.whole_files"],
    ["mxstudy.config"],
    ["mxstudy.compat", "mxstudy.distributed", "mxstudy.host_copies"],
    ["mxstudy.numerics"],
    ["mxstudy.kernels"],
    ["mxstudy.blocks"],
    ["mxstudy.model", "mxstudy.data"],
    ["mxstudy.probes", "mxstudy.tracking"],
    ["mxstudy.train"],
    ["mxstudy.evaluation"],
    ["mxstudy.results"],
    ["mxstudy.studies"],
    ["mxstudy.students"],
    ["mxstudy.launch"],
    ["mxstudy.words", "mxstudy.rehearsal", "mxstudy.help", "mxstudy.scripts"],
    ["mxstudy.explain", "mxstudy.completion"],
    ["mxstudy.cli"],
    ["mxstudy.__main__", "mxstudy.library", "hydra_plugins"],
]
HEIGHT = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}

# Who may import what from outside. What is not named here may be imported anywhere.
THIRD_PARTY = {
    "hydra": {"mxstudy.cli", "mxstudy.explain", "mxstudy.words", "hydra_plugins", "mxstudy.compat"},
    "omegaconf": {"mxstudy.cli", "mxstudy.explain", "hydra_plugins", "mxstudy.compat"},
    "mlflow": {"mxstudy.tracking", "mxstudy.compat"},
    "datasets": {"mxstudy.data"},
    "tokenizers": {"mxstudy.data"},
    "submitit": {"mxstudy.launch", "mxstudy.compat"},
    "lm_eval": {"mxstudy.evaluation", "mxstudy.compat"},
    "transformers": {"mxstudy.evaluation"},
    "torchao": {"mxstudy.compat"},
    "triton": {"mxstudy.kernels"},
}

# What no module that `import mxstudy.results` leads to may import, not even inside a function.
NOT_FOR_RESULTS = {"torch", "torchao", "triton", "lm_eval", "datasets", "tokenizers", "hydra", "omegaconf", "submitit"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in FILES}


def room(module: str) -> str:
    """Return the room of a module: mxstudy.data of mxstudy.data.corpus. Outside mxstudy a top folder is one room."""
    return ".".join(module.split(".")[: 2 if module.startswith("mxstudy.") else 1])


def nodes(module: str) -> Iterator[ast.AST]:
    """Yield all that a module runs, at its top or inside a function."""
    todo: list[ast.AST] = [ast.parse(MODULES[module].read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue  # for the type checker alone
        yield node
        todo += ast.iter_child_nodes(node)


@functools.cache
def imports(module: str) -> frozenset[str]:
    """Return the full names that a module imports."""
    names: set[str] = set()
    for node in nodes(module):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def own_module(name: str) -> str | None:
    """Return our module that an imported name is, or lives in."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


@functools.cache
def own_imports(module: str) -> frozenset[str]:
    found = {own_module(name) for name in imports(module)} - {None, module, "mxstudy"}
    return frozenset(map(str, found))


def packages(module: str) -> set[str]:
    """Return the top names of what a module imports."""
    return {name.partition(".")[0] for name in imports(module)}


def reached_from(module: str) -> set[str]:
    """Return our modules that run when one is imported: what it imports, and the packages around these."""
    found: set[str] = set()
    todo = [module]
    while todo:
        module = todo.pop()
        if module in MODULES and module not in found:
            found.add(module)
            todo += [*own_imports(module), module.rpartition(".")[0]]
    return found


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(module: str) -> Iterator[str]:
    """Yield the private names of third-party packages that a module uses, and every private name for `getattr`.

    Examples are torch._dynamo, nn._x after `from torch import nn`, getattr(x, "_y"), and "_y" where `getattr` takes a
    name from a table.
    """
    third_party = packages(module) - sys.stdlib_module_names - {"mxstudy", "hydra_plugins", "analysis", "benchmarks"}
    known = aliases(module)
    attributes = (ast.unparse(node) for node in nodes(module) if isinstance(node, ast.Attribute))
    resolved = {known.get(first, first) + dot + rest for first, dot, rest in (a.partition(".") for a in attributes)}
    for name in {*imports(module), *resolved}:
        if name.partition(".")[0] in third_party and is_private(name):
            yield name
    yield from filter(is_private, names_for_getattr(module))


def aliases(module: str) -> dict[str, str]:
    """Return {name in the module: full name} of what a module imports, such as {nn: torch.nn}."""
    found = {}
    for node in nodes(module):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def names_for_getattr(module: str) -> Iterator[str]:
    """Yield the strings that getattr, setattr, hasattr and delattr take.

    If one of them takes a variable, yield every string of every tuple.
    """
    takes_a_variable = False
    for node in nodes(module):
        match node:
            case ast.Call(func=ast.Name(id="getattr" | "setattr" | "hasattr" | "delattr"), args=[_, name, *_]):
                takes_a_variable |= not isinstance(name, ast.Constant)
                yield from constants([name])
    if takes_a_variable:
        tables = (node for node in nodes(module) if isinstance(node, ast.Tuple | ast.List | ast.Set))
        yield from (name for table in tables for name in constants(table.elts))


def constants(expressions: Iterable[ast.expr]) -> Iterator[str]:
    yield from (e.value for e in expressions if isinstance(e, ast.Constant) and isinstance(e.value, str))


def complain(about: str, offenders: Iterable[str]) -> None:
    lines = sorted(offenders)
    assert not lines, "\n  ".join([f"{about}:", *lines])


def test_a_file_is_one_idea() -> None:
    tests = Path(__file__).parent
    files = MODULES | {str(path.relative_to(tests.parent)): path for path in tests.rglob("*.py")}
    sizes = {name: len(path.read_text().splitlines()) for name, path in files.items()}
    complain(f"more than {MAX_LINES} lines", (f"{n}: {size}" for n, size in sizes.items() if size > MAX_LINES))


def test_every_module_has_a_layer() -> None:
    rooms = {room(module) for module in MODULES} - {"mxstudy", "analysis", "benchmarks"}
    complain("rooms without a layer", rooms - HEIGHT.keys())
    complain("layers without a room", HEIGHT.keys() - rooms)


def test_imports_go_down() -> None:
    upward = (
        f"{module} imports {own}"
        for module in MODULES
        if room(module) in HEIGHT
        for own in own_imports(module)
        if room(own) != room(module) and HEIGHT.get(room(own), len(LAYERS)) >= HEIGHT[room(module)]
    )
    complain("imports that do not go down", upward)


def test_students_are_a_wing_of_their_own() -> None:
    """What pre-trains a decoder never meets the students: the table of studies names their modules and imports none."""
    visitors = (m for m in MODULES if room(m) not in ("mxstudy.students", "benchmarks"))
    complain(
        "imports of students",
        (f"{m} imports {own}" for m in visitors for own in own_imports(m) if room(own) == "mxstudy.students"),
    )


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {module: own_imports(module) for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_third_party_packages_stay_in_their_rooms() -> None:
    astray = (
        f"{module} imports {package}"
        for module in MODULES
        for package in packages(module) & THIRD_PARTY.keys()
        if room(module) not in THIRD_PARTY[package] | {"benchmarks"}
    )
    complain("packages outside of their rooms", astray)


def test_compat_knows_nothing_of_ours_but_the_reader() -> None:
    allowed = {"mxstudy.reader", "mxstudy.compat"}
    inside = [module for module in MODULES if room(module) == "mxstudy.compat"]
    complain("imports of compat", (f"{m} imports {own}" for m in inside for own in own_imports(m) - allowed))


@pytest.mark.integration
def test_only_compat_reaches_into_other_packages() -> None:
    inside = (
        f"{module} uses {name}"
        for module in MODULES
        if room(module) not in ("mxstudy.compat", "benchmarks")
        for name in private_names(module)
    )
    complain("use of what is private, outside of mxstudy.compat", inside)


def test_only_save_figure_saves_figures() -> None:
    """matplotlib's own would take `$` in a name for a formula."""
    own = "mxstudy.results.panels"
    found = {module for module in MODULES for node in nodes(module) if is_savefig(node)}
    complain("savefig beside results.save_figure", found - {own})
    assert own in found


def is_savefig(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "savefig"


@pytest.mark.integration
def test_small_files_are_written_whole() -> None:
    """A crash may tear only a log, the lock of a queue, or a file that only grows and has its size recorded."""
    torn = {"mxstudy.launch.local": 2, "mxstudy.data.growing_shards": 1}
    found: dict[str, list[str]] = {}
    for module in MODULES:
        if room(module).startswith("mxstudy.") and module != "mxstudy.whole_files":
            writes = [ast.unparse(node) for node in nodes(module) if isinstance(node, ast.Call) and is_write(node)]
            found[module] = [call for call in writes if not call.startswith("temporary.")]
    others = {module: calls for module, calls in found.items() if len(calls) != torn.get(module, 0)}
    complain("writes beside mxstudy.whole_files", (f"{m}: {'; '.join(calls)}" for m, calls in others.items()))


def is_write(call: ast.Call) -> bool:
    """Return whether a call truncates, creates or replaces a file."""
    name = ast.unparse(call.func).rpartition(".")[2]
    modes = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    opened = name == "open" and any(set(mode) <= set("rwbt+") and "w" in mode for mode in modes)
    return opened or name in ("write_text", "write_bytes") or ast.unparse(call.func) == "os.replace"


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("import torch\ntorch._dynamo.reset()", "torch._dynamo.reset"),
        ("from torch import nn\nnn._x", "torch.nn._x"),
        ("import torch.nn as layers\nlayers._x", "torch.nn._x"),
        ("getattr(module, '_hooks')", "_hooks"),
        ("HOOKS = '_hooks', '_more'\nany(getattr(module, hook) for hook in HOOKS)", "_hooks"),
    ],
)
def test_what_is_private_is_found(lines: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.py").write_text(lines)
    monkeypatch.setitem(MODULES, "one", tmp_path / "one.py")
    imports.cache_clear()
    assert name in private_names("one")
    imports.cache_clear()


@pytest.mark.integration
def test_nothing_is_global_in_a_process_that_a_function_changes() -> None:
    inside = [module for module in MODULES if room(module) != "mxstudy.compat"]
    complain("values of a module that a function changes", (f"{m}: {line}" for m in inside for line in changes(m)))


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("TABLE[key] = 1", True),
        ("del TABLE[key]", True),
        ("TABLE.update(a=1)", True),
        ("TABLE.inner.append(key)", True),
        ("TABLE.name = key", True),
        ("global TABLE", True),
        ("TABLE.get(key)", False),
        ("TABLE = {}; TABLE[key] = 1", False),
        ("key.update(TABLE)", False),
    ],
)
def test_what_a_function_changes_is_found(
    line: str, is_found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.py").write_text(f"TABLE = {{}}\ndef function(key):\n    {line}")
    monkeypatch.setitem(MODULES, "one", tmp_path / "one.py")
    assert bool(list(changes("one"))) == is_found


MUTATORS = {"append", "extend", "insert", "add", "discard", "update", "setdefault", "pop", "popitem", "remove", "clear"}


def changes(module: str) -> Iterator[str]:
    """Yield the lines in which a function changes a value at the top of its module, or of another module of ours."""
    tree = ast.parse(MODULES[module].read_text())
    shared = {name.id for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) for name in stored(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and own_module(str(node.module)):
            shared |= {alias.asname or alias.name for alias in node.names}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.Lambda):
            continue
        arguments = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
        own = arguments | {name.id for name in stored(function)}
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                yield ast.unparse(node)
            base = changed_by(node)
            while isinstance(base, ast.Attribute | ast.Subscript):
                base = base.value
            if isinstance(base, ast.Name) and base.id in shared - own:
                yield ast.unparse(node)


def stored(node: ast.AST) -> Iterator[ast.Name]:
    """Yield the names that are assigned somewhere in the node."""
    yield from (name for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store))


def changed_by(node: ast.AST) -> ast.expr | None:
    """Return what is changed in place: x of x[i] = y, del x[i], x.a = y, x.append(y). Else return None."""
    match node:
        case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
            return value
        case ast.Attribute(value=value, ctx=ast.Store() | ast.Del()):
            return value
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in MUTATORS:
            return value
    return None


def test_results_are_read_without_torch() -> None:
    heavy = (
        f"{module} imports {package}"
        for module in reached_from("mxstudy.results")
        for package in packages(module) & NOT_FOR_RESULTS
    )
    complain("imports that mxstudy.results leads to", heavy)


def test_figures_read_runs_through_results_alone() -> None:
    figures = [module for module in MODULES if room(module) == "analysis"]
    allowed = {"mxstudy.results", *figures}
    complain("imports of figures", (f"{m} imports {own}" for m in figures for own in own_imports(m) - allowed))

"""Make a copy of the package that is edited as a reader of the README would edit it, and run it."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from mxstudy.tracking.journal import read_journal

ROOT = Path(__file__).parent.parent
PARTS = ("mxstudy", "conf", "sweeps", "hydra_plugins")
SAME = ("train.device=cpu",)  # set for every run, so that numbers can be compared to the bit


# A process that has imported everything slow except the package, and forks for each command that it reads. A command is
# a line of JSON with the folder to run in, the file for its output, and the arguments. The answer is the exit code.
SERVER = """
import json, os, runpy, sys
import torch, torch._inductor.standalone_compile, torch.distributed.checkpoint, torch.distributed.fsdp, torch._dynamo
import hydra, pandas
torch.set_num_threads(1)
for line in sys.stdin:
    folder, output, sys.argv[1:] = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.chdir(folder)
sys.path.insert(0, folder)
os.environ["PYTHONPATH"] = folder
file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(file, 1)
os.dup2(file, 2)
runpy.run_module("mxstudy", run_name="__main__", alter_sys=True)
"""


@functools.cache
def server() -> subprocess.Popen[str]:
    """Start the server, which ends with the tests, because they close its input."""
    path = os.pathsep.join(part for part in sys.path if part and not Path(part, "mxstudy").exists())
    return subprocess.Popen(
        [sys.executable, "-c", SERVER],
        cwd="/",
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


class Block(NamedTuple):
    """Code, and where it goes: a new file, or `where` (in, above) the statement of that name in a file."""

    path: str
    where: str
    name: str
    code: str


class Copy:
    """The package in a folder of its own. All copies share `cache`, a folder of tokenised corpora."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        for part in PARTS:
            shutil.copytree(ROOT / part, folder / part)

    def add(self, block: Block) -> None:
        path = self.folder / block.path
        if not block.where:
            assert not path.exists()
            path.write_text(block.code)
            return
        path.write_text(added(path.read_text(), block))

    def replace(self, path: str, old: str, new: str) -> None:
        text = (self.folder / path).read_text()
        assert text.count(old) == 1, (old, text.count(old))
        (self.folder / path).write_text(text.replace(old, new))

    def run(self, command: str, *words: str) -> tuple[int, str]:
        """Run a command of `python -m mxstudy`, and return its exit code and output."""
        python, *rest = shlex.split(command)
        assert (python, rest[:2]) == ("python", ["-m", "mxstudy"])
        output = self.folder / "said"
        line = [str(self.folder), str(output), [*rest[2:], *SAME, f"cache_dir={self.cache}", *words]]
        asked, answers = server().stdin, server().stdout
        assert asked is not None
        assert answers is not None
        print(json.dumps(line), file=asked, flush=True)
        return int(answers.readline()), output.read_text()

    def trained(self, command: str, *words: str) -> str:
        """Return the output of the command, which must end well."""
        code, said = self.run(command, *words)
        assert code == 0, said
        return said

    def losses(self, runs: str = "runs/rehearsals") -> list[float]:
        return losses_in(self.folder, runs)


def journal_in(folder: Path, runs: str = "runs/rehearsals") -> list[dict[str, Any]]:
    """Return the journal of the one run in that folder, without what `rerun` has moved away."""
    (path,) = (path for path in folder.glob(f"{runs}/*/*/metrics.jsonl") if ".old" not in path.parent.name)
    return read_journal(path)


def losses_in(folder: Path, runs: str = "runs/rehearsals") -> list[float]:
    """Return the losses of training and validation."""
    return [row[key] for row in journal_in(folder, runs) for key in ("loss", "validation_loss") if key in row]


def added(text: str, block: Block) -> str:
    """Return the text of a Python file with the block in it."""
    (statement,) = (node for node in ast.parse(text).body if block.name in names_of(node))
    lines = text.splitlines(keepends=True)
    if block.where == "above":
        decorators = getattr(statement, "decorator_list", [])
        line = min([statement.lineno, *(each.lineno for each in decorators)]) - 1
        while lines[line - 1].startswith("#"):  # a comment belongs to what follows it
            line -= 1
        gap = "" if block.code.startswith(("import", "from")) else "\n\n"
        lines.insert(line, block.code + gap)
        return "".join(lines)
    first, last = last_row(statement)
    if isinstance(last, ast.BinOp):  # a union, on one line
        line = last.end_lineno or 0
        lines[line - 1] = lines[line - 1].rstrip("\n") + " " + block.code
    else:
        lines.insert(last.end_lineno or 0, re.sub("^(?=.)", " " * first.col_offset, block.code, flags=re.M))
    return "".join(lines)


def names_of(node: Any) -> set[str]:
    targets = getattr(node, "targets", [getattr(node, "target", node)])
    return {name for target in targets if (name := getattr(target, "id", getattr(target, "name", None)))}


def last_row(statement: Any) -> tuple[Any, Any]:
    """Return the beginning and the end of the last row of a table, of the last line of a class, or of a union."""
    if isinstance(statement, ast.ClassDef):
        return statement.body[-1], statement.body[-1]
    value = statement.value
    if isinstance(value, ast.Dict):
        return value.keys[-1], value.values[-1]
    if isinstance(value, ast.DictComp):
        value = value.generators[0].iter
    return (value, value) if isinstance(value, ast.BinOp) else (value.elts[-1], value.elts[-1])

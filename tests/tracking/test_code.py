"""A run's code identity changes with what decides numbers and with nothing else, and is compared."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from code_by_commit import codes_at, commits_in, tables_of_runs
from each import each
from test_architecture import MODULES, imports, own_imports

from mxstudy.config import STUDIES
from mxstudy.studies.perplexity.run import totals_of
from mxstudy.tracking import code
from mxstudy.tracking.code import (
    BY_COMMIT,
    DECIDES,
    DECIDES_NOTHING,
    PACKAGE,
    UNCALLED,
    changed_files,
    changes,
    code_at,
    code_in,
    code_of,
    decides,
    different_code,
    recorded,
)
from mxstudy.tracking.syntax_digests import borrowed, file_digests

SOURCE = '''"""What it is."""

import math
from somewhere import own

RATE = 0.4  # of a Gaussian


class Norm:
    """A norm."""

    eps: float = 1e-5

    def rms(self, x):
        """Return it."""
        from elsewhere import later

        return own(x) * RATE + self.eps
'''
SAME = {
    "a docstring": ("Return it.", "Return the RMS of x."),
    "a comment": ("# of a Gaussian", "# by quadrature"),
    "a module that has moved": ("from somewhere import", "from somewhere.far.away import"),
    "blank lines and positions": ("\n\n\nclass", "\n\n\n\n\nclass"),
    "how it is written": ("* RATE + self.eps", "* (RATE)+ (self.eps)"),
    "a pass": ('"""Return it."""\n', '"""Return it."""\n        pass\n'),
}
OTHER = {
    "a constant": ("RATE = 0.4", "RATE = 1.2"),
    "a default": ("1e-5", "1e-6"),
    "an operation": ("+ self.eps", "- self.eps"),
    "an order": ("own(x) * RATE", "RATE * own(x)"),
    "a name": ("def rms", "def root"),
    "a type": ("= 0.4", "= '0.4'"),
}


def digest(source: str) -> str | None:
    """Return the digest of one file by itself, or None if it has nothing but docstrings and imports."""
    return file_digests({"a.py": source}).get("a.py")


def edited(old: str, new: str) -> str:
    assert old in SOURCE
    return SOURCE.replace(old, new)


@each("edit", SAME)
def test_what_changes_no_number_is_not_in_the_digest(edit: str) -> None:
    assert digest(edited(*SAME[edit])) == digest(SOURCE)


@each("edit", OTHER)
def test_what_may_change_one_is(edit: str) -> None:
    assert digest(edited(*OTHER[edit])) != digest(SOURCE)


def test_files_are_a_multiset_and_their_names_do_not_count() -> None:
    code = recorded({"a.py": "1", "b.py": "2", "c.py": "2"})["code"]
    assert (
        code
        == recorded({"x/b.py": "2", "a.py": "2", "d.py": "1"})["code"]
        != recorded({"a.py": "1", "b.py": "2"})["code"]
    )
    assert digest('"""Only prose."""\nimport math\n') is None


def test_every_kind_of_run_has_its_files_and_they_are_there() -> None:
    assert DECIDES.keys() == STUDIES.keys()
    missing = {place for places in DECIDES.values() for place in places if not (PACKAGE / place).exists()}
    assert missing == set()
    for study in STUDIES:
        files = code_of(study)["code_files"]
        assert len(files) > 10
        assert not any(name.startswith(("tracking", "launch", "results")) for name in files)
        measures = {"approximation": {"probes/saturation.py"}}
        assert {name for name in files if name.startswith("probes/")} == measures.get(study, set())
    assert "numerics/formats.py" in code_of("pretrain")["code_files"]
    assert "students/model.py" not in code_of("pretrain")["code_files"]
    assert not decides("kernels/norm_outputs.py", "pretrain")  # only probes call it
    assert decides("studies/perplexity/check.py", "perplexity")
    assert decides("studies/approximation/tables.py", "approximation")
    assert decides("model/norm.py", "prepare_data") is decides("launch/plan.py", "a new kind") is False
    assert decides("students/model.py", "a new kind")
    assert decides("my_norm.py", "pretrain")  # in no room of ours
    assert decides("mine/norm.py", "evaluate")
    of_data = [path for path in code_of("prepare_data")["code_files"] if not path.startswith("data/")]
    assert not of_data, "a new room is in a row of DECIDES, or in DECIDED_BY_NONE"


def test_what_computes_with_a_model_may_import_of_compat_only_what_decides() -> None:
    rooms = ("numerics", "kernels", "blocks", "model")
    used = {
        own.removeprefix("mxstudy.").replace(".", "/") + ".py"
        for module in MODULES
        if module.startswith(tuple(f"mxstudy.{room}" for room in rooms))
        for own in own_imports(module)
        if own.startswith("mxstudy.compat.")
    }
    assert "compat/torch_grouped_mm.py" in used
    kinds = DECIDES.keys() - {"prepare_data"}
    assert [(path, kind) for path in sorted(used) for kind in sorted(kinds) if not decides(path, kind)] == []
    assert not decides("compat/mlflow.py", "pretrain")


def test_the_totals_of_a_perplexity_are_computed_in_a_file_that_decides() -> None:
    path = Path(totals_of.__code__.co_filename).relative_to(PACKAGE).as_posix()
    assert decides(path, "perplexity")


RENAMED = {
    "the same": "from mxstudy.numerics.rms import exact as estimate\n",
    "another function": "from mxstudy.numerics.rms import tripled as estimate\n",
    "a module": "from mxstudy.numerics import other as estimate\n",
    "of two of that name": "from mxstudy.numerics.rms import twice\n",
    "the other one": "from mxstudy.numerics.other import twice\n",
    "another package": "from math import sqrt as estimate\n",
}
BODY = "def norm(x):\n    return estimate(x) + twice(x)\n"
FILES = {
    "numerics/rms.py": """
def exact(x):
    return x

def tripled(x):
    return 3 * x

def twice(x):
    return 2 * x
""",
    "numerics/other.py": "def twice(x):\n    return x + x\n",
}


def test_what_a_name_is_imported_for_is_in_the_digest() -> None:
    digests = {file_digests(FILES | {"model/norm.py": line + BODY})["model/norm.py"] for line in RENAMED.values()}
    assert len(digests) == len(RENAMED)


def test_what_moves_keeps_the_digest_of_who_imports_it() -> None:
    line = "from mxstudy.{} import exact as estimate, twice\n"
    before = FILES | {"model/norm.py": line.format("numerics.rms") + BODY}
    after = {"rms/all.py": FILES["numerics/rms.py"], "numerics/other.py": FILES["numerics/other.py"]}
    after["norm.py"] = line.format("rms.all") + BODY
    assert sorted(file_digests(before).values()) == sorted(file_digests(after).values())


def test_nobody_calls_what_is_left_out_as_uncalled() -> None:
    assert set(UNCALLED) < set(DECIDES_NOTHING)
    names = {"mxstudy." + path.removesuffix(".py").replace("/", ".") for path in UNCALLED}
    assert names <= MODULES.keys()
    callers = {module for module in MODULES if module.startswith("mxstudy.") and own_imports(module) & names}
    assert callers - names == {"mxstudy.kernels"}  # offers what others call


def test_what_is_only_printed_decides_no_number() -> None:
    """Nor do the files that print it take more from there than the text."""
    printed = "mxstudy.model.describe_precision"
    assert not any(decides("model/describe_precision.py", study) for study in STUDIES)
    names = {name for module in MODULES if module.startswith("mxstudy.") for name in imports(module)}
    assert {name for name in names if name.startswith(printed)} == {f"{printed}.describe"}


# ------------------------------------------------------------------------------------------------ runs of before


def test_the_code_of_every_commit_that_results_name_is_known() -> None:
    known = json.loads(BY_COMMIT.read_text())
    assert set(commits_in(tables_of_runs())) <= known.keys(), "python tests/code_by_commit.py adds them"
    younger = {"generate"}  # no commit without recorded code had these kinds of run
    assert all(STUDIES.keys() - younger <= codes.keys() <= STUDIES.keys() for codes in known.values())
    assert code_at("f" * 40, False, "pretrain") == code_at(next(iter(known)), True, "pretrain") == "unknown"


def test_commits_stand_in_where_runs_recorded_no_code(tmp_path: Path) -> None:
    rows = [("a", False, "unknown"), ("b", False, "0123"), ("c", True, "unknown")]
    columns = ["commit", "dirty", "code"]
    pd.DataFrame(rows, columns=columns).to_parquet(tmp_path / "new.parquet")
    pd.DataFrame([("d", False)], columns=columns[:2]).to_parquet(tmp_path / "old.parquet")
    assert commits_in([tmp_path / "new.parquet", tmp_path / "old.parquet"]) == ["a", "d"]


@pytest.mark.integration
def test_a_commit_has_the_recorded_code() -> None:
    """This also holds for two commits that differ in a kernel that no run calls."""
    first, second = "66f0e71907fb6857a6e0dde2a1e66db23d4c569d", "ecf28fc94da26f9b78d653778a025397f87dcf00"
    try:
        found = codes_at(first)
    except subprocess.CalledProcessError:
        pytest.skip("this clone has no such commit")
    assert found.items() >= json.loads(BY_COMMIT.read_text())[first].items()
    assert code_at(first, False, "student_teacher") == code_at(second, False, "student_teacher")


# ------------------------------------------------------------------------------------------------ comparing


def about(**values: Any) -> dict[str, Any]:
    return {
        "commit": "a" * 40,
        "dirty": False,
        "torch": "2.13.0+cu130",
        "triton": "3.7.1",
        "gpu": "NVIDIA H200",
    } | values


def today(**values: Any) -> dict[str, Any]:
    return about(**code_of("pretrain")) | values


def changed(then: dict[str, Any], now: dict[str, Any], on_gpu: bool = True, here: bool = True) -> list[str]:
    return changes(then, now, "pretrain", on_gpu, here)


def with_file(name: str, digest: str | None) -> dict[str, Any]:
    files = code_of("pretrain")["code_files"] | {name: digest}
    return recorded({name: digest for name, digest in files.items() if digest})


def test_the_files_that_changed_are_named() -> None:
    assert changed(today(), today()) == []
    other = today(**with_file("numerics/scales.py", "other"))
    assert changed(other, today()) == ["mxstudy/numerics/scales.py"]
    gone = today(**with_file("numerics/old.py", "gone"))
    assert changed(gone, today()) == ["mxstudy/numerics/old.py"]
    moved = dict(code_of("pretrain")["code_files"])
    moved["numerics/rules.py"] = moved.pop("numerics/scales.py")
    assert changed(today(**recorded(moved)), today()) == []
    assert changed_files({"code_files": {}}, "pretrain").endswith(" more files")


def test_files_that_change_with_others_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """One names what it imports as two files do, so its digest has the definition, whoever edited that."""
    sources = {"config/model.py": "Norm = A | B\nSize = int", "model/norm.py": "class Norm:\n    p = 1"}
    sources["config/run.py"] = "from mxstudy.config.model import Norm, Size\nchosen = Norm"
    edited = sources | {"config/model.py": "Norm = A | B | C\nSize = int"}
    then, now = map(file_digests, (sources, edited))
    assert {name for name in now if now[name] != then[name]} == {"config/model.py", "config/run.py"}
    monkeypatch.setattr(code, "_borrowed", lambda: borrowed(edited))
    other = recorded(code_of("pretrain")["code_files"] | {name: then[name] for name in sources})
    own = "mxstudy/config/model.py, mxstudy/model/norm.py, and with them what imports from them: mxstudy/config/run.py"
    assert changed(today(**other), today()) == [own]


def test_what_recorded_no_code_is_not_today_s() -> None:
    assert changed(about(), today()) == [f"files unknown: it recorded commit {'a' * 12} alone"]
    assert changed(about(dirty=True), today()) == [f"files unknown: it recorded commit {'a' * 12}, with changes alone"]


def test_nor_is_what_other_code_went_on_with() -> None:
    other = with_file("train/loop.py", "other")
    then = today(resumed=[about(**other)])
    assert code_in(then, "pretrain") == ", ".join(sorted([code_of("pretrain")["code"], other["code"]]))
    assert changed(then, today()) == ["mxstudy/train/loop.py"]


def test_versions_and_gpus_are_compared_where_that_means_something() -> None:
    assert changed(today(torch="2.11.0"), today()) == ["torch 2.11.0 then, 2.13.0 now"]
    assert changed(today(torch="2.13.0"), today(torch="2.13.0+cpu")) == []  # the build of a login node
    assert changed(today(triton="3.0.0"), today()) == ["Triton 3.0.0 then, 3.7.1 now"]
    assert changed(today(triton="3.0.0"), today(), on_gpu=False) == []
    assert changed(today(), today(gpu="NVIDIA B200")) == ["GPU NVIDIA H200 then, NVIDIA B200 now"]
    assert changed(today(), today(gpu="NVIDIA B200"), here=False) == []  # the job may get another
    assert changed(today(), today(gpu=None, triton=None)) == []


def test_mixed_code_is_said() -> None:
    run = {"study": "pretrain", "code": "aa", "torch": "2.11.0+cu130", "triton": None, "gpu": "NVIDIA H200"}
    assert different_code([run, run | {"torch": "2.11.0", "triton": float("nan")}]) is None
    assert different_code([run, run, run | {"code": "bb"}]) == (
        "The runs are of different code (code aa in 2 runs, bb in 1 run), so a difference may come from it."
    )
    assert different_code([run, run | {"study": "evaluate", "code": "bb"}]) is None
    said = different_code([run, run | {"gpu": "NVIDIA B200", "torch": "2.13.0"}])
    assert said
    assert "torch 2.11.0 in 1 run, 2.13.0 in 1 run; GPU NVIDIA H200 in 1 run, NVIDIA B200 in 1 run" in said
    assert different_code([run | {"code": None}]) is None  # one run is compared with nothing
    assert "(code unknown in 2 runs)" in str(different_code([run | {"code": None}, run | {"code": "unknown"}]))

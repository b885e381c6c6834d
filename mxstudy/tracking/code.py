"""The code identity of a run: a digest of the syntax trees of the files that decide its numbers.

It ignores the names of files, so moving a file changes nothing; `syntax_digests` says what else it ignores. Versions of
torch and Triton and the kind of GPU stand beside it in provenance.json.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mxstudy.tracking.digest_cache import cached
from mxstudy.tracking.syntax_digests import DIGITS, borrowed, file_digests

PACKAGE = Path(__file__).parent.parent
BY_COMMIT = Path(__file__).with_name("code_by_commit.json")  # `python tests/code_by_commit.py` writes it
UNKNOWN = "unknown"

COMPAT = ("torch_compiler.py", "torch_fsdp.py", "torch_grouped_mm.py", "torch_modules.py", "torchao.py")
MODEL = (
    *("config", "numerics", "kernels", "blocks", "model", "distributed.py"),
    *(f"compat/{name}" for name in COMPAT),  # what those rooms import of compat
)
STUDENTS = (*MODEL, "data", "train", "students")
TRAINED = (*MODEL, "data", "evaluation", "train/runtime.py", "studies/trained_model.py")

# For each kind of run, the rooms and files below mxstudy/ that decide its numbers; for a kind without a row,
# EVERYTHING.
DECIDES: dict[str, tuple[str, ...]] = {
    "pretrain": (*MODEL, "data", "train", "studies/pretrain/run.py", "studies/pretrain/built.py"),
    "student_teacher": STUDENTS,
    "fork": STUDENTS,
    "evaluate": (*TRAINED, "studies/evaluate/run.py"),
    "perplexity": (*TRAINED, "studies/perplexity/run.py", "studies/perplexity/check.py"),
    "generate": (*TRAINED, "studies/generate.py"),
    "approximation": (*MODEL, "data", "studies/approximation", "probes/saturation.py"),
    "prepare_data": ("data",),
}
EVERYTHING = (*STUDENTS, "evaluation", "studies")

# Other rooms and files: only what a row of DECIDES names in them decides. A file in neither list is a user's own, and
# decides.
DECIDED_BY_NONE = (
    *("launch", "help", "probes", "results", "tracking", "compat", "__init__.py", "__main__.py", "cli", "words.py"),
    *("scripts.py", "explain.py", "library.py", "completion"),
    *("garbage.py", "host_copies.py", "rehearsal.py", "reader.py", "small_files.py", "whole_files.py"),
    *("results.py", "cli.py"),  # of earlier layouts
)

# Files in these rooms that decide no number: code that no run calls, the plan of precision as it is printed, settings
# that only observe or launch, probes, output. Paths of earlier layouts are among them.
UNCALLED = ("kernels/norm_codes.py", "kernels/device/norm_codes.py", "numerics/layouts.py")
DECIDES_NOTHING = (
    *(*UNCALLED, "numerics/kernels/norm_codes.py", "numerics/kernels/device/norm_codes.py", "numerics/gather.py"),
    *("kernels/cast_counts.py", "kernels/device/cast_counts.py"),
    *("kernels/norm_outputs.py", "kernels/device/norm_outputs.py"),
    "model/describe_precision.py",
    *("config/fingerprint.py", "config/launcher.py", "config/observation.py", "config/settings.py"),
    *("train/process_group.py", "train/progress.py", "train/recorder.py", "train/signals.py", "train/watch.py"),
    *(
        "students/probes",
        "students/stack_probes.py",
        "students/tables.py",
        "students/study.py",
        "students/fork/study.py",
    ),
    *("evaluation/export.py", "train/stack_probes.py"),
)

BESIDE = {"torch": "torch", "triton": "Triton", "gpu": "GPU"}  # keys of provenance.json, with their names in messages
LISTED = 6  # files that a message lists; more are counted


def decides(path: str, study: str) -> bool:
    """Return whether a file, named from mxstudy/ on, decides the numbers of that kind of run."""
    is_own = not is_below(path, (*EVERYTHING, *DECIDED_BY_NONE))
    return is_own or (is_below(path, DECIDES.get(study, EVERYTHING)) and not is_below(path, DECIDES_NOTHING))


def is_below(path: str, places: Iterable[str]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)


@functools.cache  # the process keeps the code that it has loaded
def code_of(study: str) -> dict[str, Any]:
    """Return the code identity of this process for provenance.json: its digest, and that of each of its files."""
    return recorded({name: digest for name, digest in _digests().items() if decides(name, study)})


@functools.cache
def _digests() -> dict[str, str]:
    return cached(_sources(), digests_of)


@functools.cache
def _borrowed() -> dict[str, set[str]]:
    return borrowed(deciding_of(_sources()))


def _sources() -> dict[str, str]:
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def digests_of(sources: Mapping[str, str]) -> dict[str, str]:
    """Return the digest of each file that decides numbers of any run; `sources`: by their paths below mxstudy/."""
    return file_digests(deciding_of(sources))


def deciding_of(sources: Mapping[str, str]) -> dict[str, str]:
    """Return the files among `sources` that decide numbers of any run."""
    kinds = (*DECIDES, "a kind without a row")
    return {name: text for name, text in sources.items() if any(decides(name, kind) for kind in kinds)}


def recorded(files: Mapping[str, str]) -> dict[str, Any]:
    """Return a code identity as provenance.json has it; `files`: the digest of each file."""
    text = " ".join(sorted(files.values()))
    return {"code": hashlib.sha256(text.encode()).hexdigest()[:DIGITS], "code_files": dict(files)}


# ---------------------------------------------------------------------------------------------- the code of a run


@functools.cache
def _by_commit() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(BY_COMMIT.read_text())
    return found


def code_at(commit: Any, dirty: Any, study: str) -> str:
    """Return the digest of a commit's code, for a run that recorded no other; UNKNOWN if the tree had changes."""
    return UNKNOWN if dirty or not commit else _by_commit().get(commit, {}).get(study, UNKNOWN)


def code_in(about: Mapping[str, Any], study: str) -> str:
    """Return the digests of the code that began and resumed a run, from its provenance; usually one.

    `study`: the kind of run, needed only if a commit stands in for the digest.
    """
    parts = (about, *about.get("resumed", []))
    return ", ".join(
        sorted({part.get("code") or code_at(part.get("commit"), part.get("dirty"), study) for part in parts})
    )


def changes(about: Mapping[str, Any], now: Mapping[str, Any], study: str, on_gpu: bool, here: bool) -> list[str]:
    """Return the differences between a run's code and today's, as pieces of a sentence.

    `now`: today's provenance. Versions are compared without their build, Triton's only for a run on a GPU. The kind of
    GPU is compared only if the job would run `here`, in this process: a machine that plans may have another GPU than
    the job, or none.
    """
    code, *others = [code_of(study)["code"], code_in(about, study)]
    found = [] if others == [code] else [changed_files(about, study)]
    last = [about, *about.get("resumed", [])][-1]
    compared = ("torch", *(("triton",) if on_gpu else ()), *(("gpu",) if on_gpu and here else ()))
    for key in compared:
        then, today = release(last.get(key)), release(now.get(key))
        if then and today and then != today:
            found.append(f"{BESIDE[key]} {then} then, {today} now")
    return found


def release(version: Any) -> str | None:
    """Return a version without its build: '2.11.0' of '2.11.0+cu130', or None if nothing was recorded."""
    return version.partition("+")[0] if isinstance(version, str) else None


def changed_files(about: Mapping[str, Any], study: str) -> str:
    """Return a piece of a sentence that names the files that changed since a run, as far as they are known.

    Files that may have changed only through definitions of other files come last: the user may not have edited them.
    """
    own = code_of(study)["code_files"]
    parts = [about, *about.get("resumed", [])]
    names: set[str] = set()
    for part in parts:
        then = part.get("code_files")
        if then is None:
            state = ", with changes" if part.get("dirty") else ""
            return f"files unknown: it recorded commit {str(part.get('commit'))[:DIGITS]}{state} alone"
        gone, new = (Counter(one.values()) - Counter(other.values()) for one, other in ((then, own), (own, then)))
        names |= {name for files, odd in ((then, gone), (own, new)) for name, digest in files.items() if digest in odd}
    through = {name for name in names if len(names) > 1 and _borrowed().get(name, set()) & names}
    return listed(names - through) + (f", and with them what imports from them: {listed(through)}" if through else "")


def listed(names: Iterable[str]) -> str:
    few = [f"mxstudy/{name}" for name in sorted(names)]
    return ", ".join(few[:LISTED]) + (f" and {len(few) - LISTED} more files" if len(few) > LISTED else "")


def different_code(runs: Iterable[Mapping[str, Any]]) -> str | None:
    """Return a sentence that names the code of compared runs of one kind, or None if it is known and the same.

    `runs`: for each its `study`, `code`, and the keys of BESIDE. A key that a run did not record is not compared,
    except its code.
    """
    values: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for run in runs:
        code = run.get("code")
        values[str(run.get("study")), "code"][code if isinstance(code, str) else UNKNOWN] += 1
        for key, name in BESIDE.items():
            if known := release(run.get(key)):
                values[str(run.get("study")), name][known] += 1
    parts = [
        f"{name} " + ", ".join(f"{value} in {count} run{'s' * (count > 1)}" for value, count in counts.most_common())
        for (_, name), counts in values.items()
        if len(counts) > 1 or counts[UNKNOWN] > 1
    ]
    return f"The runs are of different code ({'; '.join(parts)}), so a difference may come from it." if parts else None

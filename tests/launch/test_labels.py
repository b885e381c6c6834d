"""A job is named by what varies among the jobs of its launch, and alone by what its command changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from each import each
from fake_study import composed

from mxstudy.launch.labels import labels


def test_a_job_is_named_by_what_varies(tmp_path: Path) -> None:
    a = composed(tmp_path, "norm=rmsnorm", "+experiment=quick", "optimizer.lr=1e-3")
    b = composed(tmp_path, "norm=mxnorm_p2", "+experiment=quick", "optimizer.lr=1e-3")
    c = composed(tmp_path, "norm=mxnorm_p2", "norm.eps=0", "+experiment=quick", "optimizer.lr=1e-3")
    assert labels([a, b, c]) == ["norm=rmsnorm", "norm=mxnorm_p2", "norm=mxnorm_p2 norm.eps=0"]


STUDENTS = {"study": "student_teacher"}
ALONE = [
    (("+experiment=quick", "norm=rmsnorm", "optimizer.lr=1e-3", "seed=3"), {}, "norm=rmsnorm optimizer.lr=1e-3 seed=3"),
    (("model=llama_1b", "norm.eps=0"), {}, "norm=rmsnorm norm.eps=0 model=llama_1b"),
    (
        ("+debug=tiny", "runs_dir=x", "tracking=none", "wait=true", "hydra/launcher=local", "probe=all"),
        {},
        "norm=rmsnorm",
    ),
    (("fidelity=public_code", "+teacher.gain=1"), STUDENTS, "norm=rmsnorm fidelity=public_code +teacher.gain=1"),
    (("checkpoint=RUN", "evaluation.limit=5"), {"study": "evaluate"}, "norm=rmsnorm checkpoint=RUN evaluation.limit=5"),
    ((f"prompt=a\nb {'x' * 80}",), {"study": "generate"}, f"norm=rmsnorm prompt=a b {'x' * 49}..."),
]


@each(("overrides", "values", "label"), ALONE)
def test_a_job_alone_is_named_by_what_its_command_changes(
    overrides: tuple[str, ...], values: dict[str, str], label: str, tmp_path: Path
) -> None:
    assert labels([composed(tmp_path, *overrides, **values)]) == [label]


def test_a_job_alone_that_changes_nothing_is_named_by_its_experiment(tmp_path: Path) -> None:
    one = dataclasses.replace(composed(tmp_path, "+experiment=quick"), choices={"experiment": "quick"})
    assert labels([one]) == ["quick"]

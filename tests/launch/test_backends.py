"""A run's backends are known when it is planned, kept with it, and reported for a sweep whose arms differ in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import call
from each import each
from fake_study import FakeStudy, composed

from mxstudy.config import AnyRun, Evaluate, read_run
from mxstudy.launch import inline, sweep
from mxstudy.launch.claiming import claim
from mxstudy.launch.commands import job_of
from mxstudy.launch.composed import Composed
from mxstudy.launch.job import Job
from mxstudy.launch.plan import plan
from mxstudy.launch.worker import note_the_machine
from mxstudy.reader import ConfigError
from mxstudy.students import check as student_teacher
from mxstudy.studies import study_of
from mxstudy.studies.pretrain import check as pretrain
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.journal import read_journal
from mxstudy.tracking.mixed_backends import all_backends
from mxstudy.train.runtime import planned_for

LINEARS = {"*.wqkv": "mxfp8", "*.wo": "mxfp8", "*.w13": "mxfp8", "*.w2": "mxfp8"}
SENTENCE = "run on different backends (nvfp4_forward_only: reference; 2 others: fused), which differ"


def job(runs: Path, row: str | dict[str, str], **values: Any) -> Composed:
    """Return a tiny decoder in that row, or by that plan.

    `train_...` sets fields of train, and `backend` and others set fields of a precision.
    """
    values = {"backend": "auto", "block_size": 16} | values
    train = {key.removeprefix("train_"): values.pop(key) for key in list(values) if key.startswith("train_")}
    one = composed(runs, f"precision={row}")
    blocks = {"layers.*": row} if isinstance(row, str) else row
    one.values["precision"] = {"schedule": [{"plan": blocks}]} | values
    one.values["model"] |= {"num_layers": 2, "vocab_size": 320}
    one.values["train"] |= train
    return one


def backend_of(config: AnyRun) -> str | None:
    return study_of(config.study).backends(config)


def backend(*job_of: Any, **values: Any) -> str | None:
    return backend_of(read_run(job(Path("runs"), *job_of, **values).values))


def three(runs: Path) -> list[Composed]:
    return [job(runs, row) for row in ("nvfp4_forward_only", "mxfp8", "bf16")]


@each(
    ("row", "values", "expected"),
    [
        ("mxfp8", {}, "fused"),
        ("bf16", {}, "fused"),
        ("bf16", {"backend": "reference"}, "reference"),
        ("bf16", {"train_compile": True}, "reference"),
        ("nvfp4_forward_only", {}, "reference"),
        ("mxfp8", {"backend": "reference"}, "reference"),
        ("mxfp8", {"backend": "emulated"}, "fused"),
        ("mxfp8", {"backend": "fused"}, "fused"),
        ("mxfp8", {"head": True}, "fused, reference"),
        ({"layers.0.*": "mxfp8"}, {}, "fused"),
        ({"layers.0.*": "nvfp4_forward_only"}, {}, "fused, reference"),
        ("mxfp8", {"train_compile": True}, "reference"),
        ("fp32", {"train_compute": "fp32"}, "reference"),
    ],
)
def test_of_pretraining(row: str | dict[str, str], values: dict[str, Any], expected: str) -> None:
    assert backend(row, **values) == expected


def test_all_rows_of_a_schedule_are_said_in_their_order() -> None:
    one = job(Path("runs"), "nvfp4_forward_only")
    later = [(3, {"*.w2": "nvfp4_forward_only"}), (5, {"layers.*": "mxfp8"}), (7, {"layers.0.*": "nvfp4_forward_only"})]
    one.values["precision"]["schedule"] += [{"from_step": step, "plan": plan} for step, plan in later]
    says = "reference then from step 5 fused then from step 7 fused, reference"
    assert backend_of(read_run(one.values)) == says


def test_where_no_gpu_is_seen_nobody_takes_it_for_one_with_an_mx_gemm() -> None:
    with planned_for(1):
        assert backend("mxfp8") == backend("mxfp8", train_compile=True) == "fused"
        assert backend("mxfp8", backend="native", block_size=32) == "native"  # checked again where it runs


def test_a_backend_does_not_depend_on_what_else_is_planned(tmp_path: Path) -> None:
    alone = {}
    for one in three(tmp_path):
        pretrain.check_model.cache_clear()
        (planned,) = plan([one])
        alone[planned.fingerprint] = planned.backend
    pretrain.check_model.cache_clear()
    together = plan(three(tmp_path))
    assert {one.fingerprint: one.backend for one in together} == alone
    assert [one.backend for one in together] == ["reference", "fused", "fused"]
    assert [one.backend for one in plan(three(tmp_path)[::-1])] == ["fused", "fused", "reference"]


def test_a_model_is_built_once_for_all_jobs_that_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretrain.check_model.cache_clear()
    built, build = [], pretrain.build_model
    monkeypatch.setattr(pretrain, "build_model", lambda config: built.append(config) or build(config))
    jobs = [job(tmp_path, "mxfp8") for _ in range(20)]
    for seed, one in enumerate(jobs):
        one.values["seed"] = seed
    assert {one.backend for one in plan(jobs)} == {"fused"}
    assert len(built) == 1


@pytest.mark.parametrize(
    ("row", "wanted", "reason"),
    [
        (
            "nvfp4_forward_only",
            "fused",
            r"fused kernels do not support forward_x\.outer_scale=bound, only none or tensor",
        ),
        ("mxfp8", "native", r"it needs CUDA with compute capability 10\.0"),
    ],
)
def test_a_backend_that_was_asked_for_and_cannot_be_had_is_refused(
    tmp_path: Path, row: str, wanted: str, reason: str
) -> None:
    refused = rf"^precision\.backend: {wanted} cannot run layers\.0: {reason}.*; reference runs everywhere"
    with pytest.raises(ConfigError, match=refused):
        plan([job(tmp_path, row, backend=wanted)])


def test_an_explicit_choice_is_in_the_fingerprint(tmp_path: Path) -> None:
    asked = ("auto", "reference", "fused", "emulated")
    jobs = plan([job(tmp_path, "mxfp8", backend=one) for one in asked])
    assert len({one.fingerprint for one in jobs}) == len(asked)
    (default,) = plan([job(tmp_path, "mxfp8")])
    assert default.fingerprint == jobs[0].fingerprint


@pytest.mark.integration
def test_students_have_a_backend_too(students: RunFolder) -> None:
    config: Any = students.config()
    assert student_teacher.backends_on(config, torch.device("cpu")) == students.backend() == "reference"
    assert student_teacher.backends_on(config, torch.device("cuda")) == "fused"


@pytest.mark.integration
def test_a_checkpoint_has_the_backend_that_it_will_be_asked_on(trained: RunFolder, evaluation_sets: Path) -> None:
    def asked(study: str, **values: Any) -> str | None:
        about = {"study": study, "checkpoint": str(trained.path), "tracking": {"uri": None}, "device": "cpu"}
        return backend_of(read_run(about | values))

    in_own_formats = {"schedule": [{"plan": {"layers.*": "mxfp8"}}]}
    assert trained.backend() == asked("evaluate") == asked("perplexity", data={"kind": "pysource"}) == "fused"
    assert asked("evaluate", compute="fp32") == "reference"
    assert asked("evaluate", precision=in_own_formats | {"backend": "reference"}) == "reference"
    with pytest.raises(ConfigError, match=r"fused cannot run layers\.0: kernels compute in bf16"):
        asked("evaluate", precision=in_own_formats | {"backend": "fused"}, compute="fp32")


@pytest.mark.integration
def test_forks_have_the_backend_of_what_is_changed(students: RunFolder) -> None:
    students_on = {
        change: backend_of(
            read_run(
                {"study": "fork", "parent": str(students.path), "intervention": own, "at_step": 1, "device": "cpu"}
            )
        )
        for change, own in {"nothing": {}, "rounding up": {"scale_rule": "rceil"}}.items()
    }
    assert set(students_on.values()) == {students.backend()} == {"reference"}


@pytest.mark.integration
def test_the_plan_is_what_is_applied(trained: RunFolder, students: RunFolder) -> None:
    for folder in (trained, students):
        first = read_journal(folder.journal_path)[0]
        assert all_backends(first["backends"].values()) == folder.provenance()["backend"] == folder.backend()


# ------------------------------------------------------------------------------------------------- kept, and said


@pytest.mark.integration
def test_a_run_keeps_its_backend_and_that_of_each_resumption(tmp_path: Path) -> None:
    (planned,) = plan([job(tmp_path, "mxfp8")])
    folder = claim(planned)
    assert folder.provenance()["backend"] == "fused"
    folder.update(state="preempted")
    (again,) = plan([job(tmp_path, "mxfp8")])
    assert again.state == "resume"
    claim(again)
    assert folder.provenance()["resumed"][0]["backend"] == folder.backend() == "fused"
    assert job_of(folder).backend == "fused"


@pytest.mark.integration
def test_what_was_planned_elsewhere_is_noted_where_it_runs(tmp_path: Path) -> None:
    with planned_for(1):
        (planned,) = plan([job(tmp_path, "mxfp8", train_compile=True)])
        folder = claim(planned)
    assert folder.backend() == "fused"
    config = folder.config_path.read_text()
    folder.config_path.write_text(config.replace("device: cuda", "device: cpu"))
    note_the_machine(folder)
    assert folder.backend() == "reference"
    folder.config_path.write_text(config.replace("backend: auto", "backend: native"))  # not available here
    note_the_machine(folder)  # and is refused when it is tried
    assert folder.backend() == "reference"


def test_a_sweep_says_it_when_it_is_planned_and_below_its_table(
    tmp_path: Path, study: FakeStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    study.backends = lambda config: "reference" if "nvfp4_forward_only" in str(config.precision) else "fused"
    jobs = plan(three(tmp_path))
    sentence = sweep.backends_sentence(jobs)
    assert sentence is not None
    assert SENTENCE in sentence
    assert "precision.backend=reference puts all on one" in sentence
    assert inline.run_jobs(jobs) == 0
    assert capsys.readouterr().out.count(sentence) == 1
    summary = sweep.summarise(plan(three(tmp_path)))
    assert summary["pretrain"].markdown == f"3 arms\n\n{sentence}"
    assert sweep.backends_sentence(jobs[1:]) is None


def test_below_the_table_stands_what_they_ran_on_and_not_what_they_would(tmp_path: Path, study: FakeStudy) -> None:
    jobs = plan(three(tmp_path))
    for one in jobs:
        claim(one).update(state="finished")
    study.backends = lambda config: "reference" if "nvfp4_forward_only" in str(config.precision) else "fused"
    again = plan(three(tmp_path))
    assert sweep.backends_sentence(again) is not None
    assert sweep.summarise(again)["pretrain"].markdown == "3 arms"  # nothing reports it for those


def test_there_is_no_option_for_models_that_are_asked_as_they_were_trained() -> None:
    def asked(label: str, backend: str) -> Job:
        return Job(Evaluate(checkpoint=label), label, Path(label), label, (), {}, backend=backend)

    sentence = sweep.backends_sentence([asked("runs/x/a", "fused"), asked("runs/x/b", "reference")])
    assert sentence is not None
    assert "(checkpoint=a: fused; checkpoint=b: reference)" in sentence
    assert sentence.endswith("which differ in the order of sums alone.")


@pytest.mark.slow
def test_a_dry_run_says_it_as_well_and_why(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "+experiment=quickstart",
        "+debug=tiny",
        "tracking=none",
        "precision=nvfp4_forward_only,mxfp8,bf16",
        "dry_run=true",
    )
    assert call(*words) == (0, "")
    said = capsys.readouterr().out
    assert SENTENCE in said
    why = "3 blocks: reference (fused kernels do not support forward_x.outer_scale=bound, only none or tensor)"
    assert [line for line in said.splitlines() if "reference (" in line] == [f"precision=nvfp4_forward_only: {why}"]
    assert call(*words, "precision.backend=reference") == (0, "")
    said = capsys.readouterr().out
    assert "different backends" not in said
    assert "2 jobs: 3 blocks: reference (precision.backend asks for it)" in said

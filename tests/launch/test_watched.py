"""A run that asks to watch what cannot be had is refused when it is planned, and only then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from composing import compose_job
from fake_study import FakeStudy, existing, seeds

from mxstudy import config
from mxstudy.launch.composed import Composed
from mxstudy.launch.plan import plan
from mxstudy.reader import ConfigError


@pytest.mark.parametrize("state", ["finished", "preempted"])
def test_a_probe_that_was_off_is_refused_naming_the_answer(tmp_path: Path, study: FakeStudy, state: str) -> None:
    on = {"norm_output_rms": {"every_steps": 5}}
    existing(plan(seeds(tmp_path, 1)), state=state)
    existing(plan(seeds(tmp_path, 2, probe=on)), state=state)
    with pytest.raises(ConfigError, match=r"^probe\.norm_output_rms: was off in .*stale=rerun"):
        plan(seeds(tmp_path, 1, probe=on))
    for answer in ({"rerun": True}, {"stale": "rerun"}):
        (job,) = plan(seeds(tmp_path, 1, probe=on, **answer))
        assert job.state == "new"
    (job,) = plan(seeds(tmp_path, 2, probe={"norm_output_rms": {"every_steps": 7}}))
    assert job.state != "new"


def test_so_is_a_probe_that_measured_less(tmp_path: Path, study: FakeStudy) -> None:
    """A run that measures more goes on to do so for a sweep that asks for less."""
    less, more = ({"gradient_bias": {"every_steps": 5, "by_operand": word}} for word in (False, True))
    existing(plan(seeds(tmp_path, 1, probe=less)), state="finished")
    existing(plan(seeds(tmp_path, 2, probe=more)), state="preempted")
    with pytest.raises(ConfigError, match=r"^probe\.gradient_bias\.by_operand: was off in .*stale=rerun"):
        plan(seeds(tmp_path, 1, probe=more))
    (job,) = plan(seeds(tmp_path, 2, probe={"gradient_bias": {"every_steps": 7}}))
    assert job.state == "resume"
    assert job.config.probe.gradient_bias == config.GradientBias(every_steps=7, by_operand=True)


def test_a_run_that_was_asked_something_else_is_refused(tmp_path: Path, study: FakeStudy) -> None:
    def asked(*tasks: str, **others: Any) -> list[Composed]:
        return seeds(tmp_path, 1, evaluation={"every_steps": 5, "tasks": tasks}, **others)

    with pytest.raises(ConfigError, match=r"evaluation\.tasks: differs in .*, which is the same run"):
        plan([*asked("piqa"), *asked("boolq")])
    existing(plan(asked("piqa")), state="finished")
    with pytest.raises(ConfigError, match=r"^evaluation\.tasks: differs in .*\+experiment=olmes .*stale=rerun"):
        plan(asked("boolq"))
    assert [job.state for job in plan(asked("piqa"))] == ["finished"]
    assert [job.state for job in plan(asked("boolq", rerun=True))] == ["new"]
    assert [job.state for job in plan(asked("boolq", stale="rerun"))] == ["new"]
    assert [job.state for job in plan(seeds(tmp_path, 1))] == ["finished"]


@pytest.mark.parametrize(
    ("key", "value"), [("task_forms", {"piqa": "mcf"}), ("shots_seed", 7), ("curated_shots", True), ("shots_dir", "x")]
)
def test_so_is_one_that_was_asked_in_another_form_or_after_other_shots(
    tmp_path: Path, study: FakeStudy, key: str, value: Any
) -> None:
    asked = {"every_steps": 5, "tasks": ["piqa"], "shots": 1}
    existing(plan(seeds(tmp_path, 1, evaluation=asked)), state="finished")
    with pytest.raises(ConfigError, match=rf"^evaluation\.{key}: differs in .*stale=rerun"):
        plan(seeds(tmp_path, 1, evaluation=asked | {key: value}))


UNUSED = {
    "probe.outlier_features.ring_steps": {"probe": {"outlier_features": {"ring_steps": 8}}},
    "probe.gradient_bias.by_operand": {"probe": {"gradient_bias": {"by_operand": True}}},
    "probe.spikes.threshold": {"probe": {"spikes": {"threshold": 3.0}}},
    "evaluation.tasks": {"evaluation": {"tasks": ["boolq"]}},
    "evaluation.limit": {"evaluation": {"limit": 8}},
    "evaluation.task_shots": {"evaluation": {"task_shots": {"piqa": 5}}},
    "evaluation.task_forms": {"evaluation": {"task_forms": {"piqa": "mcf"}}},
    "evaluation.tokens_per_batch": {"evaluation": {"tokens_per_batch": 99}},
}


@pytest.mark.parametrize("key", UNUSED)
def test_a_setting_of_what_is_off_is_refused(tmp_path: Path, study: FakeStudy, key: str) -> None:
    part = key.rpartition(".")[0]
    with pytest.raises(ConfigError, match=rf"^{key}: has no effect while {part} is off; set {part}\.every_steps too"):
        plan(seeds(tmp_path, 1, **UNUSED[key]))


@pytest.mark.integration
def test_so_is_a_limit_in_a_rehearsal_which_has_one_of_its_own_if_questions_are_asked(tmp_path: Path) -> None:
    def tiny(experiment: str, *words: str) -> Composed:
        return compose_job(f"+experiment={experiment}", "+debug=tiny", f"runs_dir={tmp_path}", "tracking=none", *words)

    (job,) = plan([tiny("quickstart")])
    assert job.config.evaluation == config.EvaluationDuringTraining()  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"^evaluation\.limit: has no effect while evaluation is off; set eval"):
        plan([tiny("quickstart", "evaluation.limit=8")])
    for asked in (tiny("quickstart", "evaluation.every_steps=5"), tiny("olmes", "checkpoint=RUN")):
        assert asked.values["evaluation"]["limit"] == 8  # type: ignore[index]


def test_so_is_a_ring_that_no_spike_would_have_written(tmp_path: Path, study: FakeStudy) -> None:
    def ring(steps: int, **others: Any) -> list[Composed]:
        return seeds(tmp_path, 1, probe={"outlier_features": {"every_steps": 3, "ring_steps": steps}, **others})

    with pytest.raises(ConfigError, match=r"^probe\.outlier_features\.ring_steps: has no effect without spikes"):
        plan(ring(8))
    for planned in (ring(0), ring(64), ring(8, spikes={"every_steps": 1})):
        assert [job.state for job in plan(planned)] == ["new"]


@pytest.mark.parametrize("key", UNUSED)
def test_a_run_that_has_been_trained_with_one_is_read(tmp_path: Path, study: FakeStudy, key: str) -> None:
    folder = existing(plan(seeds(tmp_path, 1)), state="finished")
    path = folder.path / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | UNUSED[key]))
    assert [job.state for job in plan(seeds(tmp_path, 1))] == ["finished"]

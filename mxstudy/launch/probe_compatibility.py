"""The check that a sweep can get the probes and evaluations it asks for, which change no number of a training.

It runs only when a run is planned: a stored config is read back as it was trained.
"""

from __future__ import annotations

from typing import Any

from mxstudy.config import AnyRun, OutlierFeatures, Pretrain, StudentTeacher
from mxstudy.reader import changed, require

QUESTIONS = ("tasks", "form", "shots", "task_shots")  # not limit, which +debug=tiny sets for every kind of run


def watched(config: AnyRun) -> dict[str, Any]:
    """Return the parts of the config with a schedule of their own, by key; empty unless the run is a training."""
    if not isinstance(config, Pretrain | StudentTeacher):
        return {}
    probes = {f"probe.{name}": probe for name, probe in vars(config.probe).items()}
    return probes if isinstance(config, StudentTeacher) else probes | {"evaluation": config.evaluation}


def check_used(config: AnyRun) -> None:
    """Raise ConfigError for a setting of a probe or evaluation that is off."""
    for key, part in watched(config).items():
        if part.every_steps > 0:
            continue
        unset = type(part)()
        for name in QUESTIONS if key == "evaluation" else vars(part):
            is_unset = getattr(part, name) == getattr(unset, name)
            require(is_unset, f"{key}.{name}: has no effect while {key} is off; set {key}.every_steps too")
    if isinstance(config, Pretrain):
        require(
            config.probe.spikes.every_steps > 0
            or config.probe.outlier_features.ring_steps in (0, OutlierFeatures.ring_steps),
            "probe.outlier_features.ring_steps: has no effect without spikes; set probe.spikes.every_steps=1",
        )


def off_then(then: Any, now: Any) -> list[str]:
    """Return the keys of what config `now` watches and the earlier config `then` did not."""
    earlier = watched(then)
    off = [key for key, part in watched(now).items() if part.every_steps > 0 and earlier[key].every_steps == 0]
    if isinstance(now, StudentTeacher) and now.probe.gradient_bias.coupled > then.probe.gradient_bias.coupled:
        off.append("probe.gradient_bias.coupled")
    return off


def with_probes_of(then: Any, now: Any) -> Any:
    """Return config `now` with all that the earlier config `then` watched: who asked for that run still wants it."""
    earlier, off = watched(then), [key for key, part in watched(now).items() if part.every_steps == 0]
    on = {key: earlier[key] for key in off if earlier[key].every_steps > 0}
    probes = {key.removeprefix("probe."): part for key, part in on.items() if key != "evaluation"}
    parts = {"evaluation": on["evaluation"]} if "evaluation" in on else {}
    return changed(now, **parts, **({"probe": changed(now.probe, **probes)} if probes else {}))


def asked_otherwise(then: Any, now: Any) -> list[str]:
    """Return the keys of the evaluation during training that differ, because then the scores cannot be reused."""
    if not isinstance(now, Pretrain) or 0 in (then.evaluation.every_steps, now.evaluation.every_steps):
        return []
    names = (*QUESTIONS, "limit")
    return [f"evaluation.{name}" for name in names if getattr(then.evaluation, name) != getattr(now.evaluation, name)]

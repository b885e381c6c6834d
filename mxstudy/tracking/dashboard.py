"""Our two views of an experiment in MLflow: the list of its runs, and the runs of a sweep by arm, with their charts."""

from __future__ import annotations

from mxstudy.compat.mlflow_views import (
    RUN_NAME,
    SYSTEM,
    State,
    address_of_view,
    shared_view,
    with_charts,
    with_columns,
    with_groups,
)

RESULT = "result"  # the tag of a sweep's parent with its numbers in one line
VIEW = "runs"  # name of the view that lists an experiment's runs
LOSS = "metrics.`val/loss`"

COLUMNS = [LOSS, "metrics.`train/loss`", "metrics.`train/spikes`"]
COLUMNS += [f"tags.`{tag}`" for tag in ("status", "seed", "precision", "norm")]
RESULTS = f"tags.`{RESULT}`"
WIDTHS = {RUN_NAME: 260, RESULTS: 540, "tags.`seed`": 70}  # in pixels, of the columns that MLflow would cut off

# The kinds of run whose charts begin with the losses -> the sections that are folded below them.
PROBES = ("norm_rms", "saturation", "outlier_features", "weights", "gradient_bias", "last_bin", "routing")
FOLDED = {
    "pretrain": ("train", "val", *PROBES, SYSTEM),
    "student_teacher": ("train", "loss", "grad_norm", "gradient_bias", "last_bin", "sharpness", SYSTEM),
}


def charts_of(study: str) -> State:
    """Return the order of the charts of a kind of run; without one of its own, MLflow's."""
    return with_charts("losses", ["train/loss", "val/loss"], FOLDED[study]) if study in FOLDED else {}


def list_of_runs(study: str) -> dict[str, str]:
    """Return the tag of an experiment that stores the view of all its runs: a sweep is a row with its numbers."""
    return shared_view(VIEW, with_columns([RESULTS, *COLUMNS], WIDTHS) | charts_of(study))


def runs_by_arm(study: str, tag: str) -> dict[str, str]:
    """Return the tag of an experiment that stores the view of a sweep: its runs grouped by arm, the best first.

    `tag`: of the sweep's runs, with the arm of each; the view has its name.
    """
    groups = with_groups(having(tag), LOSS, tag)
    return shared_view(tag, with_columns(COLUMNS, WIDTHS) | charts_of(study) | groups)


def having(tag: str) -> str:
    """Return the search for the runs that have a tag, whatever its value."""
    return f"tags.`{tag}` LIKE '%'"


def link_to_runs(experiment_id: str) -> str:
    """Return a Markdown link to the list of an experiment's runs, for the head of its page."""
    return f"[Its sweeps and runs]({address_of_view(experiment_id, VIEW)})"

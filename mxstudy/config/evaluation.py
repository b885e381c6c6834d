"""The schema of an evaluation: the questions for a language model, their form, and the shots before them."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from mxstudy.reader import named, require, schema

OLMES = (
    *("arc_challenge", "arc_easy", "boolq", "csqa", "hellaswag"),
    *("mmlu", "openbookqa", "piqa", "socialiqa", "winogrande"),
)
SHOTS_SEED = 1234  # OLMES' and lm-eval's


@schema
class Evaluation:
    """The questions of `tasks`, in one `form`: cf scores an option's text, mcf its letter, best asks both.

    `task_forms`: the form of single tasks. `shots`: solved questions before each question; `task_shots`: the same for
    single tasks. MMLU's are the first of its split dev; those of other tasks are drawn for each question from the
    training split by `shots_seed`. `curated_shots`: OLMES' own five, rows of that split. `shots_dir`: a folder with
    TASK.shots.jsonl, whose first rows are taken. `limit`: ask only the first questions of a task in OLMES' order,
    spread over the subjects of MMLU; null: all. `data_dir`: the folder with the questions, whose contents enter the
    fingerprint, and not its path; null: the hub.
    `skip_missing`: leave out a task whose data cannot be read, and report it. `tokens_per_batch`: tokens of a forward,
    padding included.
    """

    tasks: tuple[str, ...] = OLMES
    form: Literal["cf", "mcf", "best"] = "best"
    task_forms: dict[str, Literal["cf", "mcf", "best"]] = field(default_factory=dict)
    shots: int = 0
    task_shots: dict[str, int] = field(default_factory=dict)
    shots_seed: int = SHOTS_SEED  # draws the shots of every task but MMLU
    curated_shots: bool = False
    limit: int | None = None
    data_dir: str | None = named(None)
    shots_dir: str | None = named(None)
    skip_missing: bool = False
    tokens_per_batch: int = 16_384

    def __post_init__(self) -> None:
        require(bool(self.tasks), "tasks: names no task; name at least one")
        require(len(set(self.tasks)) == len(self.tasks), f"tasks: {list(self.tasks)} names a task twice")
        for name, value in {"shots": self.shots, **{f"task_shots.{k}": v for k, v in self.task_shots.items()}}.items():
            require(value >= 0, f"{name}: must not be negative, not {value}")
        for key in ("task_shots", "task_forms"):
            unlisted = getattr(self, key).keys() - set(self.tasks)
            require(not unlisted, f"{key}: {', '.join(sorted(unlisted))} is not one of the tasks")
        fixed = [name for name in ("shots_dir", "curated_shots") if getattr(self, name)]
        require(len(fixed) < 2, "curated_shots: shots_dir has shots of its own; leave out one of the two")
        require(
            self.shots_seed == SHOTS_SEED or not fixed,
            f"shots_seed: with {' '.join(fixed)} no shot is drawn; leave it at {SHOTS_SEED}, not {self.shots_seed}",
        )
        for name in self.about_shots:
            require(any(map(self.shots_of, self.tasks)), f"{name}: no shots are asked for; set shots")
        require(self.limit is None or self.limit > 0, f"limit: must be positive, not {self.limit}; null is all")
        require(self.tokens_per_batch > 0, f"tokens_per_batch: must be positive, not {self.tokens_per_batch}")

    def forms_of(self, task: str) -> tuple[str, ...]:
        form = self.task_forms.get(task, self.form)
        return ("mcf", "cf") if form == "best" else (form,)

    def shots_of(self, task: str) -> int:
        return self.task_shots.get(task, self.shots)

    @property
    def about_shots(self) -> list[str]:
        """Return which of shots_dir, curated_shots and shots_seed are off their defaults; MMLU reads none of them."""
        defaults = {"shots_dir": None, "curated_shots": False, "shots_seed": SHOTS_SEED}
        return [name for name, default in defaults.items() if getattr(self, name) != default]


@schema
class EvaluationDuringTraining(Evaluation):
    """Questions asked every `every_steps` steps and after the last; 0: never. The training's numbers do not change."""

    every_steps: int = 0
    tasks: tuple[str, ...] = ("arc_easy", "hellaswag", "piqa")
    form: Literal["cf", "mcf", "best"] = "cf"
    limit: int | None = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.every_steps >= 0, f"every_steps: must not be negative, not {self.every_steps}; 0 is never")

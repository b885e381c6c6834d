"""The schema of zero-shot evaluation: the questions that a language model is asked, and their form."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from mxstudy.reader import named, require, schema

OLMES = (
    *("arc_challenge", "arc_easy", "boolq", "csqa", "hellaswag"),
    *("mmlu", "openbookqa", "piqa", "socialiqa", "winogrande"),
)


@schema
class Evaluation:
    """The questions of `tasks`, in one form: cf scores an option's text, mcf its letter, best asks both.

    `shots`: solved questions before each question; `task_shots`: the same for single tasks. `limit`: ask only the first
    questions of a task in OLMES' order, spread over the subjects of MMLU; null: all. `data_dir`: the folder with the
    questions; null: the hub. `shots_dir`: a folder with TASK.shots.jsonl, solved questions. `skip_missing`: leave out a
    task whose data cannot be read, and report it. `tokens_per_batch`: tokens of a forward, padding included.
    """

    tasks: tuple[str, ...] = OLMES
    form: Literal["cf", "mcf", "best"] = "best"
    shots: int = 0
    task_shots: dict[str, int] = field(default_factory=dict)
    limit: int | None = None
    data_dir: str | None = named(None)  # the questions are hashed instead
    shots_dir: str | None = named(None)
    skip_missing: bool = False
    tokens_per_batch: int = 16_384

    def __post_init__(self) -> None:
        require(len(set(self.tasks)) == len(self.tasks), f"tasks: {list(self.tasks)} names a task twice")
        for name, value in {"shots": self.shots, **{f"task_shots.{k}": v for k, v in self.task_shots.items()}}.items():
            require(value >= 0, f"{name}: must not be negative, not {value}")
        unlisted = self.task_shots.keys() - set(self.tasks)
        require(not unlisted, f"task_shots: {', '.join(sorted(unlisted))} is not one of the tasks")
        require(self.limit is None or self.limit > 0, f"limit: must be positive, not {self.limit}; null is all")
        require(self.tokens_per_batch > 0, f"tokens_per_batch: must be positive, not {self.tokens_per_batch}")

    @property
    def forms(self) -> tuple[str, ...]:
        return ("mcf", "cf") if self.form == "best" else (self.form,)

    def shots_of(self, task: str) -> int:
        return self.task_shots.get(task, self.shots)


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

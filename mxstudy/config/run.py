"""The schema of a whole run, by kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from mxstudy.config.data import Data, Tokenizer
from mxstudy.config.evaluation import Evaluation, EvaluationDuringTraining
from mxstudy.config.model import Decoder, Norm, Precision
from mxstudy.config.observation import Probes, Tracking
from mxstudy.config.student import (
    Intervention,
    ResidualMLP,
    StackTrain,
    Student,
    StudentOptimizer,
    StudentProbes,
    Teacher,
)
from mxstudy.config.training import AdamW, Checkpoint, Schedule, Train, Validation
from mxstudy.reader import ConfigError, cosmetic, read, require, schema, suggest


@schema
class Run:
    """What every kind of run has."""

    compares: ClassVar[bool] = False  # the arms of a sweep with one of them
    experiment: str = cosmetic("unnamed")
    runs_dir: str = cosmetic("runs")
    cache_dir: str = cosmetic(".cache")
    rerun: bool = cosmetic(False)
    wait: bool = cosmetic(False)
    dry_run: bool = cosmetic(False)  # say what would be done, and what it would cost
    baseline: dict[str, str] = cosmetic(default_factory=dict)  # group choices: the arm that models are compared with
    tracking: Tracking = cosmetic(default_factory=Tracking)

    def __post_init__(self) -> None:
        study = getattr(self, "study", "run")
        require(self.compares or not self.baseline, f"baseline: {study} compares no arms with one; leave it out")


@schema
class Pretrain(Run):
    compares = True
    study: Literal["pretrain"] = "pretrain"
    seed: int = 0
    data_seed: int = 0
    model: Decoder
    norm: Norm
    precision: Precision
    data: Data
    tokenizer: Tokenizer
    optimizer: AdamW
    schedule: Schedule
    train: Train
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    probe: Probes = cosmetic(default_factory=Probes)
    evaluation: EvaluationDuringTraining = cosmetic(default_factory=EvaluationDuringTraining)


@schema
class Approximation(Run):
    """What MXNorm and the casts do to random tensors; nothing is trained.

    `draws`: independent repetitions of every measurement, whose spread is reported.

    `hidden_size`, `stds` and `rows`: of the Gaussian rows of figure 2, left and middle, and of the bounds.
    `max_blocks`: how long the rows of figure 2, right, and (16 times that) of Theorem 1 get, in powers of two.
    `elements`: of each tensor whose cast is graded.
    """

    study: Literal["approximation"] = "approximation"
    seed: int = 0
    draws: int = 8
    rows: int = 256
    hidden_size: int = 4096
    stds: tuple[float, ...] = (0.1, 1.0, 10.0)
    max_blocks: int = 256
    elements: int = 131_072
    format: Literal["E4M3", "E5M2", "E3M2", "E2M3", "E2M1"] = "E4M3"
    block_size: Literal[16, 32, 64] = 32
    scale_rule: Literal["floor", "ceil", "rceil", "even"] = "rceil"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("draws", "rows", "hidden_size", "max_blocks", "elements"):
            require(getattr(self, name) > 0, f"{name}: must be positive, not {getattr(self, name)}")
        require(self.draws > 1, "draws: one has no spread; give at least 2")
        require(bool(self.stds) and min(self.stds, default=1.0) > 0, f"stds: must be positive, not {list(self.stds)}")
        for name, unit in (("hidden_size", 64), ("elements", 1024)):
            require(getattr(self, name) % unit == 0, f"{name}: {getattr(self, name)} is not a multiple of {unit}")


@schema
class PrepareData(Run):
    """The shards of a corpus under a tokenizer, made before a training needs them.

    `workers`: processes that tokenise; null: one for every core.
    """

    study: Literal["prepare_data"] = "prepare_data"
    data: Data
    tokenizer: Tokenizer
    workers: int | None = cosmetic(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.workers is None or self.workers > 0, f"workers: must be positive, not {self.workers}; null: all")


@schema
class OfCheckpoint(Run):
    """What is done with a trained model.

    `checkpoint`: a run's folder, a checkpoint's, a fingerprint, an MLflow run id, or a Hugging Face model's folder.
    `norm`, `precision`, `compute`: null as it was trained; anything else takes their place, weights unchanged.
    `processes`: so many work side by side, one a GPU, or on the CPU.
    """

    compares = True
    checkpoint: str = cosmetic()  # what it names is hashed
    norm: Norm | None = None
    precision: Precision | None = None
    compute: Literal["bf16", "fp32"] | None = None
    device: Literal["auto", "cpu", "cuda"] = cosmetic("auto")
    processes: int = cosmetic(1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.processes > 0, f"processes: must be positive, not {self.processes}")


@schema
class Evaluate(OfCheckpoint):
    """Questions with options, scored by log-likelihood."""

    study: Literal["evaluate"] = "evaluate"
    evaluation: Evaluation = Evaluation()


@schema
class Perplexity(OfCheckpoint):
    """Loss of a checkpoint on a corpus, by token, by byte and by document.

    `split`: by hash, as in training; all is both. `documents`: the first so many of it; null: all. A document that is
    longer than `window` tokens (null: than the sequences that it was trained on) is read in windows of that length,
    each `stride` tokens after the one before (null: half a window). A token is scored once, with all of its window
    before it.
    """

    study: Literal["perplexity"] = "perplexity"
    data: Data
    split: Literal["validation", "train", "all"] = "validation"
    documents: int | None = None
    window: int | None = None
    stride: int | None = None
    tokens_per_batch: int = 16_384

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("documents", "window", "stride", "tokens_per_batch"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{name}: must be positive, not {value}")


@schema
class StudentTeacher(Run):
    """Students that learn a fixed teacher, replicas of them side by side (instability paper, section 4).

    A replica for each of `seeds`, of its initial weights, and of the learning rates `lrs`. `data_seed` draws teacher,
    inputs and label noise, the same for all of them. `label_noise`: its standard deviation; 0: none, nor with
    `own_noise`: other numbers than the runs have that are without, as in the public code, where an MX run's noise is
    not its FP32 run's.
    """

    study: Literal["student_teacher"] = "student_teacher"
    seeds: tuple[int, ...] = (0,)
    lrs: tuple[float, ...] = (6e-4,)
    data_seed: int = 0
    model: ResidualMLP
    norm: Norm | None
    precision: Precision
    student: Student = Student()
    teacher: Teacher = Teacher()
    loss: Literal["mse", "kl"] = "mse"
    label_noise: float = 0.005
    own_noise: bool = False
    optimizer: StudentOptimizer
    schedule: Schedule
    train: StackTrain
    checkpoint: Checkpoint = Checkpoint()
    probe: StudentProbes = cosmetic(default_factory=StudentProbes)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("seeds", "lrs"):
            values = getattr(self, name)
            require(len(values) == len(set(values)) > 0, f"{name}: one or more, each once, not {list(values)}")
        require(min(self.lrs) > 0, f"lrs: must be positive, not {list(self.lrs)}")
        require(self.label_noise >= 0, f"label_noise: must not be negative, not {self.label_noise}")
        require(self.loss == "mse" or not self.label_noise, "label_noise: kl has none; set it to 0")
        require(
            self.label_noise > 0 or not self.teacher.from_disk,
            "teacher.from_disk: what is on disk has noise in it, and label_noise is 0; set it to false",
        )
        samples, length = self.train.batch_size, self.model.sequence_length
        require(
            samples % (length or 1) == 0,
            f"train.batch_size: {samples} samples do not divide into sequences of {length} (model.sequence_length)",
        )
        block_size = self.precision.block_size
        for name in ("hidden_size", "ffn_size"):
            size = getattr(self.model, name)
            require(
                size % block_size == 0 or self.precision.pad_blocks or not self.probe.last_bin.every_steps,
                f"probe.last_bin: blocks of {block_size} do not divide model.{name} {size}; set every_steps to 0",
            )

    @property
    def replicas(self) -> tuple[tuple[int, float], ...]:
        """Seed and learning rate of each, in the stack's order."""
        return tuple((seed, lr) for lr in self.lrs for seed in self.seeds)

    @property
    def noise_streams(self) -> tuple[str, ...]:
        """Of label noise, each added to the targets."""
        if not self.label_noise:
            return ()
        drawn = "own_noise" if self.own_noise else "noise"
        return (drawn, "disk_noise") if self.teacher.from_disk else (drawn,)


@schema
class Fork(Run):
    """A student-teacher run once more from a step on, with something changed; all else is its parent's.

    `parent`: a run's folder, a fingerprint, or an MLflow run id. Each of its replicas that diverges, at step t, is
    forked at t - `intervene_before` and at every one of `fractions` times t; with `at_step` all replicas are, there.
    A fork goes on for `steps` steps, at the parent's last learning rate where it outlasts the parent.
    """

    study: Literal["fork"] = "fork"
    parent: str = cosmetic()  # what it names is hashed, and with it the forks
    intervention: Intervention = Intervention()
    intervene_before: int = cosmetic(10)
    fractions: tuple[float, ...] = cosmetic((0.88,))
    at_step: int | None = cosmetic(None)
    steps: int = 1500
    device: Literal["auto", "cpu", "cuda"] = cosmetic("auto")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("intervene_before", "steps"):
            require(getattr(self, name) > 0, f"{name}: must be positive, not {getattr(self, name)}")
        for fraction in self.fractions:
            require(0 < fraction < 1, f"fractions: must lie between 0 and 1, not {list(self.fractions)}")
        require(self.at_step is None or self.at_step >= 0, f"at_step: must not be negative, not {self.at_step}")
        require(
            self.at_step is None or (self.intervene_before, self.fractions) == (Fork.intervene_before, Fork.fractions),
            "at_step: replicas are forked there and nowhere else; leave out intervene_before and fractions",
        )


STUDIES: dict[str, type[Run]] = {
    "pretrain": Pretrain,
    "prepare_data": PrepareData,
    "student_teacher": StudentTeacher,
    "fork": Fork,
    "approximation": Approximation,
    "evaluate": Evaluate,
    "perplexity": Perplexity,
}


AnyRun: TypeAlias = Pretrain | PrepareData | StudentTeacher | Fork | Approximation | Evaluate | Perplexity


def read_run(values: Mapping[str, Any]) -> AnyRun:
    """A composed config, as plain data, to the frozen dataclass of its kind of run."""
    kind = values.get("study")
    require(kind is not None, "study: missing; start from an experiment: +experiment=NAME")
    if kind not in STUDIES:
        raise ConfigError(f"study: {kind!r} is not a choice; {suggest(str(kind), STUDIES)}")
    config: AnyRun = read(STUDIES[kind], values)
    return config

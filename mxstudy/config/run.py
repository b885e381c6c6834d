"""The schema of a whole run, one class for each kind of run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar, Literal, TypeAlias

from mxstudy.config.data import Data, Tokenizer, TrainingData
from mxstudy.config.evaluation import Evaluation, EvaluationDuringTraining
from mxstudy.config.model import MOST_FEATURES, Decoder, Norm
from mxstudy.config.observation import Probes, Tracking
from mxstudy.config.precision_plan import Precision
from mxstudy.config.student import (
    Intervention,
    ResidualMLP,
    StackTrain,
    Student,
    StudentOptimizer,
    StudentProbes,
    Teacher,
)
from mxstudy.config.texts import Texts, TextsDuringTraining
from mxstudy.config.training import AdamW, Checkpoint, Schedule, Train, Validation
from mxstudy.reader import ConfigError, cosmetic, named, read, require, require_at_most, schema, suggest

SEEDS = ("seed", "data_seed", "seeds")
MOST_ELEMENTS = 2**31  # of a tensor
MOST_WORKERS = 2**12


@schema
class Run:
    """The fields that every kind of run has."""

    compares: ClassVar[bool] = False  # whether the summary of a sweep compares its arms with a baseline
    experiment: str = cosmetic("unnamed")  # the name of the chosen file
    runs_dir: str = cosmetic("runs")  # where run folders are
    cache_dir: str = cosmetic(".cache")  # where tokenised corpora and tokenizers are kept
    rerun: bool = cosmetic(False)  # train everything again
    # ok takes a run that other code has made; rerun trains again every run that would be refused.
    stale: Literal["refuse", "ok", "rerun"] = cosmetic("refuse")
    wait: bool = cosmetic(False)  # return when all submitted jobs have ended, and print the sweep's summary
    dry_run: bool = cosmetic(False)  # print the jobs and their cost, and do nothing
    baseline: dict[str, str] = cosmetic(default_factory=dict)  # group choices of the arm to compare the others with
    replicates: tuple[str, ...] = cosmetic(())  # keys, beside the seeds, in which runs of one arm may differ
    tracking: Tracking = cosmetic(default_factory=Tracking)

    @property
    def mlflow_experiment(self) -> str:
        """Return the name of the MLflow experiment that shows the run."""
        return self.tracking.experiment or self.experiment

    def __post_init__(self) -> None:
        for name in ("runs_dir", "cache_dir"):
            folder = getattr(self, name)
            require(bool(folder.strip()) and folder.isprintable(), f"{name}: must name a folder, not {folder!r}")
        study = getattr(self, "study", "run")
        require(self.compares or not self.baseline, f"baseline: {study} does not compare arms; leave it out")
        require(self.stale == "refuse" or not self.rerun, "stale: has no effect with rerun=true; leave one of them out")
        for key in self.replicates:
            part: Any = self
            for word in key.split("."):
                require(
                    hasattr(part, word), f"replicates: {key!r} is not a key of this run; {suggest(word, vars(part))}"
                )
                part = getattr(part, word)

    def check_seeds(self) -> None:
        """Raise ConfigError for a seed beyond 64 bits, because another seed would draw the same batches.

        Only when a run is planned: a stored config is read back as it was trained.
        """
        for key in SEEDS:
            given = getattr(self, key, ())
            for seed in given if isinstance(given, tuple) else (given,):
                require(0 <= seed < 2**64, f"{key}: must lie in 0 .. 2**64 - 1, not {seed}")


@schema
class Pretrain(Run):
    compares = True
    study: Literal["pretrain"] = "pretrain"
    seed: int = 0  # draws the initial weights, and the random bits of stochastic casts
    data_seed: int = 0  # draws the order of the batches
    model: Decoder  # the sizes of the model
    norm: Norm  # what divides a row by its RMS, or by an estimate of it
    precision: Precision
    data: TrainingData  # the corpus, or a blend of several
    tokenizer: Tokenizer  # how text becomes ids
    optimizer: AdamW  # how gradients move the weights
    schedule: Schedule
    train: Train  # steps, batches, and how they are computed
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    probe: Probes = cosmetic(default_factory=Probes)  # what is measured, and how often
    evaluation: EvaluationDuringTraining = cosmetic(default_factory=EvaluationDuringTraining)
    sample: TextsDuringTraining = cosmetic(default_factory=TextsDuringTraining)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.schedule.check_steps(self.train.steps)
        require(
            self.train.recompute_mlp <= self.model.num_layers,
            f"train.recompute_mlp: {self.train.recompute_mlp} is more than the model's {self.model.num_layers} blocks "
            "(model.num_layers)",
        )


@schema
class Approximation(Run):
    """The errors of MXNorm and of the casts on random tensors; nothing is trained.

    `draws`: independent repetitions of every measurement, whose spread is reported.

    `hidden_size`, `stds`, `rows`: sizes and standard deviations of the Gaussian rows of figure 2, left and middle, and
    of the bounds. `max_blocks`: the longest rows of figure 2, right, in blocks; rows grow in powers of two, and those
    of Theorem 1 up to 16 times as long. `elements`: elements of each tensor whose cast is measured. `precisions`:
    precisions, by any name, whose recipes are measured operand by operand at the start of their schedules. Bounds in
    FP4 are those of MXFP4 and NVFP4, whatever `format`, `block_size` and `scale_rule` are.
    """

    study: Literal["approximation"] = "approximation"
    seed: int = 0  # draws the random tensors
    draws: int = 8
    rows: int = 256
    hidden_size: int = 4096
    stds: tuple[float, ...] = (0.1, 1.0, 10.0)
    max_blocks: int = 256
    elements: int = 131_072
    format: Literal["E4M3", "E5M2", "E3M2", "E2M3", "E2M1"] = "E4M3"  # elements of the casts
    block_size: Literal[16, 32, 64] = 32  # elements that share a scale
    scale_rule: Literal["floor", "ceil", "rceil", "even"] = "rceil"  # how the exponent of a scale is rounded
    precisions: dict[str, Precision] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        most = dict.fromkeys(("draws", "rows", "hidden_size", "max_blocks"), MOST_FEATURES)
        require_at_most(self, most | {"elements": MOST_ELEMENTS})
        require(self.draws > 1, "draws: must be at least 2, to have a spread")
        require(bool(self.stds) and min(self.stds, default=1.0) > 0, f"stds: must be positive, not {list(self.stds)}")
        for name, unit in (("hidden_size", 64), ("elements", 1024)):
            require(getattr(self, name) % unit == 0, f"{name}: {getattr(self, name)} is not a multiple of {unit}")


@schema
class PrepareData(Run):
    """The shards of a corpus, or of a blend's corpora, under a tokenizer, made before a training needs them.

    `workers`: processes that tokenise; null: one per core.
    """

    study: Literal["prepare_data"] = "prepare_data"
    data: TrainingData  # the corpus, or a blend of several
    tokenizer: Tokenizer  # how text becomes ids
    workers: int | None = cosmetic(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.workers is None or 0 < self.workers <= MOST_WORKERS,
            f"workers: must lie in 1 .. {MOST_WORKERS:,}, not {self.workers}; null: all",
        )


@schema
class TrainedModelRun(Run):
    """A run that uses a trained model.

    `checkpoint`: a run's folder, a checkpoint's folder, a fingerprint, an MLflow run id, or a Hugging Face model's
    folder. `norm`, `precision`, `compute`: null keeps them as trained; another value replaces them, with the same
    weights. `processes`: processes that share the work, one per GPU, or all on the CPU.
    """

    compares = True
    checkpoint: str = named()
    norm: Norm | None = None
    precision: Precision | None = None
    compute: Literal["bf16", "fp32"] | None = None
    device: Literal["auto", "cpu", "cuda"] = cosmetic("auto")  # auto takes a GPU if there is one
    processes: int = cosmetic(1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.processes > 0, f"processes: must be positive, not {self.processes}")


@schema
class Evaluate(TrainedModelRun):
    """Questions with options, scored by log-likelihood."""

    study: Literal["evaluate"] = "evaluate"
    evaluation: Evaluation = Evaluation()


@schema
class Perplexity(TrainedModelRun):
    """Loss of a checkpoint on a corpus, by token, by byte and by document.

    `split`: selected by hash, as in training; all takes both splits. `documents`: use only the first documents of the
    split; null: all. A document longer than `window` tokens (null: the sequence length of the training) is read in
    windows of that length, each `stride` tokens after the one before (null: half a window). Every token is scored once,
    with all preceding tokens of its window as context.
    """

    study: Literal["perplexity"] = "perplexity"
    data: Data  # the corpus
    split: Literal["validation", "train", "all"] = "validation"
    documents: int | None = None
    window: int | None = None
    stride: int | None = None
    tokens_per_batch: int = 16_384  # tokens of a forward, padding included

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("documents", "window", "stride", "tokens_per_batch"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{name}: must be positive, not {value}")


@schema
class Generate(TrainedModelRun, Texts):
    """Texts that a checkpoint writes after a prompt.

    `samples`: texts, each with draws of its own. `keep`: keep keys and values of the tokens that are read; without
    them, the model reads the whole text again for each token, and writes the same one unless two tokens are about as
    likely.
    """

    compares = False
    study: Literal["generate"] = "generate"
    prompt: str  # the beginning of a document, which the model continues; "" is its very beginning
    samples: int = 1
    keep: bool = True

    def __post_init__(self) -> None:
        TrainedModelRun.__post_init__(self)
        Texts.__post_init__(self)
        require(self.processes == 1, f"processes: generate runs in one process, not in {self.processes}; leave it out")
        require(self.samples > 0, f"samples: must be positive, not {self.samples}")
        require(
            self.temperature > 0 or self.samples == 1,
            f"samples: all {self.samples} would be the same with temperature=0; leave it out, or set a temperature",
        )


@schema
class StudentTeacher(Run):
    """Students that learn a fixed teacher, as replicas side by side (instability paper, section 4).

    There is one replica for each pair of a seed of `seeds`, which draws its initial weights, and a learning rate of
    `lrs`. `data_seed` draws teacher, inputs and label noise, the same for all replicas. `label_noise`: its standard
    deviation; 0: none, even with `own_noise`. `own_noise`: draw other noise than runs without it, as in the public
    code, where MX and FP32 runs differ in their noise.
    """

    study: Literal["student_teacher"] = "student_teacher"
    seeds: tuple[int, ...] = (0,)
    lrs: tuple[float, ...] = (6e-4,)
    data_seed: int = 0
    model: ResidualMLP  # the sizes of the student
    norm: Norm | None  # what divides a row by its RMS, or by an estimate of it
    precision: Precision
    student: Student = Student()
    teacher: Teacher = Teacher()  # the fixed function that students learn
    loss: Literal["mse", "kl"] = "mse"  # mean squared error, or KL divergence
    label_noise: float = 0.005
    own_noise: bool = False
    optimizer: StudentOptimizer  # how gradients move the weights
    schedule: Schedule
    train: StackTrain  # steps, batches, and how they are computed
    checkpoint: Checkpoint = Checkpoint()
    probe: StudentProbes = cosmetic(default_factory=StudentProbes)  # what is measured, and how often

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("seeds", "lrs"):
            values = getattr(self, name)
            require(len(values) == len(set(values)) > 0, f"{name}: give one or more, each once, not {list(values)}")
        require(min(self.lrs) > 0, f"lrs: must be positive, not {list(self.lrs)}")
        require(self.label_noise >= 0, f"label_noise: must not be negative, not {self.label_noise}")
        require(self.loss == "mse" or not self.label_noise, "label_noise: must be 0 with loss=kl")
        require(
            self.label_noise > 0 or not self.teacher.from_disk,
            "teacher.from_disk: stored targets have label noise, and label_noise is 0; set it to false",
        )
        self.schedule.check_steps(self.train.steps)
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
        """Return seed and learning rate of each replica, in the stack's order."""
        return tuple((seed, lr) for lr in self.lrs for seed in self.seeds)

    @property
    def noise_streams(self) -> tuple[str, ...]:
        """Return the names of the random streams of label noise, all of which add to the targets."""
        if not self.label_noise:
            return ()
        drawn = "own_noise" if self.own_noise else "noise"
        return (drawn, "disk_noise") if self.teacher.from_disk else (drawn,)


@schema
class Fork(Run):
    """A student-teacher run, repeated from a step on with something changed; all else is as in its parent.

    `parent`: a run's folder, a fingerprint, or an MLflow run id. Every replica that diverges at step t is forked at
    step t - `intervene_before` and at every one of `fractions` times t. With `at_step`, all replicas are forked at that
    step instead. A fork runs for `steps` steps; past the parent's end it keeps the parent's last learning rate.

    The fingerprint hashes the chosen run and steps instead of the fields that choose them.
    """

    study: Literal["fork"] = "fork"
    parent: str = named()
    intervention: Intervention = Intervention()
    intervene_before: int = named(10)
    fractions: tuple[float, ...] = named((0.88,))
    at_step: int | None = named(None)
    steps: int = 1500
    device: Literal["auto", "cpu", "cuda"] = cosmetic("auto")  # auto takes a GPU if there is one

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("intervene_before", "steps"):
            require(getattr(self, name) > 0, f"{name}: must be positive, not {getattr(self, name)}")
        for fraction in self.fractions:
            require(0 < fraction < 1, f"fractions: must lie between 0 and 1, not {list(self.fractions)}")
        require(self.at_step is None or self.at_step >= 0, f"at_step: must not be negative, not {self.at_step}")
        require(
            self.at_step is None or (self.intervene_before, self.fractions) == (Fork.intervene_before, Fork.fractions),
            "at_step: replicas are forked at this step only; leave out intervene_before and fractions",
        )


STUDIES: dict[str, type[Run]] = {
    "pretrain": Pretrain,
    "prepare_data": PrepareData,
    "student_teacher": StudentTeacher,
    "fork": Fork,
    "approximation": Approximation,
    "evaluate": Evaluate,
    "perplexity": Perplexity,
    "generate": Generate,
}


AnyRun: TypeAlias = Pretrain | PrepareData | StudentTeacher | Fork | Approximation | Evaluate | Perplexity | Generate


def read_run(values: Mapping[str, Any]) -> AnyRun:
    """Return a composed config, given as plain data, as the frozen dataclass of its kind of run. Raises ConfigError."""
    kind = values.get("study")
    require(kind is not None, "study: missing; start from an experiment: +experiment=NAME")
    if str(kind) not in STUDIES:  # a list cannot be looked up
        raise ConfigError(f"study: {kind!r} is not a choice; {suggest(str(kind), STUDIES)}")
    config: AnyRun = read(STUDIES[str(kind)], values)
    return config

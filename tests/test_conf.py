"""Every YAML file of conf/ and sweeps/ composes to a config that a study accepts, with the fingerprint that it had.

Otherwise finished runs would be trained again. A fingerprint that has to change needs a new
`mxstudy.config.fingerprint.SCHEMA_VERSION`, or another question of the experiment; `python tests/fingerprints.py` adds
new ones.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
import yaml
from composing import compose, compose_job, covering, handed_over, validated
from each import each, slow_but
from fingerprints import all_recorded, fingerprint_of, names, recorded
from pyarrow import parquet

from mxstudy.cli import composing
from mxstudy.config import Decoder, EvaluationDuringTraining, conf_folders, read_run
from mxstudy.config.conf_folders import CONF, STARTS
from mxstudy.data.tokenizer import ByteTokenizer
from mxstudy.help.group_choices import groups
from mxstudy.reader import ConfigError, flatten, plain
from mxstudy.small_files import yaml_of
from mxstudy.studies.pretrain import study as pretrain
from mxstudy.studies.pretrain.built import build_model, parameters_of, size_text
from mxstudy.tracking.unchanged import digest_of
from mxstudy.words import as_text

EXPERIMENTS = sorted((CONF / "experiment").glob("**/*.yaml"))
SWEEPS = sorted(path for path in conf_folders.SWEEPS.glob("*.yaml") if not path.stem.startswith("base_"))
GROUPS = {g: c for g, c in groups().items() if g not in {*STARTS, "study", "hydra/launcher"}}

# What a choice cannot be used without.
NEEDS = {
    "data=text": ["data.paths=[a.txt]"],
    "data=jsonl": ["data.paths=[a.jsonl]"],
    "data=parquet": ["data.paths=[a.parquet]"],
    "data=hugging_face": ["data.name=a/b"],
    "tokenizer=pretrained": ["tokenizer.name=tokenizer.json"],
    "tokenizer=bpe_32k": ["model.vocab_size=32000"],
    "precision=fp32": ["train.compute=fp32"],
    "precision=fp8_blockwise": ["precision.pad_blocks=true"],
    "data=blend": ["data.phases=[{weights: {pysource: 1}}]"],
    "schedule=cosine_2000_steps": ["train.steps=3000"],
    "probe=routing": ["model=moe_tiny"],
    "schedule=torchtitan": ["train.steps=300"],
}
# What a stack of students needs for a choice: a norm with a gain to round, a forward with blocks of MX.
STUDENT_NEEDS = {
    "norm=none": ["student.gain=fp32"],
    "norm=mxnorm_postround": ["norm.format=E4M3"],
    "precision=bf16": ["fidelity=none"],
    "precision=fp32": ["fidelity=none", "train.compute=fp32"],
    "precision=fp8_tensor": ["student.gain=bf16", "precision.scale_rule=rceil"],
    "precision=mxfp8_backward_only": ["student.gain=bf16"],
    "precision=fp8_blockwise": ["student.gain=bf16", "precision.scale_rule=rceil"],
    "precision=mxfp4_rht_sr": ["student.gain=bf16"],
    "precision=quartet": ["student.gain=bf16"],
    "precision=nvfp4": ["student.gain=bf16", "precision.scale_rule=rceil"],
    "precision=nvfp4_parts": ["student.gain=bf16", "precision.scale_rule=rceil"],
    "precision=nvfp4_forward_only": ["student.gain=bf16", "precision.scale_rule=rceil"],
    "precision=nvfp4_four_over_six": ["student.gain=bf16", "precision.scale_rule=rceil"],
}
STUDENT_GROUPS = {"norm", "precision", "teacher", "loss", "fidelity"}
STUDENT_CHOICES = [f"model={choice}" for choice in GROUPS["model"] if choice.startswith("residual_mlp")]
STUDENT_CHOICES += ["train=stack", "optimizer=adam", "optimizer=sgd", "optimizer=sgd_momentum"]
STUDENT_CHOICES += ["schedule=constant_no_warmup", "schedule=cosine_no_warmup"]
STUDENT_CHOICES += [f"probe={choice}" for choice in GROUPS["probe"] if choice.startswith("student_")]
STUDENT_CHOICES += [f"{g}={c}" for g in GROUPS for c in GROUPS[g] if g in STUDENT_GROUPS and c != "as_trained"]
# What a rehearsal replaces another choice by.
GIVES_WAY = {"pretrain": ["tokenizer=pretrained"], "prepare_data": ["tokenizer=bpe_32k"]}
OF_STUDENTS = {
    "norm=none",
    *(f"intervention={choice}" for choice in GROUPS["intervention"]),
    *(c for c in STUDENT_CHOICES if c.partition("=")[0] not in ("norm", "precision", "schedule")),
}

CHOICES = [(g, c) for g, choices in GROUPS.items() for c in choices if f"{g}={c}" not in OF_STUDENTS]


def stem(value: object) -> str:
    return value.stem if isinstance(value, Path) else str(value)


def command_of(path: Path) -> list[str]:
    """Return the words after `python -m mxstudy` of a file's second line.

    Words that only the user can fill in are left out.
    """
    words = shlex.split(path.read_text().splitlines()[1])[4:]
    given = ("=RUN", "=FOLDER")
    return [as_text(word) for word in words if not word.endswith(given) and not word.startswith("data.paths=")]


WITH_WORDS = [path for path in EXPERIMENTS if len(command_of(path)) > 1]


@pytest.mark.integration
@each("path", EXPERIMENTS + SWEEPS, ids=stem)
def test_line_1_is_the_package_and_line_2_a_command_for_the_file(
    path: Path, given_to: Callable[[str], list[str]]
) -> None:
    package, command = path.read_text().splitlines()[:2]
    assert package == "# @package _global_"
    assert command.startswith("# python -m mxstudy ")
    said = command_of(path)
    folder = "sweep" if path in SWEEPS else "experiment"
    assert said[0] == f"+{folder}={path.stem}"
    keys = {word.partition("=")[0] for word in shlex.split(command)[4:]}
    assert keys <= {word.partition("=")[0] for word in [*said, *given_to(path.stem)]}


@pytest.mark.integration
@pytest.mark.parametrize("path", slow_but(WITH_WORDS[::8], WITH_WORDS), ids=stem)
def test_the_command_of_an_experiment_is_valid(path: Path, given_to: Callable[[str], list[str]]) -> None:
    """A command that is its name alone is composed in the test of rehearsals."""
    validated(compose_job(*command_of(path), *given_to(path.stem)))


@pytest.mark.integration
@pytest.mark.parametrize("path", SWEEPS[::16], ids=stem)
def test_the_command_of_a_sweep_is_valid_and_its_runs_are_recorded(
    path: Path, given_to: Callable[[str], list[str]]
) -> None:
    """All jobs have their fingerprints, in order, and enough jobs are validated to have every override once.

    tests/test_shared_sweeps.py composes every sweep, and holds the same for all of them.
    """
    loader, master, jobs = handed_over(*command_of(path), *given_to(path.stem))
    composed = list(composing.compose(loader, master, jobs))
    assert [fingerprint_of(read_run(one.values)) for one in composed] == recorded(f"sweep/{path.stem}")
    chosen = set(map(tuple, covering(jobs)))
    assert chosen
    for one in composed:
        if one.overrides in chosen:
            validated(one)


@pytest.mark.integration
@pytest.mark.parametrize("path", slow_but(EXPERIMENTS[::6], EXPERIMENTS), ids=stem)
def test_an_experiment_and_its_rehearsal_are_valid(path: Path, given_to: Callable[[str], list[str]]) -> None:
    name = path.relative_to(CONF / "experiment").with_suffix("").as_posix()
    given = given_to(name)
    full = validated(compose_job(f"+experiment={name}", *given))
    assert full.experiment == name
    assert recorded(f"experiment/{name}") == [fingerprint_of(full)]
    stored = yaml.safe_load(yaml_of(plain(full)))
    assert digest_of(read_run(stored)) == digest_of(full)  # otherwise no run of it could be read again
    words = GIVES_WAY.get(full.study, [])
    tiny = flatten(plain(validated(compose_job(f"+experiment={name}", "+debug=tiny", *given, *words))))
    asked = {key: value for key, value in tiny_values(full.study).items() if key in tiny}
    kind = flatten(plain(full)).get("data.kind")
    if kind in ("blend", "files"):  # phases are rehearsed, with other corpora, and one's own text is kept
        asked["data.kind"] = kind
    assert asked
    assert {key: tiny[key] for key in asked} == asked
    if "train.sequence_length" in tiny:
        assert tiny["train.steps"] * tiny["train.batch_size"] * tiny["train.sequence_length"] <= 10_000


def test_all_fingerprints_are_recorded() -> None:
    assert sorted(all_recorded()) == sorted(names())


def tiny_values(study: str) -> dict[str, Any]:
    """Return what conf/debug/tiny.yaml sets for such a kind of run, by dotted key; a training asks no questions."""

    def said(value: Any) -> Any:
        if asked := re.fullmatch(r"\$\{if_asked:(\d+)\}", str(value)):
            return EvaluationDuringTraining.limit if study == "pretrain" else int(asked[1])
        of = re.fullmatch(r"\$\{of:(\w+),(\d+),(\d+)\}", str(value))
        return int(of[2] if of[1] == study else of[3]) if of else value

    values = yaml.safe_load((CONF / "debug" / "tiny.yaml").read_text())
    return {key: said(value) for key, value in flatten(values | values["in_place_of"]).items()}


def test_a_rehearsal_gives_way_to_what_else_is_asked_for() -> None:
    tiny = validated(compose_job("+experiment=approximation", "+debug=tiny", "draws=3"))
    assert (tiny.draws, tiny.rows) == (3, tiny_values("approximation")["rows"])


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "foreign"),
    [
        ("quickstart", "rows=5"),
        ("quickstart", "seeds=[1]"),
        ("approximation", "train.steps=3"),
        ("student_teacher", "model.ffn_size=96"),
        ("student_teacher", "train.sequence_length=32"),
    ],
)
def test_a_rehearsal_does_not_swallow_what_was_meant_for_another_kind_of_run(name: str, foreign: str) -> None:
    key = foreign.partition("=")[0] if name == "student_teacher" else foreign.split(".")[0].split("=")[0]
    with pytest.raises(ConfigError, match=f"{key}: no such key"):
        validated(compose_job(f"+experiment={name}", "+debug=tiny", foreign))


@pytest.fixture
def files(here: Path) -> None:
    """Write the files that NEEDS names."""
    for name in ("tokenizer.json", "a.json", "b.json"):
        ByteTokenizer().save(here / name)
    (here / "a.txt").write_text("a b c " * 200_000)
    (here / "a.jsonl").write_text('{"text": "a b c"}')
    parquet.write_table(pyarrow.table({"text": ["a b c"]}), here / "a.parquet")


@pytest.mark.integration
@pytest.mark.usefixtures("files")
def test_corpora_of_two_tokenizers_are_identified_apart() -> None:
    """Corpora of two tokenizers have different identities.

    A pretrained tokenizer's name is not in the hash, but its content is, through the identity of the corpus.
    """
    jobs = [
        validated(compose_job("+experiment=quickstart", "tokenizer=pretrained", f"tokenizer.name={name}"))
        for name in ("a.json", "b.json")
    ]
    assert len({pretrain.STUDY.identity_key(job) for job in jobs}) == 2


@pytest.mark.integration
@pytest.mark.parametrize(("group", "choice"), slow_but(CHOICES[::8], CHOICES))
@pytest.mark.usefixtures("files")
def test_every_choice_of_every_group_is_valid(group: str, choice: str) -> None:
    one = compose_job("+experiment=quickstart", f"{group}={choice}", *NEEDS.get(f"{group}={choice}", []))
    assert one.choices[group] == choice
    if choice == "as_trained":  # a choice for a checkpoint
        with pytest.raises(ConfigError, match=f"{group}: null; this kind of run needs one"):
            validated(one)
    else:
        validated(one)


@pytest.mark.integration
def test_a_training_asks_the_recipes_questions(evaluation_sets: Path) -> None:
    asked = ["evaluation.every_steps=4", f"evaluation.data_dir={evaluation_sets}"]
    found = validated(compose_job("+experiment=quickstart", "+evaluation=reasoning", *asked)).evaluation
    assert [(found.shots_of(name), found.forms_of(name)) for name in ("mmlu", "race")] == [(5, ("mcf",)), (1, ("cf",))]
    assert (len(found.tasks), found.limit) == (10, None)
    with pytest.raises(ConfigError, match=r"^evaluation: write \+evaluation=NAME, with a plus"):
        validated(compose_job("+experiment=quickstart", "evaluation=reasoning"))


@pytest.mark.integration
def test_the_recipes_questions_are_refused_without_a_training_split(
    given_to: Callable[[str], list[str]], evaluation_sets: Path, tmp_path: Path
) -> None:
    sets = tmp_path / "sets"
    shutil.copytree(evaluation_sets, sets, ignore=shutil.ignore_patterns("piqa.train.*"))
    checkpoint, _ = given_to("nvidia_reasoning")
    asked = ["+experiment=nvidia_reasoning", checkpoint, f"evaluation.data_dir={sets}"]
    with pytest.raises(ConfigError, match=r"^evaluation\.data_dir: .* has no piqa\.train"):
        validated(compose_job(*asked))
    validated(compose_job(*asked, "evaluation.skip_missing=true"))


@pytest.mark.integration
@pytest.mark.parametrize("choice", slow_but(STUDENT_CHOICES[::4], STUDENT_CHOICES))
def test_every_choice_of_the_students_is_valid(choice: str) -> None:
    validated(compose_job("+experiment=student_teacher", choice, *STUDENT_NEEDS.get(choice, [])))


@pytest.mark.integration
@pytest.mark.parametrize("experiment", slow_but(groups()["experiment"][::4], groups()["experiment"]))
def test_probes_can_be_turned_off_by_one_choice(experiment: str) -> None:
    """An experiment chooses its probes, and sets none of their values itself."""
    chosen = compose_job(f"+experiment={experiment}").choices.get("probe")
    if chosen is None:
        return
    none = "student_none" if chosen.startswith("student_") else "none"
    probes = compose_job(f"+experiment={experiment}", f"probe={none}").values["probe"]
    assert {name for name, settings in probes.items() if settings["every_steps"]} == set()


@pytest.mark.integration
@pytest.mark.parametrize("choice", slow_but(GROUPS["intervention"][::4], GROUPS["intervention"]))
def test_every_intervention_is_valid(choice: str, given_to: Callable[[str], list[str]]) -> None:
    validated(compose_job("+experiment=interventions", f"intervention={choice}", *given_to("interventions")))


# scale_rule, rounding, operand_pre_round, pad_blocks; gain, vector_ops, freeze_norm_bias; teacher, quantized;
# own_noise, swiglu_multiple
FIDELITIES = {
    "public_code": (("floor", "away", True, True), ("bf16", "code", True), ("code", True), (True, 1)),
    "paper_text": (("floor", "away", True, False), ("mx", "bf16", False), ("paper", False), (False, 32)),
    "clean": (("floor", "even", False, False), ("mx", "bf16", False), ("paper", False), (False, 32)),
    "none": (("rceil", "even", False, False), ("fp32", "fp32", False), ("code", False), (False, 32)),
}


@pytest.mark.integration
@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_a_fidelity_is_what_its_source_does_and_gives_way_to_any_choice(fidelity: str) -> None:
    config = validated(compose_job("+experiment=student_teacher", f"fidelity={fidelity}"))
    precision, student, teacher = config.precision, config.student, config.teacher
    assert (
        (precision.scale_rule, precision.rounding, precision.operand_pre_round, precision.pad_blocks),
        (student.gain, student.vector_ops, student.freeze_norm_bias),
        (teacher.kind, teacher.quantized),
        (config.own_noise, config.model.swiglu_multiple),
    ) == FIDELITIES[fidelity]
    changed = ["precision=mx_mix", "precision.scale_rule=even", "student.gain=bf16", "teacher=scaled"]
    other = validated(compose_job("+experiment=student_teacher", *changed, f"fidelity={fidelity}"))
    assert (other.precision.scale_rule, other.student.gain, other.teacher.kind) == ("even", "bf16", "scaled")
    assert other.precision.schedule[0].plan == {"layers.*": "mx_mix"}
    assert (other.precision.rounding, other.teacher.quantized) == (precision.rounding, teacher.quantized)


@pytest.mark.integration
def test_the_quickstart_compares_four_arms_with_rmsnorm_in_mxfp8() -> None:
    jobs = compose("+sweep=quickstart", "wait=true")
    assert [(job.choices["precision"], job.choices["norm"]) for job in jobs] == [
        ("bf16", "rmsnorm"),
        ("mxfp8", "rmsnorm"),
        ("mxfp8", "mxnorm_p1"),
        ("mxfp8", "mxnorm_p2"),
    ]
    configs = [validated(job) for job in jobs]
    assert all(config.baseline == {"precision": "mxfp8", "norm": "rmsnorm"} for config in configs)
    assert len({(c.seed, c.data_seed, c.model, c.data, c.tokenizer, c.optimizer, c.train) for c in configs}) == 1


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "millions"),
    [("llama_125m", 121.7), ("llama_250m", 243.3), ("llama_1b", 973.2), ("llama_8b", 6979.6)],
)
def test_models_have_the_parameters_that_their_names_say(name: str, millions: float) -> None:
    """The count leaves out embedding and head, as in the MXNorm paper."""
    model: Decoder = validated(compose_job("+experiment=quickstart", f"model={name}")).model
    width = model.hidden_size
    attention = 2 * width**2 * (1 + model.num_kv_heads / model.num_heads)
    gains = 2 * width
    total = model.num_layers * (attention + 3 * width * model.ffn_size + gains) + width
    assert total / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("moe_tiny", 7.0, 2.9), ("moe_200m", 202.7, 63.7), ("nemotron_moe_16b", 16194.8, 2473.1)],
)
def test_mixtures_have_the_parameters_that_their_files_say(name: str, total: float, active: float) -> None:
    """Active parameters are those in matrix products, with the head and without the embedding."""
    with torch.device("meta"):
        counted = parameters_of(
            build_model(validated(compose_job("+experiment=moe", f"model={name}", "tokenizer=bpe_2k")))
        )
    assert counted["parameters"] / 1e6 == pytest.approx(total, abs=0.1)
    assert counted["active_matmul_parameters"] / 1e6 == pytest.approx(active, abs=0.1)
    assert size_text(counted) == f"{total:,} M parameters ({active:,} M active in matrix products)"


@pytest.mark.integration
def test_the_sizes_and_budgets_of_the_instability_paper() -> None:
    """The budgets are six from 2e17 to 1e19 FLOPs in equal ratios, and two more.

    Steps have 512 x 512 tokens, and 2 < D / N < 200.
    """
    budgets = [2e17 * 50 ** (i / 5) for i in range(6)] + [2.2e19, 4.84e19]
    grid = []
    for flops in budgets:
        for n in [*range(4, 23), 24, 26, 28, 30, 32]:
            width = 64 * n
            parameters = 2 * 32_000 * width + 12 * width**2 * n + 4 * width * n + width
            steps = int(flops / (6 * parameters) / 512**2)
            if 2 < steps * 512**2 / parameters < 200:
                grid.append((f"model.num_heads={n}", f"train.steps={steps}"))
    assert len(grid) == 95
    _, _, jobs = handed_over("+sweep=olmo_precision_grid")
    arms = {precision: [job for job in jobs if f"precision={precision}" in job] for precision in ("bf16", "mxfp8_e5m2")}
    assert len(jobs) == 2 * len(grid)
    for arm in arms.values():
        assert [tuple(line for line in job if line.startswith(("model.", "train."))) for job in arm] == grid

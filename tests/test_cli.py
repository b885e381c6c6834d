"""The command line works as a user meets it, up to the launch."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from composing import compose, compose_job, validated, value
from each import each, slow_but

from mxstudy import explain
from mxstudy.cli import through_hydra
from mxstudy.cli.main import main
from mxstudy.config import Inline
from mxstudy.config.conf_folders import CONF
from mxstudy.help.group_choices import groups
from mxstudy.launch.start import Launched
from mxstudy.reader import ConfigError

ROOT = Path(__file__).parents[1]
QUICK = "+experiment=quickstart"


ASKED = ["+experiment=perplexity", "checkpoint=RUN"]
AS_A_WHOLE = (
    "{key}: {group}=as_trained takes the checkpoint's own as a whole; choose one by name, then change its "
    "values: {group}=NAME {key}=VALUE"
)

NO_LIST = "cannot be read (Invalid defaults list in 'config', defaults must be a list"
OF_STUDENTS = "{}: is for study=student_teacher, and this run is study=pretrain; {}"


def refusal(*arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        compose(*arguments)
    return str(caught.value)


MISSPELT = [
    (["+experiment=quikstart"], "experiment=quikstart: no such choice; did you mean 'quickstart'?"),
    (["+sweep=quikstart"], "sweep=quikstart: no such choice; did you mean 'quickstart'?"),
    (["experiment=quickstart"], "experiment: write +experiment=NAME, with a plus"),
    (["norm=rmsnorm"], "norm: there is no choice to replace; start from +experiment=NAME or +sweep=NAME, one that has"),
    ([QUICK, "teacher=code"], "+experiment=NAME or +sweep=NAME, one that has teacher (study=student_teacher)"),
    (["nrom=rmsnorm"], "nrom: no such key; did you mean 'norm'?"),
    ([QUICK, "nrom=rmsnorm"], "nrom: no such key; did you mean 'norm'?"),
    ([QUICK, "norm=mxnorm_p3"], "norm=mxnorm_p3: no such choice; did you mean 'mxnorm_p2'?"),
    ([QUICK, "+norm=mxnorm_p1"], "norm: is chosen already; write norm=NAME, without a plus"),
    ([QUICK, "train.stepz=3"], "train.stepz: no such key; did you mean 'steps'?"),
    (
        [QUICK, "data.paths=[book.txt]"],
        "data.paths: no such key here; it belongs to data=jsonl or data=parquet or data=text",
    ),
    (["+experiment=student_teacher", "train.recompute_mlp=3"], "no such key here; it belongs to study=pretrain"),
    ([*ASKED, "precision.backend=fused"], AS_A_WHOLE.format(group="precision", key="precision.backend")),
    ([*ASKED, "norm.eps=0"], AS_A_WHOLE.format(group="norm", key="norm.eps")),
    ([QUICK, "baseline.norm=rmsnorm"], "baseline.norm: not in the config yet; write +baseline.norm=VALUE"),
    ([QUICK, "hydra.launcher.partition=gpu"], "no such key here; it belongs to hydra/launcher=slurm"),
    ([QUICK, "hydra/launcher=inlin"], "hydra/launcher=inlin: no such choice; did you mean 'inline'?"),
    ([QUICK, "hydra/launcher=basic"], "hydra/launcher: this launcher does not run studies"),
    ([QUICK, "hydra/sweeper=basic"], "hydra/sweeper: this sweeper does not run studies; choose grid"),
    ([QUICK, "+hydra.launcher.nodes=3"], "hydra.launcher.nodes: no such key; choose from kind"),
    ([QUICK, "hydra/launcher=slurm", "hydra.launcher.nods=3"], "hydra.launcher.nods: no such key; did you mean"),
    ([QUICK, "hydra/launcher=slurm", "hydra.launcher.nodes=0"], "hydra.launcher.nodes: must be at least 1, not 0"),
    ([QUICK, "train"], "train: must be GROUP=CHOICE or KEY=VALUE"),
    (["+experiment", "quickstart"], "+experiment: must be GROUP=CHOICE or KEY=VALUE; did you mean +experiment=NAME?"),
    (["status"], "status: must be GROUP=CHOICE or KEY=VALUE; did you mean +launch=status?"),
    (["--experiment=quickstart"], "--experiment: no such option; did you mean +experiment=quickstart?"),
    ([QUICK, "--debug"], "--debug: no such option; did you mean +debug=NAME?"),
    ([QUICK, "--dry-run"], "--dry-run: no such option; a key has no dashes: dry_run=VALUE"),
    ([QUICK, "--hlep"], "--hlep: no such option; did you mean '--help'?"),
    ([QUICK, "--cfg", "all"], "--cfg all: no such view; --cfg job prints the config of each run, --cfg hydra the"),
    ([QUICK, "-c=jobs"], "-c jobs: no such view; --cfg job prints the config of each run"),
]


@pytest.mark.integration
@pytest.mark.parametrize(("arguments", "message"), slow_but(MISSPELT[::4], MISSPELT))
def test_a_misspelt_command_is_refused_with_what_would_be_right(arguments: list[str], message: str) -> None:
    said = refusal(*arguments)
    assert message in said
    assert "append to your config" not in said


LEFT_OUT = [
    ("precision=nvfp4", "precision.recipes.nvfp4.dgrad_dh.random_bits", "8", []),
    ("precision=nvfp4", "precision.recipes.nvfp4.wgrad_transform.signs", "call", ["vector=[]"]),
    ("precision=mxfp4_h16", "precision.recipes.mxfp4_h16.forward_transform.signs", "seed", []),
    ("precision=mxfp4_rht_sr", "precision.recipes.mxfp4_rht_sr.forward_x.format", "E2M1", []),
]


@pytest.mark.integration
@pytest.mark.parametrize(("choice", "key", "given", "more"), LEFT_OUT)
def test_a_key_that_its_file_leaves_out_takes_a_plus(choice: str, key: str, given: str, more: list[str]) -> None:
    assert f": not in the config yet; write +{key.removesuffix('format')}" in refusal(QUICK, choice, f"{key}={given}")
    beside = [f"{key.rpartition('.')[0]}.{line}" for line in more]
    assert isinstance(compose_job(QUICK, choice, f"+{key}={given}", *beside).values, dict)


def test_a_transform_with_written_signs_says_how_to_draw_them() -> None:
    words = (QUICK, "precision=nvfp4", "+precision.recipes.nvfp4.wgrad_transform.signs=call")
    with pytest.raises(ConfigError, match=r"wgrad_transform.vector: signs=call draws the signs; write vector=\[\] or"):
        validated(compose_job(*words))
    validated(compose_job(*words, "precision.recipes.nvfp4.wgrad_transform.vector=[]"))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*ASKED, "+precision.backend=fused"], AS_A_WHOLE.format(group="precision", key="precision.backend")),
        (["+experimant=quickstart"], "experimant: no such key; did you mean '+experiment'?"),
        ([QUICK, "optimizer=sgd"], OF_STUDENTS.format("optimizer=sgd", "choose from adamw")),
        ([QUICK, "train=stack", "seed=1"], OF_STUDENTS.format("train=stack", "choose from default")),
        ([QUICK, "+teacher=code", "+debug=tiny"], OF_STUDENTS.format("teacher=code", "leave it out")),
        (
            ["+experiment=student_teacher", "model=llama_tiny"],
            "model=llama_tiny: is for study=pretrain, and this run is study=student_teacher; choose from residual_mlp, "
            "residual_mlp_attention",
        ),
        (["+debug=tiny"], "nothing to run; start from +experiment=NAME or +sweep=NAME"),
        ([QUICK, "norm=mxnorm_p3,x"], "norm=mxnorm_p3: no such choice; did you mean 'mxnorm_p2'?"),
    ],
)
def test_what_hydra_lets_through_is_refused_as_the_job_is_composed(arguments: list[str], message: str) -> None:
    error = compose(*arguments)[0].values
    assert isinstance(error, ConfigError)
    assert str(error) == message


@pytest.mark.integration
@each(
    ("text", "means"),
    [
        *(
            (text, [text])
            for text in ("def f(", "a, b", 'say "hi"', "a\\n", "c:\\", 'x\\"y', "two\nlines", "it's ${x}", "", " ")
        ),
        ('"a, b"', ["a, b"]),
        ('"a","b c"', ["a", "b c"]),
    ],
)
def test_a_prompt_is_read_as_it_is(text: str, means: list[str]) -> None:
    jobs = compose("+experiment=generate", "checkpoint=RUN", f"prompt={text}")
    assert [job.values["prompt"] for job in jobs] == means


@pytest.mark.integration
def test_a_misspelt_choice_inside_a_yaml_file_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    lines = ["# @package _global_", "defaults:", "  - /study: pretrain", "  - override /norm: mxnrom_p2", "  - _self_"]
    (folder / "mine.yaml").write_text("\n".join(lines))
    message = "norm=mxnrom_p2: no such choice; did you mean 'mxnorm_p2'?"
    assert refusal("+experiment=mine", "--config-dir", str(tmp_path)) == message
    lines[3] = "  - override /nrom: mxnorm_p2"
    (folder / "mine.yaml").write_text("\n".join(lines))
    assert refusal("+experiment=mine", "--config-dir", str(tmp_path)) == "nrom: no such group; did you mean 'norm'?"


@pytest.mark.integration
def test_an_experiment_that_overrides_choices_without_its_first_line_is_told_so(tmp_path: Path) -> None:
    """It was once told to start from an experiment."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "defaults:\n  - /study: pretrain\n  - override /norm: mxnorm_p2\n"
    )
    line = refusal("+experiment=mine", "--config-dir", str(tmp_path))
    assert line.startswith("experiment/mine: its choices would stand below a key of their own; begin it with '# @pack")


OTHERS = "a choice of another group is - /GROUP: CHOICE"
NAMED = [
    ("experiment", "quickstrat", f"quickstrat, which is no file of experiment; {OTHERS}; did you mean 'quickstart'?"),
    ("precision", "base_precison", f"base_precison, which is no file of precision; {OTHERS}; did you mean 'base_pre"),
    ("experiment", "/nope", f"nope, which is no file of conf; {OTHERS}"),
    ("experiment", "/nrom: rmsnorm", "the group nrom, which does not exist; did you mean '/norm'?"),
    ("experiment", "norm: rmsnorm", "the group experiment/norm, which does not exist; did you mean '/norm'?"),
]


@pytest.mark.integration
@each(("group", "name", "line"), NAMED)
def test_a_file_whose_defaults_name_what_does_not_exist_is_named(
    group: str, name: str, line: str, tmp_path: Path
) -> None:
    file = tmp_path / group / "mine.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"defaults: [{{{name}}}]\n" if ": " in name else f"defaults: [{name}]\n")
    words = ["+experiment=mine"] if group == "experiment" else [QUICK, f"{group}=mine"]
    assert refusal(*words, f"--config-dir={tmp_path}").startswith(f"{group}/mine.yaml: its defaults name {line}")


@pytest.mark.integration
@each("first", ["", "# @package _global_\n"])
def test_an_experiment_of_the_users_own_that_names_no_kind_of_run_is_refused(first: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir(exist_ok=True)
    (tmp_path / "experiment" / "mine.yaml").write_text(f"{first}seed: 1\n")
    error = compose("+experiment=mine", f"--config-dir={tmp_path}")[0].values
    assert str(error) == (
        "experiment=mine: its file names no kind of run; begin it with '# @package _global_', and its defaults with "
        "- /study: NAME"
    )


@pytest.mark.integration
@each(
    ("left", "line"),
    [
        ("# The root", "cannot be read (it is empty; {})"),
        (
            "defaults:\n",
            NO_LIST + " (got NoneType); {})",
        ),
        ("defaults:\n  - hydra_def", "its defaults name hydra_def, which does not exist; {}"),
        ("defaults:\n  - hydra_defaults\n  - _s", "its defaults name _s, which does not exist; {}"),
        ("defaults: [hydra\n", "cannot be read (line 2, column 1: expected ',' or ']', but got '<stream end>'; {})"),
    ],
)
def test_a_root_config_that_was_cut_off_is_named_and_can_be_restored(
    left: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text(left)
    (tmp_path / "hydra_defaults.yaml").write_bytes((CONF / "hydra_defaults.yaml").read_bytes())
    for module in (through_hydra, explain):
        monkeypatch.setattr(module, "CONF", tmp_path)
    restore = "the file comes with mxstudy: restore it from git, or install mxstudy again"
    assert refusal(QUICK) == f"{tmp_path}/config.yaml: {line.format(restore)}"


@pytest.mark.integration
def test_a_sweep_of_ours_that_is_no_yaml_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text("seed: [1\n")
    monkeypatch.setattr(through_hydra, "SWEEPS", tmp_path)
    assert refusal("+sweep=mine").startswith(f"{tmp_path}/mine.yaml: cannot be read (line 2, column 1: expected ',' or")


def test_without_arguments_the_usage_names_experiments_and_sweeps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mxstudy"])
    main()
    said = capsys.readouterr().out
    for name in [*groups()["experiment"], *groups()["sweep"], "mxnorm_p2", "+debug=tiny"]:
        assert name in said
    assert "base_" not in said


@pytest.mark.integration
def test_hydras_own_views_still_work_and_nothing_is_left_behind(tmp_path: Path) -> None:
    def shell(*arguments: str) -> str:
        command = [sys.executable, "-m", "mxstudy", *arguments]
        environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    assert "sequence_length: 256" in shell(QUICK, "--cfg", "job", "seed=3")
    assert shell(QUICK, "--cfg", "hydra").startswith("hydra:")
    assert "norm: mxnorm_p1" in shell(QUICK, "norm=mxnorm_p1", "--info", "defaults-tree")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_collected_while_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    collects: list[bool] = []

    class Start(ModuleType):
        @property
        def launch(self) -> Any:
            collects.append(gc.isenabled())
            return lambda composed, launcher: (collects.append(gc.isenabled()), Launched(0, []))[1]

    monkeypatch.setitem(sys.modules, "mxstudy.launch.start", Start("start"))
    assert through_hydra.plan_and_launch(list, Inline()) == 0
    assert collects == [False, True]


def test_the_command_line_is_read_before_torch_is_imported() -> None:
    code = "import sys, mxstudy.cli.main; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.integration
def test_a_choice_of_the_users_own_is_of_the_kind_of_run_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "optimizer").mkdir()
    for name, base in {"nesterov": "sgd_momentum", "mine": "adamw"}.items():
        (tmp_path / "optimizer" / f"{name}.yaml").write_text(f"defaults:\n  - {base}\n  - _self_\nlr: 0.1\n")
    bad, good = compose(QUICK, "optimizer=nesterov,mine", f"--config-dir={tmp_path}")
    assert str(bad.values) == OF_STUDENTS.format("optimizer=nesterov", "choose from adamw, mine")
    assert value(good, "optimizer.lr") == 0.005  # the experiment's


def test_a_reader_of_the_output_that_leaves_is_no_wrong_command() -> None:
    """`dry_run=true | head -3` printed 'Broken pipe', as if the command were wrong; now __main__ ends it in silence."""

    def printing(jobs: object, launcher: object) -> int:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        through_hydra.hand_over(["+experiment=quickstart", "+debug=tiny", "tracking=none"], printing)

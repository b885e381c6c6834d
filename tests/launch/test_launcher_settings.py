"""hydra.launcher accepts certain settings, and passes some of them to sbatch."""

from __future__ import annotations

from pathlib import Path

import pytest
from each import each
from submitit import SlurmExecutor
from submitit.slurm.slurm import _make_sbatch_string

from mxstudy.config import LAUNCHERS, Inline, Local, Slurm, read_launcher
from mxstudy.launch import slurm
from mxstudy.launch.processes import tasks_per_node
from mxstudy.reader import ConfigError, defaults


def script(**values: object) -> str:
    """Return the sbatch script of such a launch, by submitit."""
    settings = read_launcher({"kind": "slurm", **values})
    assert isinstance(settings, Slurm)
    asked = slurm.parameters(settings, Path("/code"), tasks_per_node("pretrain", settings))
    assert asked.keys() <= SlurmExecutor._valid_parameters()
    return _make_sbatch_string(command="COMMAND", folder="/logs", map_count=7, **asked)


def test_defaults_are_read_back_as_they_are() -> None:
    for kind, cls in LAUNCHERS.items():
        assert read_launcher(defaults(cls)) == cls()
        assert defaults(cls)["kind"] == kind


@each(
    ("values", "message"),
    [
        ({"kind": "slrum"}, "hydra.launcher.kind: 'slrum' is not a choice; did you mean 'slurm'?"),
        ({"kind": "inline", "nodes": 3}, "hydra.launcher.nodes: no such key; choose from kind"),
        ({"kind": "slurm", "partion": "x"}, "hydra.launcher.partion: no such key; did you mean 'partition'?"),
        ({"kind": "slurm", "nodes": 0}, "hydra.launcher.nodes: must be at least 1, not 0"),
        ({"kind": "slurm", "gpus_per_node": -1}, "hydra.launcher.gpus_per_node: must be at least 0, not -1"),
        ({"kind": "slurm", "memory_gb": 0}, "hydra.launcher.memory_gb: must be positive, not 0.0"),
        ({"kind": "slurm", "sbatch": ["qos=x"]}, "hydra.launcher.sbatch: 'qos=x' is not an option; write --NAME or"),
        ({"kind": "slurm", "sbatch": ["--qos=x\n#SBATCH --wrap=y"]}, "hydra.launcher.sbatch: '--qos=x\\n#SBATCH"),
        ({"kind": "slurm", "partition": "x\ny"}, "hydra.launcher.partition: 'x\\ny' is not a name"),
        ({"kind": "slurm", "time_min": 2}, "hydra.launcher.signal_delay_s: must be less than the 2 minutes"),
        ({"kind": "local", "jobs_per_gpu": 2, "gpus_per_node": 4}, "hydra.launcher.jobs_per_gpu: only jobs of one GPU"),
        ({"kind": "local", "array_parallelism": 0}, "hydra.launcher.array_parallelism: must be at least 1, not 0"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_launcher(values)
    assert str(caught.value).startswith(message)


def test_what_is_null_is_left_to_the_cluster() -> None:
    lines = script(gpus_per_node=0).splitlines()
    asked = {line.split("=")[0].removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    assert asked.isdisjoint({"partition", "account", "mem", "cpus-per-task", "gpus-per-node"})
    assert {"#SBATCH --ntasks-per-node=1", "#SBATCH --signal=USR2@120", "#SBATCH --requeue"} <= set(lines)


def test_every_setting_reaches_sbatch() -> None:
    text = script(
        partition="gpu",
        account="mx",
        nodes=2,
        gpus_per_node=8,
        cpus_per_task=12,
        memory_gb=1.5,
        time_min=90,
        array_parallelism=3,
        signal_delay_s=300,
        sbatch=["--exclusive", "--qos=long", "--comment=a=b"],
        setup=["module load cuda"],
    )
    options = ["partition=gpu", "account=mx", "nodes=2", "ntasks-per-node=8", "gpus-per-node=8", "cpus-per-task=12"]
    options += ["mem=1536MB", "time=90", "array=0-6%3", "signal=USR2@300", "exclusive", "qos=long", "comment=a=b"]
    lines = text.splitlines()
    assert {f"#SBATCH --{option}" for option in options} <= {line.replace("'", "") for line in lines}
    assert lines.index(slurm.FIRST_LINE) < lines.index("module load cuda") < lines.index("export PYTHONSAFEPATH=1")
    (srun,) = (line for line in lines if line.startswith("srun "))
    assert "--cpus-per-task=12" in srun


@each(
    ("study", "nodes", "gpus", "tasks"),
    [("pretrain", 1, 0, 1), ("pretrain", 2, 8, 8), ("evaluate", 1, 8, 1), ("student_teacher", 1, 1, 1)],
)
def test_tasks_of_a_kind_of_run(study: str, nodes: int, gpus: int, tasks: int) -> None:
    assert tasks_per_node(study, Slurm(nodes=nodes, gpus_per_node=gpus)) == tasks


def test_a_kind_of_run_that_cannot_use_them_refuses_gpus_and_nodes() -> None:
    with pytest.raises(ConfigError, match=r"gpus_per_node: student_teacher uses one GPU; give 1, not 2"):
        tasks_per_node("student_teacher", Slurm(gpus_per_node=2))
    with pytest.raises(ConfigError, match=r"nodes: evaluate runs in one process; give 1, not 2"):
        tasks_per_node("evaluate", Slurm(nodes=2))
    assert tasks_per_node("pretrain", Local()) == 1
    assert read_launcher({"kind": "inline"}) == Inline()

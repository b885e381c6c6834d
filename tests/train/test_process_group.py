import os
import subprocess
import sys
from pathlib import Path

import gang
import psutil
import pytest
import submitit
import torch
from each import each

from mxstudy.distributed import all_of, rank, world_size
from mxstudy.reader import ConfigError
from mxstudy.tracking.folder import RunFolder
from mxstudy.train.process_group import PORTS, ProcessRank, find_rank, first_node, gpu_of, met, process_group

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
STEP = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "n[2-3]"}
STEP |= {"SLURM_JOB_ID": "41", "SLURM_NTASKS": "4"}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "41"}
SUBMITIT = {"SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_NTASKS": "2", "SUBMITIT_LOCAL_LOCALID": "1"}
SUBMITIT |= {"SUBMITIT_LOCAL_JOB_ID": "12041"}


@each(
    ("environment", "place"),
    [
        ({}, ProcessRank()),
        (TORCHRUN, ProcessRank(5, 8, 1, "n1", 29500)),
        (STEP, ProcessRank(3, 4, 1, "n2", 20_041)),
        (STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}, ProcessRank(3, 4, 1, "10.0.0.1", 1234)),
        (STEP | TORCHRUN, ProcessRank(5, 8, 1, "n1", 29500)),
        (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, ProcessRank()),
        (BATCH_SCRIPT, ProcessRank()),  # Python without srun: the other tasks do not exist
        (SUBMITIT, ProcessRank(1, 2, 1, "127.0.0.1", 20_041)),
        (SUBMITIT | STEP, ProcessRank(1, 2, 1, "127.0.0.1", 20_041)),  # processes of a job's own
        (STEP | {"SLURM_STEP_NODELIST": "n2"}, ProcessRank(3, 4, 1, "127.0.0.1", 20_041)),  # its only node
        (TORCHRUN | {"MASTER_ADDR": "localhost"}, ProcessRank(5, 8, 1, "127.0.0.1", 29500)),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, ProcessRank(5, 8, 1, "127.0.0.1", 29500)),  # all are on this host
        ({"RANK": "0", "WORLD_SIZE": "1"}, ProcessRank()),
        (STEP | {"RANK": "0", "WORLD_SIZE": "1"}, ProcessRank()),  # torchrun within a step: what started last knows
    ],
)
def test_the_place_is_found(environment, place):
    assert find_rank(environment) == place


def test_ranks_without_a_place_to_meet_are_refused():
    with pytest.raises(ConfigError, match="MASTER_ADDR, MASTER_PORT: not set, but the variables of torchrun"):
        find_rank({"RANK": "0", "WORLD_SIZE": "2"})


@each(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu-[003-007,12],login", "gpu-003"),
        ("n[2,5-9]", "n2"),
        ("a[1-2]-ib,b", "a1-ib"),
        ("127.0.1.[1-4]", "127.0.1.1"),
        ("rack[1-2]n[03-04]", "rack1n03"),
    ],
)
def test_the_first_node_of_a_list(nodes, first):
    assert first_node(nodes) == first


def test_ports_of_jobs_are_not_given_away_by_the_system():
    assert PORTS.stop <= 32_768


def test_each_task_has_a_gpu_whether_it_sees_all_or_its_own():
    assert [gpu_of(ProcessRank(rank=4 + local, local_rank=local), 4) for local in range(4)] == [0, 1, 2, 3]
    assert [gpu_of(ProcessRank(rank=4 + local, local_rank=local), 1) for local in range(4)] == [0, 0, 0, 0]
    with pytest.raises(ConfigError, match="rank 6: it is process 3 of its node, which has 2 GPUs"):
        gpu_of(ProcessRank(rank=6, local_rank=2), 2)


def ranks_together(folder: Path) -> tuple[int, int, list[int]]:
    with process_group(torch.device("cpu"), RunFolder(folder)):
        return rank(), world_size(), all_of(rank())


def listens_at() -> set[str]:
    """Return the addresses at which this process listens while in a group, and the interfaces that it was given."""
    with met():
        all_of(rank())  # connects everyone with everyone
        found = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
        return found | {os.environ[f"{library}_SOCKET_IFNAME"] for library in ("GLOO", "NCCL")}


@pytest.mark.integration
def test_a_group_of_one_host_listens_to_that_host_alone(tmp_path):
    found = gang.together(tmp_path, 2, listens_at)
    assert set.union(*found) == {"127.0.0.1", "lo"}


@pytest.mark.slow
def test_submitit_starts_a_group(tmp_path, monkeypatch):
    """The submitted process tree has the variables that submitit sets, and no others."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    executor = submitit.AutoExecutor(tmp_path, cluster="local")
    executor.update_parameters(tasks_per_node=3, timeout_min=2)
    job = executor.submit(ranks_together, tmp_path)
    assert job.results() == [(number, 3, [0, 1, 2]) for number in range(3)]


@pytest.mark.slow
@pytest.mark.integration
def test_torchrun_starts_a_group(tmp_path):
    script = tmp_path / "say.py"
    script.write_text(
        "import pathlib, test_process_group as own\n"
        f"found = own.ranks_together(pathlib.Path({str(tmp_path)!r}))\n"
        f"pathlib.Path({str(tmp_path)!r}, f'said-{{found[0]}}').write_text(repr(found))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path}, timeout=120)
    assert [(tmp_path / f"said-{number}").read_text() for number in range(2)] == ["(0, 2, [0, 1])", "(1, 2, [0, 1])"]

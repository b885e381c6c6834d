"""Run a real Slurm on this machine: munged, slurmctld and four slurmd on loopback, all of it in one fresh folder.

Debian has it: apt-get install --no-install-recommends slurm-wlm munge. To try things out by hand:

    python tests/slurm/cluster.py start FOLDER; export SLURM_CONF=FOLDER/slurm.conf; sinfo
    python tests/slurm/cluster.py stop FOLDER
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
NODES = [f"127.0.1.{n}" for n in range(1, 5)]  # names that resolve by themselves, also within jobs

# The cluster keeps no accounts, so sacct has no answers. Without `cred_expire` a requeued job would wait for two
# minutes. `config_overrides` allows the nodes more CPUs than the machine has. One partition can be preempted, after a
# grace time in which jobs hear SIGTERM alone.
CONF = """\
ClusterName=sandbox
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
ReturnToService=2
JobRequeue=1
KillWait=30
MinJobAge=300
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout=60
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes={names} Default=YES DefaultTime=10 OverSubscribe=NO PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes={names} DefaultTime=10 OverSubscribe=NO PriorityTier=2
"""


def missing() -> list[str]:
    """Return the programs of Slurm that are not installed here."""
    programs = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
    return [program for program in programs if not shutil.which(program, path=PATH)]


@dataclass(frozen=True)
class Cluster:
    folder: Path

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    def start(self) -> None:
        """Start everything, and wait until a job has run on all nodes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)  # munge refuses a socket that others could not reach
        (self.folder / "state").mkdir()
        self._write_conf()
        key, munge = self.folder / "munge.key", self.folder / "munge"
        self._run("mungekey", "--create", f"--keyfile={key}")
        self._run(
            *("munged", f"--key-file={key}", f"--socket={munge}.socket", f"--pid-file={munge}d.pid"),
            *(f"--log-file={munge}d.log", f"--seed-file={munge}d.seed"),
        )
        self._run("slurmctld", "-f", str(self.conf))
        for node in NODES:
            (self.folder / f"spool-{node}").mkdir()
            self._run("slurmd", "-f", str(self.conf), "-N", node)
        self._run("srun", "--nodes=4", "--quiet", "true", timeout_s=60)

    def stop(self) -> None:
        """Stop what `start` has started, jobs first, by pid file, if the process still is what the file says."""
        with suppress(subprocess.SubprocessError):
            self._run("scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}", timeout_s=10)
            self._run("scancel", f"--user={getpass.getuser()}", timeout_s=10)
            self._wait_until_empty()
        for path in sorted(self.folder.glob("*.pid"), key=lambda path: path.name, reverse=True):
            with suppress(OSError, ValueError):
                pid = int(path.read_text())
                if Path(f"/proc/{pid}/comm").read_text().strip() in ("slurmd", "slurmctld", "munged"):
                    os.kill(pid, signal.SIGTERM)

    def _wait_until_empty(self) -> None:
        for _ in range(100):
            if not self._run("squeue", "--noheader", timeout_s=10).strip():
                return
            time.sleep(0.1)

    def _write_conf(self) -> None:
        with ExitStack() as held:  # all at once, so that they differ
            sockets = [held.enter_context(socket.socket()) for _ in range(1 + len(NODES))]
            for one in sockets:
                one.bind(("127.0.0.1", 0))
            controller, *ports = (one.getsockname()[1] for one in sockets)
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=4000"
            for node, port in zip(NODES, ports, strict=True)
        )
        values = {"folder": self.folder, "user": getpass.getuser(), "names": ",".join(NODES)}
        self.conf.write_text(CONF.format(controller=controller, nodes=nodes, **values))

    def _run(self, *command: str, timeout_s: float = 30) -> str:
        environment = os.environ | {"SLURM_CONF": str(self.conf), "PATH": PATH}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr or done.stdout}")
        return done.stdout


if __name__ == "__main__":
    {"start": Cluster.start, "stop": Cluster.stop}[sys.argv[1]](Cluster(Path(sys.argv[2]).absolute()))

"""A real Slurm (Debian's) on the hosts of tests/support/hosts.py.

`with slurm(3, shared) as box:` starts munge and slurmd on each host and slurmctld on the first; all ends with the
hosts. Without cgroups and a database: jobs are looked up with scontrol.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.command import ROOT
from tests.support.hosts import Cluster, Host, cluster
from tests.support.namespaces import PATH, ClusterError, Command, check
from tests.support.waiting import wait_until

_COMMANDS = ("sbatch", "srun", "slurmctld", "slurmd", "munged")

# Jobs that go back into the queue wait as long as a credential holds. Nobody's limits are passed on, for they
# may be above those of a host.
_CONF = """\
ClusterName=box
SlurmctldHost={first}({first_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/run/slurm/munge,cred_expire=5
StateSaveLocation=/run/slurm/ctld
SlurmdSpoolDir=/run/slurm/d
SlurmctldPidFile=/run/slurm/ctld.pid
SlurmdPidFile=/run/slurm/d.pid
SlurmctldLogFile=/run/slurm/ctld.log
SlurmdLogFile=/run/slurm/d.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=30
BatchStartTimeout=10
KillWait=10
MessageTimeout=10
CompleteWait=0
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1,defer_batch
PropagateResourceLimits=NONE
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
_START = """
set -e
mkdir -p -m 755 /run/slurm /run/slurm/ctld /run/slurm/d
install -m 400 "$1" /run/slurm/key
exec munged --key-file=/run/slurm/key --socket=/run/slurm/munge --pid-file=/run/slurm/munge.pid \\
    --log-file=/run/slurm/munge.log --seed-file=/run/slurm/munge.seed --num-threads=2
"""


def missing() -> list[str]:
    """What this machine lacks to run Slurm; empty when nothing."""
    return [f"the command {name}" for name in _COMMANDS if shutil.which(name, path=PATH) is None]


@dataclass
class Box:
    """Slurm on hosts.

    Attributes:
        hosts: of the cluster; jobs are submitted on the first.
        shared: a folder that all of them see; commands run in it.
        names: of the nodes, from their hosts'.
    """

    hosts: Cluster
    shared: Path
    names: str
    _conf: Path
    _daemons: dict[str, Command] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Of a user's shell on a login node, with icom's environment active."""
        kept = ("HF_ENDPOINT", "PYTHONPATH")
        return {name: os.environ[name] for name in kept if name in os.environ} | {
            "PATH": f"{Path(sys.executable).parent}:{PATH}",
            "SLURM_CONF": str(self._conf),
            "OMP_NUM_THREADS": "1",  # all hosts share this machine's cores
        }

    def run(self, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the first host to its end."""
        return self.hosts[0].run(words, self.environment | variables, self.shared)

    def icom(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run `icom` on the first host."""
        return self.run(sys.executable, "-m", "icom", *words)

    def state(self, job: str) -> str:
        """Of a job: PENDING, RUNNING, COMPLETED …"""
        return self.values(job)["JobState"]

    def values(self, job: str) -> dict[str, str]:
        """What scontrol shows of a job."""
        done = self.run("scontrol", "--oneliner", "show", "job", job)
        check(done)
        return dict(word.partition("=")[::2] for word in done.stdout.split())

    def start_slurmd(self, host: Host) -> None:
        """Start the node's daemon."""
        words = ["slurmd", "-D", "-N", self.names.format(host.name)]
        self._daemons[host.name] = host.start(words, self.environment, output=subprocess.DEVNULL)

    def kill_slurmd(self, host: Host) -> None:
        """SIGKILL for the node's daemon; its jobs' own go on."""
        self._daemons[host.name].kill()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until it holds; less often than tests.support.waiting asks, for each question is a process."""
        wait_until(condition, at_least=0.3)

    def is_idle(self) -> bool:
        """Whether all nodes are up and free."""
        return self.run("sinfo", "-h", "-N", "-o", "%T").stdout.split() == ["idle"] * len(self.hosts) * self._partitions

    @property
    def _partitions(self) -> int:
        return self._conf.read_text().count("\nPartitionName=")


@contextmanager
def slurm(nodes: int, shared: Path, *, cpus: int = 2, names: str = "{}", more: str = "") -> Iterator[Box]:
    """Slurm on so many new hosts; gone afterwards.

    Args:
        nodes: how many.
        shared: an empty folder that all of them see.
        cpus: of each node, as Slurm counts them.
        names: of the nodes from their hosts', such as "compute-{}", which then do not resolve.
        more: further lines of slurm.conf. There is a partition `main` of all nodes, which others may preempt.

    Raises:
        ClusterError: it does not come up.
    """
    with cluster(nodes, show=[shared, ROOT]) as hosts:
        lines = [_CONF.format(first=hosts[0].name, first_address=hosts[0].address)]
        for host in hosts:
            lines.append(
                f"NodeName={names.format(host.name)} NodeHostname={host.name} NodeAddr={host.address} CPUs={cpus} "
                "RealMemory=4000 State=UNKNOWN\n"
            )
        lines.append("PartitionName=main Nodes=ALL Default=YES PriorityTier=1\n")
        conf = shared / "slurm.conf"
        conf.write_text("".join(lines) + more)
        key = shared / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        box = Box(hosts, shared, names, conf)
        for host in hosts:
            check(host.run(["bash", "-c", _START, "bash", key], {"PATH": PATH}))
        controller = hosts[0].start(["slurmctld", "-D"], box.environment, output=subprocess.DEVNULL)
        for host in hosts:
            box.start_slurmd(host)
        deadline = time.monotonic() + 120
        while not box.is_idle():
            if controller.poll() is not None or time.monotonic() > deadline:
                said = [hosts[0].path("/run/slurm/ctld.log"), *(host.path("/run/slurm/d.log") for host in hosts)]
                logs = "\n".join(path.read_text()[-2000:] for path in said if path.exists())
                raise ClusterError(f"Slurm does not come up: {box.run('sinfo')}\n{logs}")
            time.sleep(0.1)
        yield box

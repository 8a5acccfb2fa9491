"""What nodes are told about training, and the health check over them: on hosts, over real ssh, with a real mpirun.

~/icom of every host is this checkout, and the environment is the one that runs the tests, which the hosts' sshd names.

Guards provisioning.health, environment and on_node.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml

from icom.setup_env.environment import Environment
from icom.setup_env.install import installed_extras
from provisioning.health import has_amx
from provisioning.on_node import PROFILE
from tests.support.command import ROOT
from tests.support.hosts import HOME, INTERFACE, Cluster, Host, cluster
from tests.support.mpi import finish, metrics, ranks, training_options

SSHD = (shutil.which("sshd", path="/usr/sbin:/usr/bin") or "sshd", "-f", "/run/ssh/config")
SITE = Path(sysconfig.get_path("purelib"))
AMX = "amx_bf16 amx_tile amx_int8"


class Nodes:
    """Three hosts that stand for the nodes, and one for the user's computer."""

    def __init__(self, hosts: Cluster) -> None:
        self.all, self.laptop = hosts[:3], hosts[3]
        self.master, self.first, self.second = self.all

    def step(self, what: str) -> CompletedProcess[str]:
        lists = [[host.address for host in self.all], [host.key.public for host in self.all]]
        words = [
            sys.executable,
            "-m",
            "tests.support.node_steps",
            what,
            HOME / ".ssh/id_ed25519",
            *map(json.dumps, lists),
        ]
        return self.laptop.run(words, folder=ROOT)

    def typed(self, host: Host, line: str, shell: str = "bash") -> list[str]:
        """The command on the user's computer that types a line into a login shell of a node."""
        return ["ssh", host.name, f"{shell} -lc {shlex.quote(line)}"]

    def answer(self, host: Host, line: str, shell: str = "bash") -> list[str]:
        done = self.laptop.run(self.typed(host, line, shell))
        assert done.returncode == 0, done
        return done.stdout.split()


@pytest.fixture(scope="module")
def nodes(hosts_possible: None) -> Iterator[Nodes]:
    if not installed_extras(Environment("venv", Path(sys.prefix)))[0]:
        pytest.skip("the environment was made for other requirements (make test brings it up to date)")
    if not (Path(sys.executable).parent / "mpirun").exists():
        pytest.skip("Intel MPI is not installed (make test installs it)")
    # make would build what it does not find; PYTHONPATH, because the environment's own icom may be another checkout.
    settings = {"ENV_MANAGER": "venv", "VENV": sys.prefix, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    settings |= {"OMP_NUM_THREADS": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    cpus = re.sub(r"^(flags\s*:).*?( amx_\w+)*$", rf"\1 avx512f {AMX}", Path("/proc/cpuinfo").read_text(), flags=re.M)
    with cluster(4) as hosts:
        nodes = Nodes(hosts)
        for host in nodes.all:
            host.path(HOME / "icom").symlink_to(ROOT)
            with host.path("/run/ssh/config").open("a") as config:
                config.write("SetEnv " + " ".join(f'"{name}={value}"' for name, value in settings.items()) + "\n")
            host.kill_sshd()
            assert host.run(SSHD, {}).returncode == 0
            cover(host, "/proc/cpuinfo", cpus)
        nodes.master.path(HOME / "hosts").write_text("localhost\nnode1\nnode2\n")
        nodes.second.path(HOME / ".bash_profile").write_text("true")
        for gpus in ("8", "0"):
            done = nodes.step(gpus)
            assert done.returncode == 0, done
        yield nodes


def cover(host: Host, path: str | Path, text: str) -> None:
    """Show a host, and no other one, this text in place of a file."""
    copy = f"/run/{Path(path).name}"
    host.path(copy).write_text(text)
    host.path(copy).chmod(0o755)
    done = host.run(["mount", "--bind", copy, path], {"PATH": os.defpath})
    assert done.returncode == 0, done


@pytest.mark.long
def test_login_shells_find_everything_and_are_told_once(nodes: Nodes) -> None:
    programs = [str(Path(sys.executable).parent / name) for name in ("icom", "accelerate", "mpirun", "python")]
    look = "command -v icom; command -v accelerate; command -v mpirun; command -v python"
    for host in nodes.all:
        assert nodes.answer(host, look) == programs
    assert nodes.answer(nodes.master, look, "sh") == programs
    told = nodes.answer(nodes.master, "echo $MASTER_ADDR $MASTER_PORT $I_MPI_HYDRA_IFACE")
    assert told == [nodes.master.address, "29500", INTERFACE]
    assert nodes.answer(nodes.first, "echo $MASTER_ADDR $ICOM_SECRET") == []
    (secret,) = nodes.answer(nodes.master, "echo $ICOM_SECRET")
    assert re.fullmatch("[0-9a-f]{64}", secret)
    profile = nodes.master.path(HOME / PROFILE)
    assert secret in profile.read_text() and profile.stat().st_mode & 0o777 == 0o600
    for file in (nodes.master.path(HOME / ".profile"), nodes.second.path(HOME / ".bash_profile")):
        assert file.read_text().count("environment.sh") == 2  # [ ! -f … ] || . …


@pytest.mark.long
def test_plain_accelerate_launch_under_mpirun(nodes: Nodes) -> None:
    """As the user types it, in a login shell of the master; a wrong MASTER_ADDR is put right by Accelerate itself."""
    config = yaml.safe_load(nodes.first.path(HOME / ".cache/huggingface/accelerate/default_config.yaml").read_text())
    assert config["distributed_type"] == "MULTI_CPU"  # not what was given for GPUs before
    program = ["accelerate", "launch", "textual_inversion_icom.py", *training_options({"max_train_steps": 2})]
    line = f"cd ~/icom && MASTER_ADDR=127.0.0.1 mpirun -f ~/hosts -n 3 -ppn 1 {shlex.join(program)}"
    with nodes.laptop.start(nodes.typed(nodes.master, line)) as command:
        met: dict[str, list[str]] = {}
        while len(met) < 3 and command.poll() is None:
            for host in nodes.all:
                for pid in ranks(host):
                    with suppress(OSError):  # it has ended
                        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
                        met[host.name] = sorted(v for v in variables if v.startswith(("ICOM_S", "MASTER_", "PMI_RANK")))
            time.sleep(0.2)
        run = finish(command)
    assert run.code == 0, run.said
    (secret,) = nodes.answer(nodes.master, "echo $ICOM_SECRET")
    assert secret not in run.said
    assert met == {
        host.name: [
            f"ICOM_SECRET={secret}",
            f"MASTER_ADDR={nodes.master.address}",
            "MASTER_PORT=29500",
            f"PMI_RANK={rank}",
        ]
        for rank, host in enumerate(nodes.all)
    }
    assert "x 3 processes" in run.said
    assert len(metrics(nodes.master)) == 2


@pytest.mark.long
def test_healthy(nodes: Nodes) -> None:
    done = nodes.step("health")
    assert done.returncode == 0, done
    assert re.search(r"all-reduce of 3 processes \((gloo|ccl)\): [\d.]+ ms", done.stdout)
    assert re.search(r"healthy: 3 nodes, .*AMX, clocks within \d+\.\d\d s", done.stdout)


@pytest.mark.long
def test_every_problem_of_every_node_is_named_at_once(nodes: Nodes) -> None:
    """The last test: the hosts stay as they are."""
    _, first, second = nodes.all
    cover(first, "/proc/cpuinfo", first.path("/proc/cpuinfo").read_text().replace(AMX, "avx512_bf16"))
    date = str(shutil.which("date", path=os.defpath))
    shutil.copy(date, second.path("/run/real"))
    cover(second, Path(date).resolve(), '#!/bin/sh\nexec /run/real -d "60 seconds ago" "$@"\n')
    cover(second, SITE / "safetensors/__init__.py", "raise ImportError('it was never installed')")
    version = metadata.version("accelerate")
    cover(first, SITE / f"accelerate-{version}.dist-info/METADATA", "Metadata-Version: 2.1\nVersion: 0.0.1\n")
    for words in (f"set {INTERFACE} down", f"set {INTERFACE} name ens5", "set ens5 up"):
        assert second.run(["ip", "link", *words.split()], {"PATH": "/usr/sbin:/sbin"}).returncode == 0

    done = nodes.step("health")
    assert done.returncode == 1, done
    told = done.stderr.splitlines()
    assert [
        line for line in told if re.search(r"worker-1 \(i-1\): m7i.4xlarge has AMX.*no amx_bf16, amx_int8, am", line)
    ]
    assert [line for line in told if f"worker-1 (i-1): accelerate 0.0.1, but {version} on the others" in line]
    assert [
        line for line in told if re.search(r"worker-2 \(i-2\): its clock is (5[5-9]|6[0-5])\.\d s .* behind that", line)
    ]
    assert [line for line in told if "worker-2 (i-2): safetensors cannot be imported" in line]
    assert [line for line in told if "worker-2 (i-2): reaches the others through the interface ens5, but eth0" in line]
    assert "master (" not in done.stderr


@pytest.mark.parametrize(
    "name", "m7i.4xlarge c7i-flex.large r7iz.metal-16xl i7ie.xlarge u7i-12tb.224xlarge r8i.large".split()
)
def test_types_with_amx(name: str) -> None:
    assert has_amx(name)


@pytest.mark.parametrize(
    "name", "m6i.large m7a.large m7g.large c8gd.large m8azn.large p5.48xlarge u-6tb1.metal x2iezn.large".split()
)
def test_types_without_amx(name: str) -> None:
    assert not has_amx(name)

"""`icom provision` from end to end in a box: moto hands out instances, hosts in namespaces stand for them.

Each host gets what cloud-init would give it: the first host key and the authorized key from the instance's user data,
at the address that moto gave the instance. Everything runs in the box's own network, moto and icom on a host that
stands for the user's computer.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

from tests.cluster.hosts import HOME, Cluster, Command, Host, HostKey, cluster, missing
from tests.conftest import ROOT

PREPARE = """
import boto3
ec2 = boto3.client("ec2")
vpc = ec2.create_vpc(CidrBlock="198.18.0.0/24")["Vpc"]["VpcId"]
subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="198.18.0.0/24", AvailabilityZone="eu-central-1a")["Subnet"]["SubnetId"]
taken = {taken}
ec2.run_instances(ImageId="ami-00000000000000aa1", MinCount=taken, MaxCount=taken, SubnetId=subnet)
print(subnet)
"""
"""A subnet whose next free address is that of the box's next host."""
FIRST_IN_SUBNET = 4  # AWS keeps those before
SSHD = """
PidFile /run/sshd.pid
HostKey /etc/ssh/ssh_host_ed25519_key
Subsystem sftp internal-sftp
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
"""


@dataclass
class Box:
    """The user's computer, and hosts for the instances that moto has handed out."""

    hosts: Cluster
    launches: Path
    environment: dict[str, str]
    subnet: str = ""
    seen: int = 0
    """Launches that were looked at."""

    @property
    def laptop(self) -> Host:
        return self.hosts[0]

    def icom(self, *arguments: str) -> CompletedProcess[str]:
        return self.laptop.run([sys.executable, "-m", "icom", *arguments], self.environment, ROOT, timeout=120)

    def start_provision(self, name: str, *options: str) -> Command:
        arguments = ["provision", "--yes", "--cluster", name, "--private_ip", "--ssh_user", "root", *options]
        command = [sys.executable, "-m", "icom", *arguments, "--subnet", self.subnet]
        return self.laptop.start(command, self.environment, ROOT)

    def launched(self, process: Command) -> dict[str, str]:
        """The next instance that `process` launches; waits for it."""
        while len(lines := self.launches.read_text().splitlines(keepends=True)) <= self.seen or lines[-1][-1] != "\n":
            if process.poll() is not None and process.stdout:
                pytest.fail(f"icom provision ended without a launch:\n{process.stdout.read()}")
            time.sleep(0.05)
        self.seen += 1
        instance = json.loads(lines[self.seen - 1])
        assert isinstance(instance, dict)
        return instance

    def boot(self, process: Command) -> Host:
        """Make the host that stands for the next instance that `process` launches; then the instance runs."""
        instance = self.launched(process)
        data = yaml.safe_load(instance["user_data"])
        key = HostKey(data["ssh_keys"]["ed25519_private"], data["ssh_keys"]["ed25519_public"])
        host = self.hosts.add("ip-" + instance["address"].replace(".", "-"), key)
        assert host.address == instance["address"]
        host.kill_sshd()
        for node in self.hosts[1:]:  # nobody has introduced them
            for file in ("known_hosts", "config", "id_ed25519"):
                node.path(HOME / ".ssh" / file).unlink(missing_ok=True)
        host.path(HOME / ".ssh/authorized_keys").write_text("\n".join(data["ssh_authorized_keys"]) + "\n")
        be_sshd(host, key)
        self.launches.with_name(instance["id"]).touch()
        return host


def be_sshd(host: Host, key: HostKey) -> None:
    """Run sshd with its files where Linux systems have them."""
    assert host.run(["mount", "-t", "tmpfs", "tmpfs", "/etc/ssh"]).returncode == 0
    host.path("/etc/ssh/sshd_config").write_text(SSHD)
    secret = host.path("/etc/ssh/ssh_host_ed25519_key")
    secret.touch(mode=0o600)
    secret.write_text(key.private)
    assert host.run([shutil.which("sshd", path="/usr/sbin:/usr/bin") or "sshd"]).returncode == 0


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    if lacking := missing():
        pytest.skip(f"hosts cannot be made on this machine: it lacks {', '.join(lacking)}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | {
        **{"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_EC2_METADATA_DISABLED": "true"},
        **{"AWS_DEFAULT_REGION": "eu-central-1", "ICOM_CLUSTERS_DIR": str(tmp_path / "clusters")},
    }
    launches = tmp_path / "launches"
    launches.touch()
    with cluster(1, show=[tmp_path]) as hosts:
        with (tmp_path / "moto.log").open("w") as log:
            words = [sys.executable, "-m", "tests.ec2.moto_server", str(launches)]
            server = hosts[0].start(words, environment, ROOT, errors=log)
        assert server.stdout
        with server.stdout:
            environment["AWS_ENDPOINT_URL"] = server.stdout.readline().strip()
        box = Box(hosts, launches, environment)
        taken = int(hosts[0].address.rpartition(".")[2]) - FIRST_IN_SUBNET + 1
        code = PREPARE.replace("{taken}", str(taken))
        box.subnet = hosts[0].run([sys.executable, "-c", code], environment, ROOT).stdout.strip()
        yield box


def tagged(box: Box, name: str) -> list[Any]:
    code = (
        "import boto3; from tests.ec2.conftest import *\n"
        "ec2 = boto3.client('ec2'); mine = [{'Name': 'key', 'Values': ['icom:cluster']}]\n"
        "ended = {i['InstanceId'] for r in ec2.describe_instances()['Reservations'] for i in r['Instances'] "
        "if i['State']['Name'] == 'terminated'}\n"
        f"print([t['ResourceId'] for t in ec2.describe_tags(Filters=mine)['Tags'] if t['Value'] == {name!r} "
        "and t['ResourceId'] not in ended])"
    )
    done = box.laptop.run([sys.executable, "-c", code], box.environment, ROOT)
    found = yaml.safe_load(done.stdout)
    assert isinstance(found, list)
    return found


def test_three_nodes_that_mpirun_can_use(box: Box, tmp_path: Path) -> None:
    with box.start_provision("box", "--count", "3") as process:
        master, first, second = (box.boot(process) for _ in range(3))
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert master.path(HOME / "hosts").read_text() == "localhost\nnode1\nnode2\n"

    # The hosts have keys of their own by now, and the laptop knows these alone.
    (folder,) = (Path(box.environment["ICOM_CLUSTERS_DIR"])).glob("*/box")
    known = (folder / "known_hosts").read_text()
    for host in (master, first, second):
        now = host.path("/etc/ssh/ssh_host_ed25519_key.pub").read_text().split()[1]
        assert now != host.key.public.split()[1]
        assert sum(line.startswith("i-") and now in line for line in known.splitlines()) == 1
        assert not [line for line in known.splitlines() if line.startswith("i-") and host.key.public in line]

    # The private half of the master's key has not left it.
    assert master.path(HOME / ".ssh/id_ed25519").exists()
    for host in (first, second):
        assert not host.path(HOME / ".ssh/id_ed25519").exists()

    mpirun = master.run(["mpirun.mpich", "-iface", "eth0", "-f", "hosts", "-n", "3", "-ppn", "1", "hostname"])
    assert sorted(mpirun.stdout.split()) == sorted(host.name for host in (master, first, second)), mpirun
    by_config = box.laptop.run(["ssh", "-F", folder / "ssh_config", "icom-box-worker-2", "hostname"])
    assert by_config.stdout.strip() == second.name, by_config

    ran = box.icom("run", "--cluster", "box", "--node", "worker-1", "--", "echo it; echo that >&2; exit 7")
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "it\n", "that\n")
    (pictures := tmp_path / "pictures").mkdir()
    (pictures / "a b.txt").write_text("x")
    assert box.icom("push", "--cluster", "box", str(pictures)).returncode == 0
    assert master.path(HOME / "pictures/a b.txt").read_text() == "x"
    assert box.icom("pull", "--cluster", "box", "pictures", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back/a b.txt").read_text() == "x"

    with box.start_provision("box", "--count", "3") as again:
        out, _ = again.communicate(timeout=120)
    assert again.returncode == 0, out
    assert "Nothing to do" in out
    assert "made itself" not in out

    # Another host at the address of a worker is told nothing.
    second.kill_sshd()
    be_sshd(second, HostKey.new())
    with box.start_provision("box", "--count", "3") as impostor:
        out, _ = impostor.communicate(timeout=120)
    assert impostor.returncode == 1
    assert f"worker-2 at {second.address} is not i-" in out
    assert "Nothing was sent to it" in out

    gone = box.icom("teardown", "--yes", "--cluster", "box")
    assert gone.returncode == 0, gone
    assert tagged(box, "box") == []
    assert not folder.exists()


def test_node_that_cannot_be_reached_takes_everything_with_it(box: Box) -> None:
    """Nobody boots the second instance. The message names it; nothing is left of either."""
    with box.start_provision("mute", "--count", "2", "--wait_minutes", "0.4") as process:
        box.boot(process)
        box.launches.with_name(box.launched(process)["id"]).touch()
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "worker-1 (i-" in out
    assert "cannot be reached by ssh" in out
    assert tagged(box, "mute") == []

    # Ctrl-C while it waits for such a node.
    with box.start_provision("mute", "--count", "1", "--wait_minutes", "30") as process:
        box.launches.with_name(box.launched(process)["id"]).touch()
        assert process.stdout
        for line in process.stdout:
            if "waiting for 1 nodes" in line:
                break
        process.send_signal(signal.SIGINT)
        out = process.stdout.read()
        assert process.wait(timeout=120) == 130
    assert "Nothing of it is left" in out
    assert tagged(box, "mute") == []


def test_fault_at_every_ssh_step(box: Box) -> None:
    """A step that fails, a connection that breaks, Ctrl-C: the next call completes the set-up."""
    with box.start_provision("steps", "--count", "2") as process:
        for _ in range(2):
            box.boot(process)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    words = [sys.executable, "-m", "tests.ec2.faulty_steps", "steps"]
    done = box.laptop.run(words, box.environment, ROOT, timeout=300)
    assert done.returncode == 0, done
    print(done.stdout)

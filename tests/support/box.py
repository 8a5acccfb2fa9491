"""EC2 in a box: moto hands out instances, hosts in namespaces stand for them, all on a network of their own.

moto and icom run on a host that stands for the user's computer. The box does by itself what EC2 does: a host with a
disk of its own boots for each instance, at the address that moto gave it, as cloud-init would boot it; what is stopped
ends, keeps its disk and can be started; an image is a copy of such a disk.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import yaml

from provisioning import project
from provisioning.install import DONE, FOLDER
from tests.support import disk
from tests.support.command import ROOT
from tests.support.hosts import Cluster, Command, Host, HostKey, cluster

PREPARE = """
import boto3
ec2 = boto3.client("ec2")
vpc = ec2.create_vpc(CidrBlock="198.18.0.0/24")["Vpc"]["VpcId"]
subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="198.18.0.0/24", AvailabilityZone="eu-central-1a")["Subnet"]["SubnetId"]
taken = {taken}
like = {"ImageId": "ami-00000000000000aa1", "InstanceType": "m6i.4xlarge", "SubnetId": subnet}
ec2.run_instances(MinCount=taken, MaxCount=taken, **like)
print(subnet)
"""
"""A subnet whose next free address is the one after the laptop's."""
UBUNTU = "ami-00000000000000aa1"
FIRST_IN_SUBNET = 4  # AWS keeps those before
TAGGED = """
import boto3, json, sys
ec2 = boto3.client("ec2")
ended = {i["InstanceId"] for r in ec2.describe_instances()["Reservations"] for i in r["Instances"]
         if i["State"]["Name"] == "terminated"}
tags = ec2.describe_tags(Filters=[{"Name": "key", "Values": ["icom:cluster"]}])["Tags"]
print(json.dumps([t["ResourceId"] for t in tags if t["Value"] == sys.argv[1] and t["ResourceId"] not in ended]))
"""

# What a node finds in its environment: where the project's environment is (it has no network to install one), that
# nothing can be downloaded, and that it shares the machine with others.
NODE_ENVIRONMENT = {
    **{"VENV": sys.prefix, "PYTHON": sys.executable, "ENV_MANAGER": "venv"},
    **{"HF_ENDPOINT": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"},
}
SSHD = f"""
PidFile /run/sshd.pid
HostKey /etc/ssh/ssh_host_ed25519_key
Subsystem sftp internal-sftp
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
SetEnv {" ".join(f'"{name}={value}"' for name, value in NODE_ENVIRONMENT.items())}
"""
POLL_SECONDS = 0.05
NODES = ("--private_ip", "--ssh_user", "root", "--instance_type", "m6i.4xlarge")
"""Options of `icom provision` for the nodes of a box. Of this type nobody expects AMX, which the machine may lack."""


@dataclass
class Box:
    """The user's computer, and hosts for the instances that moto has handed out."""

    hosts: Cluster
    folder: Path
    """On the machine and the laptop; the nodes do not see it."""
    environment: dict[str, str]
    """For commands on the laptop."""
    subnet: str = ""
    running: dict[str, Host] = field(default_factory=dict)
    """Hosts that have booted and not ended, by instance id, in the order of their first launch."""
    launches: dict[str, dict[str, str]] = field(default_factory=dict)
    """What moto told of each instance."""
    _dead: set[int] = field(default_factory=set)

    @property
    def laptop(self) -> Host:
        return self.hosts[0]

    @property
    def nodes(self) -> list[Host]:
        """Those that run, in the order in which their instances were launched."""
        return [self.running[id] for id in self.launches if id in self.running]

    @property
    def told(self) -> Path:
        """Where moto tells what happens."""
        return self.folder / "ec2" / "told"

    def icom(self, *arguments: str) -> CompletedProcess[str]:
        """Run icom on the laptop."""
        return self.python("-m", "icom", *arguments)

    def python(self, *arguments: str) -> CompletedProcess[str]:
        """Run Python on the laptop."""
        return self.laptop.run([sys.executable, *arguments], self.environment, ROOT)

    def start_provision(self, name: str, *options: str) -> Command:
        """Start `icom provision` on the laptop."""
        arguments = ["provision", "--yes", "--cluster", name, *NODES, *options]
        command = [sys.executable, "-m", "icom", *arguments, "--subnet", self.subnet]
        return self.laptop.start(command, self.environment, ROOT)

    def install_in_base_image(self) -> None:
        """Let the image that nodes start from have icom in it already: tested there, it takes half a minute."""
        disk = self._disk(UBUNTU)
        for folder in (disk / "root", disk / "home"):
            folder.mkdir(parents=True, mode=0o700)
            os.setxattr(folder, "trusted.overlay.opaque", b"y")  # of the machine's own folder nothing is seen
        for path in project.project_files():
            (copy := disk / "root" / FOLDER / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, copy)
        (disk / "root" / DONE).write_text(project.digest())

    def put_command_in_base_image(self, name: str, script: str) -> None:
        """Give the image that nodes start from a command."""
        (file := self._disk(UBUNTU) / "usr/local/bin" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def do_not_boot(self, launch: int) -> None:
        """EC2 will say that the instance runs, but there will be no host. `launch` counts all of the box, from 0."""
        self._dead.add(launch)

    def tagged(self, name: str) -> list[Any]:
        """Ids of all that carries the cluster's tag and is alive, by moto's books."""
        found = json.loads(self.python("-c", TAGGED, name).stdout)
        assert isinstance(found, list)
        return found

    def happen(self, what: dict[str, str]) -> None:
        """Do what EC2 would, after moto was told to."""
        event, id = what["event"], what["id"]
        if event == "launch" and id not in self.launches:  # a repeated request is told again
            self.launches[id] = what
            image = self._disk(what["image"])
            if len(self.launches) - 1 in self._dead:
                self.told.with_name(id).touch()
            else:
                self._boot(id, image if image.exists() else None)
        elif event == "start" and (kept := self._disk(id)).exists():
            self._boot(id, kept)
            shutil.rmtree(kept)
        elif event == "stop" and id in self.running:
            self.running[id].save(self._disk(id))
            self.hosts.remove(self.running.pop(id))
        elif event == "terminate":
            if id in self.running:
                self.hosts.remove(self.running.pop(id))
            shutil.rmtree(self._disk(id), ignore_errors=True)
        elif event == "image":
            if what["instance"] in self.running:
                self.running[what["instance"]].save(self._disk(id))
            else:
                disk.copy(self._disk(what["instance"]), self._disk(id))
            self.told.with_name(id).touch()

    def _disk(self, id: str) -> Path:
        """Of a stopped instance, or an image."""
        return self.folder / "ec2" / f"disk-{id}"

    def _boot(self, id: str, image: Path | None) -> None:
        launch = self.launches[id]
        name = "ip-" + launch["address"].replace(".", "-")
        host = self.hosts.add(name, address=launch["address"], own_root=True, image=image)
        cloud_init(host, id, launch["user_data"])
        run_sshd(host)
        self.running[id] = host
        self.told.with_name(id).touch()


def cloud_init(host: Host, instance: str, user_data: str) -> None:
    """What cloud-init does of icom's user data: all of it when the disk has not been this instance's before."""
    state = host.path("/var/lib/cloud")
    (seen := state / "data/instance-id").parent.mkdir(parents=True, exist_ok=True)
    if seen.exists() and seen.read_text().strip() == instance:
        return
    (own := state / "instances" / instance).mkdir(parents=True)
    (own / "user-data.txt").write_text(user_data)
    (own / "user-data.txt").chmod(0o600)
    seen.write_text(f"{instance}\n")
    data = yaml.safe_load(user_data)
    assert data["ssh_deletekeys"] is True
    for old in host.path("/etc/ssh").glob("ssh_host_*"):
        old.unlink()
    put_host_key(host, HostKey(data["ssh_keys"]["ed25519_private"], data["ssh_keys"]["ed25519_public"]))
    (ssh := host.path(host.home / ".ssh")).mkdir(mode=0o700, exist_ok=True)
    with (ssh / "authorized_keys").open("a") as keys:  # it adds to those that are there
        keys.writelines(f"{key}\n" for key in data["ssh_authorized_keys"])
    (ssh / "authorized_keys").chmod(0o600)
    # Commands ask whether cloud-init is done. A machine with a cloud-init of its own would answer for itself.
    (command := host.path("/usr/local/bin/cloud-init")).write_text("#!/bin/sh\necho status: done\n")
    command.chmod(0o755)


def put_host_key(host: Host, key: HostKey) -> None:
    """Give a host's sshd its key, at the usual place."""
    secret = host.path("/etc/ssh/ssh_host_ed25519_key")
    secret.touch(mode=0o600)
    secret.write_text(key.private)
    secret.with_suffix(".pub").write_text(f"{key.public}\n")


def run_sshd(host: Host) -> None:
    """Run sshd with its files where Linux systems have them."""
    host.path("/etc/ssh/sshd_config").write_text(SSHD)
    # -r: a connection is shown the key that sshd had when it was started, as from OpenSSH 9.8 on, not the file's.
    done = host.run([shutil.which("sshd", path="/usr/sbin:/usr/bin") or "sshd", "-r"])
    assert done.returncode == 0, done


@contextmanager
def make_box(folder: Path) -> Iterator[Box]:
    """A box, whose files are in `folder`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | {
        **{"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_EC2_METADATA_DISABLED": "true"},
        **{"AWS_DEFAULT_REGION": "eu-central-1", "ICOM_CLUSTERS_DIR": str(folder / "clusters")},
    }
    with cluster(1, show=[folder]) as hosts:
        box = Box(hosts, folder, environment)
        box.told.parent.mkdir()
        box.told.touch()
        with (folder / "moto.log").open("w") as log:
            words = [sys.executable, "-m", "tests.support.moto_server", str(box.told)]
            server = box.laptop.start(words, environment, ROOT, errors=log)
        assert server.stdout
        with server.stdout:
            environment["AWS_ENDPOINT_URL"] = server.stdout.readline().strip()
        taken = int(box.laptop.address.rpartition(".")[2]) - FIRST_IN_SUBNET + 1
        box.subnet = box.python("-c", PREPARE.replace("{taken}", str(taken))).stdout.strip()
        with _power(box):
            yield box


@contextmanager
def _power(box: Box) -> Iterator[None]:
    """Let things happen as moto tells them, one after the other."""
    over = threading.Event()
    failed: list[Exception] = []

    def work() -> None:
        with box.told.open() as told:
            line = ""
            while not over.is_set():
                line += told.readline()
                if not line.endswith("\n"):
                    over.wait(POLL_SECONDS)
                    continue
                try:
                    box.happen(json.loads(line))
                except Exception as error:
                    failed.append(error)
                    return
                line = ""

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        if failed:
            raise failed[0]

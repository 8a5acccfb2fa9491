"""`icom train --on` on real hosts: a laptop, a master and two workers, with real ssh and mpirun.

EC2 is moto's server on the laptop; its instances have the hosts' addresses. The nodes are as `icom provision` leaves
them: the project in ~/icom, its environment in the login shell's PATH, ~/hosts, ssh from the master to the workers.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from icom.images import BUNDLED_CONCEPTS
from provisioning.cluster import find_nodes
from provisioning.hostkeys import Folder
from tests.cluster.hosts import HOME, Cluster, Host, cluster, missing
from tests.cluster.namespaces import Command
from tests.conftest import ROOT

REGION = "eu-central-1"
INSTANCES = """
import boto3
ec2 = boto3.client("ec2")
vpc = ec2.create_vpc(CidrBlock="198.18.0.0/24")["Vpc"]["VpcId"]
subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="198.18.0.0/24", AvailabilityZone="eu-central-1a")["Subnet"]["SubnetId"]
taken = {taken}
start = dict(ImageId="ami-00000000000000aa1", SubnetId=subnet)
ec2.run_instances(MinCount=taken, MaxCount=taken, **start)
for role in ("master", "worker-1", "worker-2"):
    tags = [dict(Key="icom:cluster", Value="box"), dict(Key="icom:role", Value=role)]
    spec = [dict(ResourceType="instance", Tags=tags)]
    made = ec2.run_instances(MinCount=1, MaxCount=1, TagSpecifications=spec, **start)["Instances"][0]
    print(made["InstanceId"], made["PrivateIpAddress"])
ec2.describe_instances()
"""
FIRST_IN_SUBNET = 4  # AWS keeps those before
PROFILE = f"""
export PATH="{Path(sys.executable).parent}:$PATH" PYTHONPATH="{ROOT}" HF_ENDPOINT=http://127.0.0.1:9 OMP_NUM_THREADS=1
"""
OPTIONS = {
    "placeholder_token": "<concept>",
    "initializer_token": "object",
    "resolution": 64,
    "train_batch_size": 2,
    "max_train_steps": 3,
    "learning_rate": 2e-3,
    "seed": 7,
    "report_to": "none",
    "num_comparison_images": 0,
}
HOUR_LONG = 100_000  # steps


@dataclass
class Box:
    """The user's computer, and the cluster `box`."""

    hosts: Cluster
    environment: dict[str, str]
    folder: Folder

    @property
    def laptop(self) -> Host:
        return self.hosts[0]

    @property
    def nodes(self) -> list[Host]:
        return self.hosts[1:]

    def start(self, **options: object) -> Command:
        """`icom train --on box`, from the laptop."""
        words = [f"--{name}={value}" for name, value in (OPTIONS | options).items()]
        command = [sys.executable, "-m", "icom", "train", "--on", "box", *words]
        return self.laptop.start(command, self.environment, ROOT)

    def train(self, **options: object) -> tuple[int, str]:
        """To its end: exit code, and what it said."""
        with self.start(**options) as command:
            said, _ = command.communicate(timeout=120)
        return command.returncode, said


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's folder, which only the laptop is to look into."""
    return tmp_path_factory.mktemp("laptop")


@pytest.fixture(scope="module")
def box(shared: Path) -> Iterator[Box]:
    if lacking := missing():
        pytest.skip(f"hosts cannot be made on this machine: it lacks {', '.join(lacking)}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | {
        **{"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_EC2_METADATA_DISABLED": "true"},
        **{"AWS_DEFAULT_REGION": REGION, "ICOM_CLUSTERS_DIR": str(shared / "clusters")},
    }
    with cluster(0, show=[shared]) as hosts:
        for name in ("laptop", "master", "node1", "node2"):
            hosts.add(name)
        with (shared / "moto.log").open("w") as log:
            server = hosts[0].start([sys.executable, "-m", "tests.ec2.moto_server"], environment, ROOT, errors=log)
        assert server.stdout
        with server.stdout:
            environment["AWS_ENDPOINT_URL"] = server.stdout.readline().strip()
        box = Box(hosts, environment, Folder(shared / "clusters" / REGION / "box"))
        be_cluster(box)
        yield box


def be_cluster(box: Box) -> None:
    """What `icom provision` does."""
    taken = int(box.laptop.address.rpartition(".")[2]) - FIRST_IN_SUBNET + 1
    code = INSTANCES.replace("{taken}", str(taken))
    made = box.laptop.run([sys.executable, "-c", code], box.environment, ROOT)
    ids = dict(reversed(line.split()) for line in made.stdout.splitlines())
    assert list(ids) == [host.address for host in box.nodes], made
    public = box.folder.client_key()
    blocks = []
    for role, host in zip(("master icom-box", "worker-1", "worker-2"), box.nodes, strict=True):
        box.folder.remember([ids[host.address]], host.key.public)
        host.path(HOME / ".ssh/authorized_keys").open("a").write(f"{public}\n")
        host.path(HOME / ".profile").write_text(PROFILE)
        host.path(HOME / "icom").symlink_to(ROOT)
        blocks.append((role, host, ids[host.address]))
    box.nodes[0].path(HOME / "hosts").write_text("localhost\nnode1\nnode2\n")
    for name in ("known_hosts", "config", "id_ed25519"):
        box.laptop.path(HOME / ".ssh" / name).unlink()

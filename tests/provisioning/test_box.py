"""The box itself: what an instance that was set up by hand holds reaches those that start from its image.

Guards tests/support/box.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from provisioning.hostkeys import make_key
from provisioning.userdata import user_data
from tests.support.box import Box
from tests.support.command import ROOT
from tests.support.hosts import HostKey

# What `icom provision` does with a builder, with boto3 and OpenSSH alone.
BY_HAND = """
import boto3, json, socket, subprocess, sys
from botocore.exceptions import ClientError
subnet, key, first, second = sys.argv[1:]
ec2, seen = boto3.client("ec2"), {}

def wait(state, **ids):
    ec2.get_waiter(state).wait(**ids, WaiterConfig={"Delay": 0.2})

def launch(image, data):
    launched = ec2.run_instances(ImageId=image, MinCount=1, MaxCount=1, SubnetId=subnet, UserData=open(data).read())
    id, address = (launched["Instances"][0][name] for name in ("InstanceId", "PrivateIpAddress"))
    wait("instance_running", InstanceIds=[id])
    open("known", "w").write(address + " " + open(data + ".pub").read())
    return id, address

def ssh(command, **options):
    words = ["ssh", "-i", key, "-o", "UserKnownHostsFile=known", "-o", "BatchMode=yes", "root@" + address, command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    return done.stdout.strip()

KEYS = "cat .ssh/authorized_keys /etc/ssh/ssh_host_ed25519_key.pub"
builder, address = launch("ami-00000000000000aa1", first)
seen["set up"] = ssh("mkdir icom && cd icom && tar x && make setup-master", stdin=open("project.tar"))
seen["conda"] = ssh("cd icom && make install-miniconda")
seen["keys"] = ssh(KEYS)
seen["ids"] = [builder, ssh("cat /var/lib/cloud/data/instance-id")]
ec2.stop_instances(InstanceIds=[builder])
wait("instance_stopped", InstanceIds=[builder])
try:
    socket.create_connection((address, 22), timeout=1)
    seen["stopped"] = False
except OSError:
    seen["stopped"] = True
ec2.start_instances(InstanceIds=[builder])
wait("instance_running", InstanceIds=[builder])
seen["started"] = ssh(KEYS)
ssh("rm .ssh/authorized_keys")
ec2.stop_instances(InstanceIds=[builder])
wait("instance_stopped", InstanceIds=[builder])
image = ec2.create_image(InstanceId=builder, Name="baked")["ImageId"]
seen["image"] = ec2.describe_images(ImageIds=[image])["Images"][0]["State"]
try:
    ec2.create_image(InstanceId=builder, Name="baked")
except ClientError as error:
    seen["twice"] = error.response["Error"]["Code"]
wait("image_available", ImageIds=[image])
seen["disk"] = ec2.describe_images(ImageIds=[image])["Images"][0]["BlockDeviceMappings"][0]["Ebs"]["Encrypted"]
ec2.terminate_instances(InstanceIds=[builder])
wait("instance_terminated", InstanceIds=[builder])
node, address = launch(image, second)
seen["files"] = ssh("ls icom/Makefile; cat /var/lib/cloud/data/instance-id")
seen["new keys"] = ssh(KEYS)
print(json.dumps({**seen, "names": [image, builder, node]}))
"""
PROJECT = ("Makefile", "icom/__init__.py", "icom/setup_env", "pyproject.toml", "constraints.txt", "environment.yml")


@pytest.mark.long
def test_what_is_set_up_reaches_the_nodes_that_start_from_its_image(box: Box, tmp_path: Path) -> None:
    client = HostKey.new()
    (tmp_path / "client").touch(mode=0o600)
    (tmp_path / "client").write_text(client.private)
    subprocess.run(["tar", "cf", tmp_path / "project.tar", *PROJECT], cwd=ROOT, check=True)
    keys = {name: make_key() for name in ("first", "second")}
    authorized = {"first": client.public, "second": f"{client.public} again"}
    for name, key in keys.items():
        (tmp_path / name).write_text(user_data(key, authorized[name], None))
        (tmp_path / f"{name}.pub").write_text(key.public)
    words = [sys.executable, "-c", BY_HAND, box.subnet, *(tmp_path / name for name in ("client", "first", "second"))]
    done = box.laptop.run(words, box.environment, tmp_path)
    assert done.returncode == 0, done
    seen = json.loads(done.stdout)
    image, builder, node = seen["names"]

    assert seen["set up"].splitlines()[1:2] == ["icom setup: up to date, nothing to do"], seen["set up"]
    assert "cannot download" in seen["conda"]  # there is no network but the box's
    assert seen["keys"].splitlines() == [authorized["first"], keys["first"].public]
    assert seen["ids"] == [builder, builder]
    assert seen["stopped"]
    assert seen["started"] == seen["keys"]
    assert (seen["image"], seen["twice"], seen["disk"]) == ("pending", "InvalidAMIName.Duplicate", True)
    assert seen["files"].splitlines() == ["icom/Makefile", node]
    assert seen["new keys"].splitlines() == [authorized["second"], keys["second"].public]
    assert list(box.running) == [node]

    # The image is one that icom provision takes.
    dry = box.icom("provision", "--private_ip", "--subnet", box.subnet, "--ami", image, "--dry_run")
    assert dry.returncode == 0, dry

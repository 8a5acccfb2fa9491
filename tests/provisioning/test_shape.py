"""A second call meets a cluster of another account, with another key, or of another shape.

Guards provisioning.survey.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ec2 import REGION, Nodes
from tests.support.wire import Icom, Wire

OURS, OTHER = "123456789012", "210987654321"


@pytest.fixture
def another_account(wire: Wire, moto: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, the credentials are another account's."""

    def change() -> None:
        import boto3

        role = f"arn:aws:iam::{OTHER}:role/guest"
        sts = boto3.client("sts", region_name=REGION)
        given = sts.assume_role(RoleArn=role, RoleSessionName="guest")["Credentials"]
        for name, value in (("ACCESS_KEY_ID", "AccessKeyId"), ("SECRET_ACCESS_KEY", "SecretAccessKey")):
            monkeypatch.setenv(f"AWS_{name}", given[value])
        monkeypatch.setenv("AWS_SESSION_TOKEN", given["SessionToken"])

    return change


def test_wrong_account_leaves_the_keys_of_the_right_one(
    provision: Icom, icom: Icom, another_account: Callable[[], None], tmp_path: Path
) -> None:
    made = provision("--cluster", "abroad")
    assert f"Cluster abroad in {REGION}, account {OURS}" in made.out
    folder = tmp_path / "clusters" / OURS / REGION / "abroad"
    key = (folder / "id_ed25519").read_bytes()
    another_account()
    gone = icom("teardown", "--yes", "--cluster", "abroad")
    assert gone.code == 2, "nothing was torn down"
    assert f"There is no cluster abroad in {REGION}, account {OTHER}" in gone.err
    assert (folder / "id_ed25519").read_bytes() == key
    assert provision("--cluster", "abroad").code == 0, "a namesake, with files of its own"
    assert (folder / "id_ed25519").read_bytes() == key


def test_another_key_in_the_folder_is_not_the_clusters(provision: Icom, ec2: Any, nodes: Nodes, tmp_path: Path) -> None:
    """With nodes that let in the lost one there is no way; without, EC2's is replaced."""
    assert provision("--cluster", "rekeyed").code == 0
    folder = tmp_path / "clusters" / OURS / REGION / "rekeyed"
    (folder / "id_ed25519").unlink()
    (folder / "id_ed25519.pub").unlink()
    assert provision("--cluster", "elsewhere").code == 0
    for name in ("id_ed25519", "id_ed25519.pub"):
        (folder / name).write_bytes((folder.parent / "elsewhere" / name).read_bytes())
    (folder / "id_ed25519").chmod(0o600)
    refused = provision("--cluster", "rekeyed", "--count", "2")
    assert refused.code == 2
    assert "is not on this computer" in refused.err
    ec2.terminate_instances(InstanceIds=[node["InstanceId"] for node in nodes("rekeyed")])
    ec2.describe_instances()
    assert provision("--cluster", "rekeyed").code == 0
    (pair,) = ec2.describe_key_pairs(KeyNames=["icom-rekeyed"], IncludePublicKey=True)["KeyPairs"]
    assert pair["PublicKey"].split()[1] == (folder / "id_ed25519.pub").read_text().split()[1]


@pytest.fixture
def profile(wire: Wire, moto: str) -> str:
    import botocore.session

    iam = botocore.session.Session().create_client("iam", region_name=REGION, endpoint_url=moto)
    return str(iam.create_instance_profile(InstanceProfileName="reader")["InstanceProfile"]["InstanceProfileName"])


@pytest.mark.long
def test_nodes_of_a_cluster_are_alike(provision: Icom, profile: str, ec2: Any, tmp_path: Path) -> None:
    """Each option that DescribeInstances tells of: a second call without it."""
    key = tmp_path / "special.pem"
    key.write_text(ec2.create_key_pair(KeyName="special")["KeyMaterial"])
    key.chmod(0o600)
    shape = {
        "--instance_type": ["m7i.8xlarge"],
        "--spot": [],
        "--placement_group": [],
        "--instance_profile": [profile],
        "--key_name": ["special", "--key_file", os.path.relpath(key)],
        "--private_ip": ["--ssh_from", "10.0.0.0/8"],
    }
    whole = [word for name, values in shape.items() for word in (name, *values)]
    assert provision("--cluster", "special", *whole).code == 0
    same = provision("--cluster", "special", *whole)
    assert "Nothing to do" in same.out, same
    (config,) = (tmp_path / "clusters").rglob("ssh_config")
    assert f"IdentityFile {key}\n" in config.read_text().replace('"', ""), "it is read from other folders too"
    for name in shape:
        others = [word for other, values in shape.items() if other != name for word in (other, *values)]
        refused = provision("--cluster", "special", "--count", "2", *others)
        assert refused.code == 2, (name, refused)
        assert f"{name} " in refused.err.replace(")", " ")
        assert "icom teardown" in refused.err


def test_fabric_is_part_of_the_shape(provision: Icom) -> None:
    efa = ("--cluster", "fabric", "--instance_type", "p4d.24xlarge")
    assert provision(*efa, "--efa").code == 0
    assert "Nothing to do" in provision(*efa, "--efa").out
    assert "--efa yes; asked for was no" in provision(*efa, "--count", "2").err


def test_every_disk_of_an_image_is_encrypted_and_goes(provision: Icom, wire: Wire, ec2: Any) -> None:
    """The root with --volume_gb, another as large as it is; an instance store is left alone."""
    (image,) = ec2.describe_images(ImageIds=["ami-00000000000000aa1"])["Images"]
    (root,) = image["BlockDeviceMappings"]
    kept = {"SnapshotId": "snap-1", "VolumeSize": 400, "DeleteOnTermination": False, "Encrypted": False}
    image["BlockDeviceMappings"] = [
        root,
        {"DeviceName": "/dev/sdf", "Ebs": kept | {"VolumeType": "io1"}},
        {"DeviceName": "/dev/sdb", "VirtualName": "ephemeral0"},
    ]
    wire.answers["ec2:DescribeImages"] = {"Images": [image]}
    result = provision("--cluster", "disks", "--dry_run")
    assert result.code == 0, result.err
    (request,) = [params for name, params in wire.requests if name == "RunInstances"]
    disks = {mapping["DeviceName"]: mapping["Ebs"] for mapping in request["BlockDeviceMappings"]}
    ours = {"VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}
    assert disks == {root["DeviceName"]: ours | {"VolumeSize": 250}, "/dev/sdf": ours | {"VolumeSize": 400}}
    assert f"{650 * 0.0952:.2f}" in result.out

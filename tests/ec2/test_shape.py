"""A second call meets a cluster of another account, with another key, or of another shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ec2.conftest import REGION
from tests.ec2.test_life import Nodes
from tests.ec2.wire import Icom, Wire

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
    assert gone.code == 0, gone.err
    assert f"There is no cluster abroad in {REGION}, account {OTHER}" in gone.out
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

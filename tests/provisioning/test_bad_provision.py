"""What cannot work is refused in the user's words before anything is made.

Guards provisioning.config, survey and plan.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Result
from tests.support.ec2 import REGION
from tests.support.wire import Icom, Wire

Left = Callable[[str], list[str]]
RESERVATION = "ec2:DescribeCapacityReservations"


@pytest.fixture
def refused(provision: Icom, wire: Wire) -> Callable[..., Result]:
    """Run it; it has to fail without a call that makes something (rehearsals are none)."""

    def run(*options: str, code: int = 2) -> Result:
        wire.requests.clear()
        result = provision(*options)
        assert result.code == code, result
        assert result.err.startswith("icom: ")
        made = [
            name
            for name, params in wire.requests
            if not name.startswith(("Describe", "Get")) and "DryRun" not in params
        ]
        assert made == []
        return result

    return run


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--count", "0"), ["--count", "at least 1"]),
        (("--cluster", "Über_cluster"), ["--cluster", "small letters"]),
        (("--cluster", "x" * 33), ["32 characters"]),
        (("--region", "eu-centrall-1"), ["no region eu-centrall-1", "eu-central-1?"]),
        (("--instance_type", "m7i.gigantic"), ["no instance type m7i.gigantic", "describe-instance-type-offerings"]),
        (("--ami", "ami-0123456789abcdef0"), ["no image ami-0123456789abcdef0"]),
        (("--ami", "ami-00000000000000aa2"), ["arm64", "m7i.4xlarge"]),
        (("--volume_gb", "9"), ["needs 15 GB", "--volume_gb"]),
        (("--subnet", "subnet-0123456789abcdef0"), ["No such subnet"]),
        (("--count", "400"), ["L-1216C47A", "6400 more vCPUs", "5000 allowed"]),
        (("--ssh_from", "0.0.0.0/0"), ["whole internet", "--ssh_from_anywhere"]),
        (("--ssh_from", "0.0.0.0/1"), ["2,147,483,648 addresses", "--ssh_from_anywhere"]),
        (("--ssh_from_anywhere",), ["--ssh_from"]),
        (("--ssh_from", "203.0.113.7/24"), ["--ssh_from 203.0.113.7/24", "host bits"]),
        (("--key_name", "nobody"), ["nobody.pem", "--key_file"]),
        (("--key_file", "x.pem"), ["--key_name"]),
        (("--spot", "--capacity_reservation", "cr-1"), ["--spot", "--capacity_reservation", "drop one"]),
        (("--efa",), ["m7i.4xlarge", "--efa"]),
        (("--max_hours", "-1"), ["--max_hours"]),
        (("--profile", "nobody"), ["nobody"]),
        (("--config", "/nowhere.yaml"), ["/nowhere.yaml"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_refused_in_words(options: tuple[str, ...], words: list[str], refused: Callable[..., Result]) -> None:
    result = refused(*options)
    for word in words:
        assert word in result.err


def test_no_credentials(refused: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "aws configure" in refused().err


def test_no_region(refused: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION")
    assert "--region" in refused().err


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("RequestExpired", ["have expired", "aws sso login"]),
        ("AuthFailure", ["does not accept these credentials"]),
        ("UnauthorizedOperation", ["may not do that", "iam_policy.json"]),
    ],
)
def test_credentials_that_do_not_do(code: str, words: list[str], refused: Callable[..., Result], wire: Wire) -> None:
    wire.at, wire.fault = 0, f"code:{code}"
    result = refused(code=1)
    for word in words:
        assert word in result.err


def test_permission_is_rehearsed(refused: Callable[..., Result], wire: Wire) -> None:
    wire.only, wire.fault = "ec2:RunInstances", "code:UnauthorizedOperation"
    assert "RunInstances" in refused(code=1).err


def test_nobody_to_ask(icom: Icom, wire: Wire, moto: str, left: Left) -> None:
    result = icom("provision", "--cluster", "unasked", "--address_url", f"{moto}/address")
    assert result.code == 2
    assert "--yes" in result.err
    assert left("unasked") == []


def test_address_service_that_does_not_answer(refused: Callable[..., Result]) -> None:
    """The last --address_url counts."""
    assert "--ssh_from A.B.C.D/32" in refused("--address_url", "http://127.0.0.1:9/", code=1).err


@pytest.mark.parametrize("answer", ["0.0.0.0/0", "9.9.9.0/24", "10.1.2.3", "nonsense"])
def test_address_service_that_answers_something_else(answer: str, refused: Callable[..., Result], moto: str) -> None:
    """It opens ssh to one public address or to none."""
    assert "--ssh_from A.B.C.D/32" in refused("--address_url", f"{moto}/address?{answer}", code=1).err


def test_subnets(refused: Callable[..., Result], provision: Icom, ec2: Any) -> None:
    """Of another VPC than the cluster's, of two VPCs, without room, in a zone without the type."""
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    zone = f"{REGION}a"
    small = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/28", AvailabilityZone=zone)["Subnet"]["SubnetId"]
    other = ec2.create_subnet(
        VpcId=ec2.create_vpc(CidrBlock="10.1.0.0/16")["Vpc"]["VpcId"], CidrBlock="10.1.0.0/24", AvailabilityZone=zone
    )["Subnet"]["SubnetId"]
    assert "several VPCs" in refused("--subnet", small, other).err
    crowded = refused("--subnet", small, "--count", "12").err
    assert "12 addresses are needed" in crowded
    assert "11 in " in crowded
    assert provision("--cluster", "housed").code == 0
    assert "--subnet cannot move them" in refused("--cluster", "housed", "--subnet", small).err
    ec2.create_security_group(
        GroupName="icom-lonely",
        Description="x",
        VpcId=vpc,
        TagSpecifications=[{"ResourceType": "security-group", "Tags": [{"Key": "icom:cluster", "Value": "lonely"}]}],
    )
    assert "security group" in (far := refused("--cluster", "lonely", "--subnet", other).err)
    assert vpc in far


def test_cluster_of_another_shape(refused: Callable[..., Result], provision: Icom) -> None:
    assert provision("--cluster", "shaped", "--count", "3").code == 0
    fewer = refused("--cluster", "shaped", "--count", "2").err
    assert "has 3 nodes" in fewer
    assert "icom teardown" in fewer


def test_group_that_icom_did_not_make(provision: Icom, ec2: Any, left: Left) -> None:
    """Found only when it is to be made; nothing stays of what was made before."""
    vpc = next(v["VpcId"] for v in ec2.describe_vpcs()["Vpcs"] if v["IsDefault"])
    ec2.create_security_group(GroupName="icom-taken", Description="x", VpcId=vpc)
    result = provision("--cluster", "taken")
    assert result.code == 1
    assert "icom-taken" in result.err
    assert "icom did not make it" in result.err
    assert left("taken") == []


def test_open_key_file(refused: Callable[..., Result], tmp_path: Path) -> None:
    key = tmp_path / "mine.pem"
    key.write_text("x")
    key.chmod(0o644)
    assert f"chmod 600 {key}" in refused("--key_name", "mine", "--key_file", str(key)).err
    key.chmod(0o600)
    assert f"{key} is no private key" in refused("--key_name", "mine", "--key_file", str(key)).err


@pytest.mark.parametrize("form", ["ed25519", "rsa", "rsa -m PEM"])
def test_key_file_with_a_passphrase(form: str, refused: Callable[..., Result], tmp_path: Path) -> None:
    """Told before anything is made; without it the key is taken."""
    key = tmp_path / "mine.pem"
    subprocess.run(["ssh-keygen", "-q", "-t", *form.split(), "-N", "secret", "-f", key], check=True)
    said = refused("--key_name", "mine", "--key_file", str(key)).err
    assert "has a passphrase" in said
    assert "ssh-keygen -p" in said
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "secret", "-N", "", "-f", key], check=True)
    assert "no key pair mine" in refused("--key_name", "mine", "--key_file", str(key)).err


@pytest.mark.parametrize("command", ["provision", "start", "stop", "teardown"])
@pytest.mark.parametrize("minutes", ["0", "-1", "nan"])
def test_waiting_time_that_is_none(command: str, minutes: str, icom: Icom, wire: Wire) -> None:
    result = icom(command, "--wait_minutes", minutes)
    assert result.code == 2
    assert "--wait_minutes has to be a positive number" in result.err
    assert wire.calls == []


def test_own_key_that_became_readable(refused: Callable[..., Result], provision: Icom, tmp_path: Path) -> None:
    assert provision("--cluster", "leaky").code == 0
    (key,) = (tmp_path / "clusters").glob("*/*/leaky/id_ed25519")
    key.chmod(0o644)
    assert "chmod 600" in refused("--cluster", "leaky", "--count", "2").err


def test_key_on_another_computer(
    refused: Callable[..., Result], provision: Icom, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert provision("--cluster", "theirs").code == 0
    monkeypatch.setenv("ICOM_CLUSTERS_DIR", str(tmp_path / "elsewhere"))
    assert "was made on another one" in refused("--cluster", "theirs", "--count", "2").err


def reservation(**changes: Any) -> dict[str, Any]:
    found = {
        **{"CapacityReservationId": "cr-1", "State": "active", "InstanceType": "p5.48xlarge"},
        **{"AvailableInstanceCount": 2, "AvailabilityZone": f"{REGION}b", "ReservationType": "capacity-block"},
    }
    return {"CapacityReservations": [found | changes]}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"State": "expired"}, "is expired"),
        ({"InstanceType": "p4de.24xlarge"}, "--instance_type p4de.24xlarge"),
        ({"AvailableInstanceCount": 1}, "room for 1"),
    ],
)
def test_reservation_that_does_not_fit(
    changes: dict[str, Any], word: str, refused: Callable[..., Result], wire: Wire
) -> None:
    wire.answers[RESERVATION] = reservation(**changes)
    arguments = ("--count", "2", "--capacity_reservation", "cr-1", "--instance_type", "p5.48xlarge")
    assert word in refused(*arguments).err


def test_capacity_block_on_a_gpu_type(provision: Icom, wire: Wire) -> None:
    """The zone of the reservation, its market, the Deep Learning image, an adapter on the fabric."""
    wire.answers[RESERVATION] = reservation()
    options = ("--capacity_reservation", "cr-1", "--instance_type", "p5.48xlarge", "--efa")
    result = provision("--cluster", "block", "--count", "2", "--dry_run", *options)
    assert result.code == 0, result.err
    request = next(params for name, params in wire.requests if name == "RunInstances")
    assert request["ImageId"] == "ami-00000000000000aa3"
    assert request["InstanceMarketOptions"] == {"MarketType": "capacity-block"}
    target = {"CapacityReservationId": "cr-1"}
    assert request["CapacityReservationSpecification"] == {"CapacityReservationTarget": target}
    assert request["NetworkInterfaces"][0]["InterfaceType"] == "efa"
    assert f"{REGION}b" in result.out


def test_spot_and_instance_profile(provision: Icom, wire: Wire) -> None:
    options = ("--spot", "--instance_profile", "reader", "--private_ip", "--ssh_from", "10.0.0.0/8")
    wire.answers["ec2:RunInstances"] = {"Instances": []}  # moto knows no profile; what matters is what is asked
    provision("--cluster", "spot", "--dry_run", *options)
    request = next(params for name, params in wire.requests if name == "RunInstances")
    assert request["InstanceMarketOptions"]["MarketType"] == "spot"
    assert request["IamInstanceProfile"] == {"Name": "reader"}
    assert request["NetworkInterfaces"][0]["AssociatePublicIpAddress"] is False


def test_price_table_when_the_price_list_may_not_be_asked(provision: Icom, wire: Wire) -> None:
    wire.only, wire.fault = "api.pricing:GetProducts", "code:AccessDeniedException"
    result = provision("--cluster", "table", "--dry_run")
    assert result.code == 0
    for shown in ("table of 20", "AccessDeniedException", "0.81", "20.00"):
        assert shown in " ".join(result.out.split())

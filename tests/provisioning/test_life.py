"""A cluster's life through the command line: made, completed, looked at, stopped, started, removed.

Guards provisioning.provision, power and teardown.
"""

from __future__ import annotations

import json
import re
import signal
import stat
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import provisioning
from provisioning import launches
from tests.support.command import ROOT, long, start_process
from tests.support.ec2 import Left, Nodes, output_of, security_group, ssh_sources, tags, user_data
from tests.support.wire import Icom, Wire

PACKAGE = Path(provisioning.__file__).parent


def listed(value: str | list[str]) -> list[str]:
    """IAM's way to write one or several."""
    return [value] if isinstance(value, str) else value


def test_three_nodes_as_the_issue_wants_them(
    provision: Icom, ec2: Any, nodes: Nodes, icom: Icom, left: Left, tmp_path: Path
) -> None:
    result = provision("--cluster", "three", "--count", "3", "--max_hours", "2.5", "--placement_group")
    assert result.code == 0, result.err
    made = sorted(nodes("three"), key=lambda node: tags(node)["icom:role"])
    assert [tags(node)["icom:role"] for node in made] == ["master", "worker-1", "worker-2"]
    assert len({tags(node)["icom:run"] for node in made}) == 1
    (group,) = ec2.describe_security_groups(Filters=[{"Name": "tag:icom:cluster", "Values": ["three"]}])[
        "SecurityGroups"
    ]
    ssh, among = sorted(group["IpPermissions"], key=lambda rule: rule["IpProtocol"], reverse=True)
    assert (ssh["FromPort"], ssh["ToPort"], [r["CidrIp"] for r in ssh["IpRanges"]]) == (22, 22, ["9.9.9.9/32"])
    assert (among["IpProtocol"], among["IpRanges"]) == ("-1", [])
    assert [pair["GroupId"] for pair in among["UserIdGroupPairs"]] == [group["GroupId"]]
    keys = set()
    for node in made:
        (interface,) = node["NetworkInterfaces"]
        assert [g["GroupId"] for g in interface["Groups"]] == [group["GroupId"]]
        assert node["MetadataOptions"]["HttpTokens"] == "required"
        assert node["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
        assert "IamInstanceProfile" not in node
        (mapping,) = node["BlockDeviceMappings"]
        (disk,) = ec2.describe_volumes(VolumeIds=[mapping["Ebs"]["VolumeId"]])["Volumes"]
        assert (disk["Encrypted"], disk["VolumeType"], disk["Size"]) == (True, "gp3", 250)
        behaviour = ec2.describe_instance_attribute(
            InstanceId=node["InstanceId"], Attribute="instanceInitiatedShutdownBehavior"
        )
        assert behaviour["InstanceInitiatedShutdownBehavior"]["Value"] == "terminate"
        data = user_data(ec2, node["InstanceId"])
        keys.add(data["ssh_keys"]["ed25519_public"])
        ends = datetime.strptime(re.findall(r"OnCalendar=(.*) UTC", str(data["bootcmd"]))[0], "%Y-%m-%d %H:%M:%S")
        launched = node["LaunchTime"].replace(tzinfo=None)
        assert timedelta(hours=2.4) < ends - launched <= timedelta(hours=2.5)
    assert len(keys) == 3
    teardown = icom("teardown", "--cluster", "three", "--yes")
    assert teardown.code == 0, teardown.err
    assert "Nothing is left of three" in teardown.out
    assert left("three") == []
    assert not list((tmp_path / "clusters").rglob("*three/*"))


def test_ssh_knows_the_keys_that_the_nodes_got(provision: Icom, ec2: Any, nodes: Nodes, tmp_path: Path) -> None:
    """As OpenSSH itself reads them: the host keys under the instance ids, the config, the private key's mode."""
    assert provision("--cluster", "keys", "--count", "2").code == 0
    (folder,) = (tmp_path / "clusters").glob("*/*/keys")
    for node in nodes("keys"):
        data = user_data(ec2, node["InstanceId"])
        known = output_of("ssh-keygen", "-F", node["InstanceId"], "-f", folder / "known_hosts")
        assert data["ssh_keys"]["ed25519_public"] in known
        host_key = tmp_path / "host_key"
        host_key.write_text(data["ssh_keys"]["ed25519_private"])
        host_key.chmod(0o600)
        assert output_of("ssh-keygen", "-y", "-f", host_key).strip() == data["ssh_keys"]["ed25519_public"]
        config = output_of(
            "ssh", "-G", "-F", folder / "ssh_config", f"icom-keys-{tags(node)['icom:role']}"
        ).splitlines()
        assert f"hostname {node['PublicIpAddress']}" in config
        assert f"hostkeyalias {node['InstanceId']}" in config
        for line in ("stricthostkeychecking true", "batchmode yes", "connecttimeout 10", "serveraliveinterval 15"):
            assert line in config
        assert data["ssh_authorized_keys"] == [(folder / "id_ed25519.pub").read_text().strip()]
    assert stat.S_IMODE((folder / "id_ed25519").stat().st_mode) == 0o600


def test_second_call_has_nothing_to_do_and_a_larger_count_adds(provision: Icom, wire: Wire, nodes: Nodes) -> None:
    assert provision("--cluster", "grow", "--count", "2").code == 0
    before = {node["InstanceId"] for node in nodes("grow")}
    wire.calls.clear()
    again = provision("--cluster", "grow", "--count", "2")
    assert "Nothing to do: 2 nodes" in again.out
    assert not [call for call in wire.calls if "Describe" not in call and ":Get" not in call]
    assert "Nothing" not in provision("--cluster", "grow", "--count", "4").out
    assert before < {node["InstanceId"] for node in nodes("grow")}
    assert len(nodes("grow")) == 4


@pytest.mark.long
def test_failure_leaves_what_an_earlier_call_made(
    provision: Icom, wire: Wire, nodes: Nodes, left: Left, icom: Icom
) -> None:
    assert provision("--cluster", "older", "--count", "2", "--placement_group").code == 0
    before = left("older")
    wire.only, wire.fault, wire.skip, wire.times = "ec2:RunInstances", "code:InternalError", 2, 1000
    failed = provision("--cluster", "older", "--count", "4", "--placement_group")
    assert failed.code == 1, failed
    assert "Nothing of it is left" in failed.out
    assert left("older") == before
    assert len(nodes("older")) == 2


def test_each_request_for_an_instance_has_a_token_of_its_own(provision: Icom, wire: Wire) -> None:
    assert provision("--cluster", "tokens", "--count", "3").code == 0
    asked = [params for name, params in wire.requests if name == "RunInstances" and "DryRun" not in params]
    assert len({params["ClientToken"] for params in asked}) == len(asked) == 3
    for params, role in zip(asked, ("master", "worker-1", "worker-2"), strict=True):
        assert role in params["ClientToken"]


def test_dry_run_makes_nothing(provision: Icom, left: Left) -> None:
    result = provision("--cluster", "dry", "--count", "3", "--dry_run")
    assert result.code == 0
    assert "nothing was made" in result.out
    for shown in ("security group", "key pair", "worker-2", "0.97", "23.80", "2.91", "71.40", "0.0952"):
        assert shown in result.out
    assert "3 public IPv4 addresses" in result.out
    assert left("dry") == []
    private = provision("--cluster", "dry", "--count", "3", "--dry_run", "--private_ip", "--ssh_from", "10.0.0.0/8")
    assert "2.90" in private.out
    assert "public IPv4" not in private.out


def test_file_and_flags(provision: Icom, nodes: Nodes, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("cluster: filed\ncount: 3\ninstance_type: m7i.2xlarge\nvolume_gb: 100\nsubnet: []\n")
    assert provision("--config", str(file), "--count", "2").code == 0
    assert {node["InstanceType"] for node in nodes("filed")} == {"m7i.2xlarge"}
    assert len(nodes("filed")) == 2


@pytest.mark.long
def test_teardown_in_another_region_does_not_say_that_all_is_gone(
    provision: Icom, icom: Icom, nodes: Nodes, tmp_path: Path
) -> None:
    assert provision("--cluster", "abroad").code == 0
    wrong = icom("teardown", "--yes", "--cluster", "abroad", "--region", "us-east-1")
    assert wrong.code == 2
    assert "icom teardown --cluster abroad --region eu-central-1" in wrong.err
    assert len(nodes("abroad")) == 1
    assert list((tmp_path / "clusters").rglob("abroad/id_ed25519"))


def test_stop_and_start(provision: Icom, icom: Icom, nodes: Nodes, tmp_path: Path) -> None:
    assert provision("--cluster", "nap", "--count", "2").code == 0
    assert "2 nodes of nap are stopped" in icom("stop", "--cluster", "nap").out
    assert {node["State"]["Name"] for node in nodes("nap")} == {"stopped"}
    refused = provision("--cluster", "nap", "--count", "2")
    assert refused.code == 2
    assert "icom start" in refused.err
    assert "stopped" in icom("status", "--cluster", "nap").out
    assert "2 nodes of nap run" in icom("start", "--cluster", "nap").out
    (config,) = (tmp_path / "clusters").glob("*/*/nap/ssh_config")
    for node in nodes("nap"):
        assert f"HostName {node['PublicIpAddress']}\n  HostKeyAlias {node['InstanceId']}" in config.read_text()


@pytest.mark.long
def test_clusters_side_by_side_do_not_touch(provision: Icom, icom: Icom, nodes: Nodes, left: Left) -> None:
    for name in ("side-a", "side-b"):
        assert provision("--cluster", name, "--count", "2", "--placement_group").code == 0
    mine = {node["InstanceId"] for node in nodes("side-b")}
    everything = left("side-b")
    assert icom("teardown", "--cluster", "side-a", "--yes").code == 0
    assert left("side-a") == []
    assert {node["InstanceId"] for node in nodes("side-b")} == mine
    assert left("side-b") == everything


@pytest.mark.long
def test_address_that_changed_replaces_the_old_rule(provision: Icom, ec2: Any) -> None:
    assert provision("--cluster", "moved", "--ssh_from", "198.51.100.4").code == 0
    id = security_group(ec2, "moved")["GroupId"]
    by_hand = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "203.0.113.0/24"}]}
    ec2.authorize_security_group_ingress(GroupId=id, IpPermissions=[by_hand])
    assert len(security_group(ec2, "moved")["IpPermissions"]) == 2, "EC2 tells the sources of a port as one rule"
    moved = provision("--cluster", "moved")
    assert moved.code == 0
    told = "no longer lets in tcp 22 from 198.51.100.4/32, tcp 22 from 203.0.113.0/24"
    assert told in " ".join(moved.out.split())
    assert ssh_sources(ec2, "moved") == ["9.9.9.9/32"]
    assert "no longer lets in" not in provision("--cluster", "moved").out
    assert ssh_sources(ec2, "moved") == ["9.9.9.9/32"]


@pytest.mark.long
def test_teardown_lists_what_is_left(provision: Icom, icom: Icom, ec2: Any, left: Left) -> None:
    """A foreign instance in the group keeps it from going, and nothing else; the exit code and a list say so."""
    assert provision("--cluster", "stuck", "--placement_group").code == 0
    mark = [{"Key": "icom:cluster", "Value": "stuck"}]
    kind = [{"ResourceType": "key-pair", "Tags": mark}]
    ec2.create_key_pair(KeyName="another-of-stuck", TagSpecifications=kind)
    disk = [{"ResourceType": "volume", "Tags": mark}]
    ec2.create_volume(AvailabilityZone="eu-central-1a", Size=8, TagSpecifications=disk)
    (group,) = ec2.describe_security_groups(Filters=[{"Name": "tag:icom:cluster", "Values": ["stuck"]}])[
        "SecurityGroups"
    ]
    image = "ami-00000000000000aa1"
    ec2.run_instances(ImageId=image, MinCount=1, MaxCount=1, SecurityGroupIds=[group["GroupId"]], ClientToken="stuck")
    result = icom("teardown", "--cluster", "stuck", "--yes")
    assert result.code == 1
    assert "DependencyViolation" in result.err
    assert f"Left of stuck in eu-central-1:\n  security-group {group['GroupId']}\n" in result.err
    assert left("stuck") == [group["GroupId"]]


@pytest.mark.long
def test_teardown_waits_for_a_node_in_any_state(provision: Icom, icom: Icom, wire: Wire) -> None:
    """One that EC2 still shows as pending, and does not end, is a timeout that is told as one."""
    assert provision("--cluster", "slow").code == 0
    wire.answers["ec2:TerminateInstances"] = {"TerminatingInstances": []}
    result = icom("teardown", "--cluster", "slow", "--yes", "--wait_minutes", "0.01")
    assert result.code == 1
    assert "Not terminated in 0.01 minutes" in result.err
    assert "\n  instance i-" in result.err
    wire.answers.clear()
    assert icom("teardown", "--cluster", "slow", "--yes").code == 0


@pytest.mark.long
def test_launch_whose_answer_was_lost_and_whose_tags_show_late(
    provision: Icom, wire: Wire, left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EC2 does not list the instance by its tags: repeating the request with its token tells the id, to end it."""
    wire.only, wire.fault, wire.skip, wire.times = "ec2:RunInstances", "timeout", 1, 9  # the client's 9 attempts
    monkeypatch.setattr("provisioning.teardown.find_nodes", lambda aws, mine: [])
    result = provision("--cluster", "lost")
    assert result.code == 1
    assert "TerminateInstances" in [name for name, _ in wire.requests]
    assert "Nothing of it is left" in result.out, result
    asked = [params["ClientToken"] for name, params in wire.requests if name == "RunInstances"]
    assert len(asked) == 3, "the rehearsal, the launch, its repetition"
    assert asked[1] == asked[2]
    assert left("lost") == []


@pytest.mark.long
def test_teardown_with_images(provision: Icom, icom: Icom, ec2: Any, nodes: Nodes, left: Left) -> None:
    assert provision("--cluster", "baked").code == 0
    mark = [{"Key": "icom:cluster", "Value": "baked"}]
    kinds = [{"ResourceType": kind, "Tags": mark} for kind in ("image", "snapshot")]
    master = nodes("baked")[0]["InstanceId"]
    image = ec2.create_image(InstanceId=master, Name="baked", TagSpecifications=kinds)["ImageId"]
    first = icom("teardown", "--cluster", "baked", "--yes")
    assert first.code == 0, first.err
    assert image in first.out
    assert icom("teardown", "--cluster", "baked", "--yes", "--all_images").code == 0
    assert not ec2.describe_images(Owners=["self"], Filters=[{"Name": "tag:icom:cluster", "Values": ["baked"]}])[
        "Images"
    ]
    assert left("baked") == []


def test_no_room_moves_on_to_the_next_zone(provision: Icom, wire: Wire, nodes: Nodes, left: Left) -> None:
    """The first zone takes the master and not the worker: the master goes too."""
    wire.only, wire.fault, wire.at = "ec2:RunInstances", "code:InsufficientInstanceCapacity", None
    wire.skip, wire.times = 2, 1  # the rehearsal and the master pass
    result = provision("--cluster", "zones", "--count", "2")
    assert result.code == 0, result.err
    assert "eu-central-1a cannot take worker-1" in result.out
    assert {node["Placement"]["AvailabilityZone"] for node in nodes("zones")} == {"eu-central-1b"}
    assert len(nodes("zones")) == 2


def test_no_room_anywhere_is_said(provision: Icom, wire: Wire, left: Left) -> None:
    wire.only, wire.fault, wire.skip, wire.times = "ec2:RunInstances", "code:InsufficientInstanceCapacity", 1, 1000
    result = provision("--cluster", "full", "--count", "2")
    assert result.code == 1
    for zone in ("eu-central-1a", "eu-central-1b", "eu-central-1c"):
        assert f"{zone}: InsufficientInstanceCapacity" in result.err
    assert left("full") == []


@pytest.mark.parametrize("operation", ["AuthorizeSecurityGroupIngress", "RunInstances"])
def test_what_is_not_visible_yet_is_waited_for(operation: str, provision: Icom, wire: Wire) -> None:
    wire.only, wire.fault, wire.times = f"ec2:{operation}", "code:InvalidGroup.NotFound", 3
    wire.skip = 1 if operation == "RunInstances" else 0  # the rehearsal names no group
    assert provision("--cluster", f"late-{operation.lower()[:9]}").code == 0


def test_instance_that_is_not_known_yet_is_ended_all_the_same(
    provision: Icom, icom: Icom, wire: Wire, left: Left
) -> None:
    assert provision("--cluster", "new").code == 0
    wire.only, wire.fault, wire.times = "ec2:TerminateInstances", "code:InvalidInstanceID.NotFound", 3
    assert icom("teardown", "--yes", "--cluster", "new", "--wait_minutes", "0.1").code == 0
    assert left("new") == []


def test_nodes_whose_tags_show_after_half_a_minute_are_waited_for(
    provision: Icom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks come every two seconds."""
    looks, find = iter([True] * 15), launches.find_nodes
    monkeypatch.setattr(launches, "find_nodes", lambda aws, mine: [] if next(looks, False) else find(aws, mine))
    assert provision("--cluster", "shy", "--count", "2").code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, long(signal.SIGHUP)])
def test_signal_to_a_real_process(number: signal.Signals, moto: str, wire: Wire, left: Left) -> None:
    """The whole program, from the outside, while it waits for the nodes to run. After SIGHUP nobody reads any more."""
    arguments = (
        "provision",
        "--yes",
        "--no_setup",
        "--address_url",
        f"{moto}/address",
        "--cluster",
        f"pending-{number.name.lower()}",
        "--count",
        "2",
    )
    process = start_process(*arguments)
    assert process.stdout
    assert process.stderr
    with process.stdout, process.stderr:
        for line in process.stdout:
            if "worker-1: i-" in line:
                process.send_signal(number)
                break
        if number == signal.SIGINT:
            out, err = process.stdout.read(), process.stderr.read()
            assert "Nothing of it is left" in out, err
            assert "removing what this call made" in err
    code = process.wait()
    assert number == signal.SIGHUP or code == 130
    assert left(f"pending-{number.name.lower()}") == []


def test_calls_no_action_outside_the_policy(provision: Icom, icom: Icom, wire: Wire) -> None:
    """What a life of a cluster calls, and what the code could call at all."""
    policy = json.loads((PACKAGE / "iam_policy.json").read_text())["Statement"]
    allowed = {action for statement in policy for action in listed(statement["Action"])}
    provision("--cluster", "policy", "--count", "2", "--placement_group", "--spot")
    provision("--cluster", "policy", "--count", "3", "--placement_group", "--spot", "--ssh_from", "198.51.100.1")
    icom("status", "--cluster", "policy")
    icom("teardown", "--cluster", "policy", "--yes", "--all_images")
    prefixes = {"api.pricing": "pricing"}
    called = {f"{prefixes.get(service, service)}:{name}" for service, _, name in (c.partition(":") for c in wire.calls)}
    assert "ec2:RunInstances" in called
    assert called <= allowed

    import boto3

    possible = set()
    clients = {"ec2": "ec2", "ssm": "ssm", "service-quotas": "servicequotas", "pricing": "pricing", "sts": "sts"}
    source = "\n".join(file.read_text() for file in PACKAGE.glob("*.py"))
    words = set(re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", source))
    for service, prefix in clients.items():
        mapping = boto3.client(service, region_name="us-east-1").meta.method_to_api_mapping
        possible |= {f"{prefix}:{operation}" for method, operation in mapping.items() if method in words}
    assert called <= possible
    assert possible <= allowed

    # What may be made only with the cluster's tag is asked for with it, in the rehearsal too.
    strict: dict[str, set[str]] = {}
    for statement in policy:
        if "aws:RequestTag/icom:cluster" in statement.get("Condition", {}).get("Null", {}):
            kinds = {resource.split(":")[-1].removesuffix("/*") for resource in listed(statement["Resource"])}
            strict |= {action.removeprefix("ec2:"): kinds for action in listed(statement["Action"])}
    assert strict["RunInstances"] == {"instance", "volume"}
    for name, params in wire.requests:
        if name in strict:
            marked = {s["ResourceType"] for s in params["TagSpecifications"] if tags(s)["icom:cluster"] == "policy"}
            assert marked
            assert marked & strict[name] == (marked if name != "RunInstances" else strict[name])


def test_help_needs_no_boto3() -> None:
    code = "from icom.cli import main\ntry: main(['provision', '--help'])\nfinally: print('boto3' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", f"import sys\n{code}"], cwd=ROOT, stdout=-1, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "False"

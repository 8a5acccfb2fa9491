"""`icom provision --from_this_instance`: an EC2 instance somebody works on becomes the master, and stays as it was.

Guards provisioning.this_instance.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from icom.errors import IcomError
from provisioning.bootstrap import FILES
from provisioning.script import script
from provisioning.transport import LocalTransport
from tests.support.command import ROOT
from tests.support.ec2 import REGION
from tests.support.fake_ssh import FakeLocal, Steps, connector
from tests.support.wire import Icom, Wire

Nodes = Callable[[str], list[dict[str, Any]]]
Left = Callable[[str], list[str]]
NEW_CALLS = (
    *("DescribeVolumes", "DescribeNetworkInterfaces", "ModifyNetworkInterfaceAttribute", "CreateImage"),
    *("DeregisterImage", "DeleteSnapshot"),
)
"""Those that no other provision makes. At all others tests/provisioning/test_faults.py has faults."""
NEW_MAKERS = ("ModifyNetworkInterfaceAttribute", "CreateImage")


class Metadata(ThreadingHTTPServer):
    """The instance metadata service, version 2: without a token it says nothing."""

    document = "{}"

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            right = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
            self.say(200 if right else 400, "a-token")

        def do_GET(self) -> None:
            assert isinstance(self.server, Metadata)
            right = self.headers["X-aws-ec2-metadata-token"] == "a-token"
            known = self.path == "/latest/dynamic/instance-identity/document"
            self.say(401 if not right else 200 if known else 404, self.server.document)

        def say(self, code: int, text: str) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), self.Handler)


@pytest.fixture
def metadata(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    with Metadata() as server:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}/")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Master:
    """The instance that icom runs on, by moto's books."""

    def __init__(self, ec2: Any, metadata: Metadata) -> None:
        self.ec2, self.metadata = ec2, metadata
        self.start()

    def start(self) -> None:
        """Make it, with a security group of its owner's and a disk of data."""
        subnet = next(s for s in self.ec2.describe_subnets()["Subnets"] if s["AvailabilityZone"] == f"{REGION}b")
        group = self.ec2.create_security_group(GroupName="mine", Description="mine", VpcId=subnet["VpcId"])["GroupId"]
        card = {"DeviceIndex": 0, "SubnetId": subnet["SubnetId"], "Groups": [group], "AssociatePublicIpAddress": True}
        disks = [
            {"DeviceName": name, "Ebs": {"VolumeSize": size}} for name, size in (("/dev/sda1", 20), ("/dev/sdf", 9))
        ]
        made = self.ec2.run_instances(
            **{"ImageId": "ami-00000000000000aa1", "InstanceType": "m7i.2xlarge", "MinCount": 1, "MaxCount": 1},
            **{"NetworkInterfaces": [card], "BlockDeviceMappings": disks, "ClientToken": f"mine-{group}"},
        )
        self.id, self.subnet, self.own_group = made["Instances"][0]["InstanceId"], subnet["SubnetId"], group
        self.metadata.document = f'{{"instanceId": "{self.id}", "region": "{REGION}"}}'
        while self.look()["State"]["Name"] != "running":
            pass

    def look(self) -> dict[str, Any]:
        (reservation,) = self.ec2.describe_instances(InstanceIds=[self.id])["Reservations"]
        return dict(reservation["Instances"][0])

    def groups(self) -> list[str]:
        return [group["GroupId"] for card in self.look()["NetworkInterfaces"] for group in card["Groups"]]

    def is_as_it_was(self) -> bool:
        """Whether it runs, has its own group alone, and no tag."""
        now = self.look()
        return now["State"]["Name"] == "running" and self.groups() == [self.own_group] and not now.get("Tags")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Steps:
    steps = Steps()
    monkeypatch.setattr("provisioning.ssh.connect", connector(steps))
    monkeypatch.setattr("provisioning.provision.LocalTransport", lambda name, check: FakeLocal(steps, check))
    monkeypatch.setattr("provisioning.project.archive", lambda: b"")
    monkeypatch.setattr("provisioning.project.digest", lambda: f"content-of-{request.node.name}")
    return steps


@pytest.fixture
def master(ec2: Any, metadata: Metadata, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Master:
    (tmp_path / "home" / "icom").mkdir(parents=True)
    monkeypatch.setattr("provisioning.this_instance.ROOT", tmp_path / "home" / "icom")
    return Master(ec2, metadata)


@pytest.fixture
def make(icom: Icom, master: Master, steps: Steps) -> Icom:
    """`icom provision --from_this_instance --yes`, on that instance."""
    return lambda *options: icom("provision", "--from_this_instance", "--yes", *options)


def tags(resource: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in resource["Tags"]}


def own_images(ec2: Any, cluster: str) -> list[dict[str, Any]]:
    mine = [{"Name": "tag:icom:cluster", "Values": [cluster]}]
    return list(ec2.describe_images(Owners=["self"], Filters=mine)["Images"])


def test_life(
    make: Icom, icom: Icom, master: Master, ec2: Any, nodes: Nodes, left: Left, wire: Wire, steps: Steps, tmp_path: Path
) -> None:
    first = make("--cluster", "mine", "--count", "3")
    assert first.code == 0, first
    assert "3 nodes of mine run" in first.out
    assert "mpirun -f ~/hosts -n 3" in first.out
    workers = nodes("mine")
    assert sorted(tags(node)["icom:role"] for node in workers) == ["worker-1", "worker-2"]
    assert {node["InstanceType"] for node in workers} == {"m7i.2xlarge"}, "like the master"
    assert {node["SubnetId"] for node in workers} == {master.subnet}

    # The disk of this instance, without those of data and without a reboot -> builder -> what workers start from.
    raw, baked = [params for name, params in wire.requests if name == "CreateImage" and "DryRun" not in params]
    assert (raw["InstanceId"], raw["NoReboot"]) == (master.id, True)
    assert raw["BlockDeviceMappings"] == [{"DeviceName": "/dev/sdf", "NoDevice": ""}]
    launched = [params for name, params in wire.requests if name == "RunInstances" and "DryRun" not in params]
    (image,) = own_images(ec2, "mine")
    assert image["Name"] == baked["Name"]
    assert tags(image)["icom:base"] == master.id
    assert [request["ImageId"] == image["ImageId"] for request in launched] == [False, True, True]
    assert launched[0]["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] == 40, "the master's 20 GB, and room"
    assert [step for step in steps.done if step.startswith("builder: ")][-1].count("icom-scrub")
    held = [i["BlockDeviceMappings"][0]["Ebs"]["SnapshotId"] for i in own_images(ec2, "mine")]
    mine = [{"Name": "tag:icom:cluster", "Values": ["mine"]}]
    snapshots = ec2.describe_snapshots(OwnerIds=["self"], Filters=mine)["Snapshots"]
    assert [snapshot["SnapshotId"] for snapshot in snapshots] == held, "the raw one is gone"

    # This instance: reached and reaching by the group, nothing installed, its host key left alone.
    (group,) = ec2.describe_security_groups(Filters=mine)["SecurityGroups"]
    assert master.groups() == [master.own_group, group["GroupId"]]
    assert not master.look().get("Tags")
    here = [step for step in steps.done if step.startswith("master: ")]
    assert not [step for step in here if "setup-master" in step or "ssh_host" in step or "sftp" in step]
    assert [step for step in here if step.endswith("node2 true")]
    (address,) = {r["CidrIp"] for rule in group["IpPermissions"] for r in rule["IpRanges"]}
    assert address == f"{master.look()['PrivateIpAddress']}/32"

    # Workers are reached inside the VPC: their public addresses are for what they download.
    (config,) = (tmp_path / "clusters").rglob("mine/ssh_config")
    for node in workers:
        assert node["PublicIpAddress"]
        assert f"HostName {node['PrivateIpAddress']}\n  HostKeyAlias {node['InstanceId']}" in config.read_text()

    # Again, more, and looked at.
    wire.calls.clear()
    assert "Nothing to do: 3 nodes" in make("--cluster", "mine", "--count", "3").out
    assert make("--cluster", "mine", "--count", "4").code == 0
    assert make("--cluster", "other", "--count", "2").code == 0, "the image serves another cluster"
    assert "ec2:CreateImage" not in wire.calls
    assert len(own_images(ec2, "mine")) == 1
    assert own_images(ec2, "other") == []
    assert f"master {master.id} running" in " ".join(icom("status", "--cluster", "mine").out.split())
    refused = icom("ssh", "--cluster", "mine")
    assert refused.code == 2
    assert master.id in refused.err
    refused = icom("provision", "--yes", "--cluster", "mine", "--count", "4", "--ssh_from", "9.9.9.9")
    assert refused.code == 2
    assert f"from {master.id}" in refused.err

    # Stop is for the workers; teardown puts this instance's groups back.
    assert icom("stop", "--cluster", "mine").code == 0
    assert master.look()["State"]["Name"] == "running"
    for cluster in ("mine", "other"):
        gone = icom("teardown", "--yes", "--cluster", cluster)
        assert gone.code == 0, gone
    assert master.is_as_it_was()
    assert left("mine") == sorted([image["ImageId"], *held])
    assert icom("teardown", "--yes", "--cluster", "mine", "--all_images").code == 0
    assert left("mine") == left("other") == []


@pytest.mark.long
@pytest.mark.parametrize("fault", ["refused", "timeout", "ctrl-c"])
def test_fault_at_every_new_call_leaves_this_instance_as_it_was(
    fault: str,
    make: Icom,
    icom: Icom,
    master: Master,
    wire: Wire,
    left: Left,
    empty: Callable[[], None],
    subtests: pytest.Subtests,
) -> None:
    assert make("--cluster", "smooth", "--count", "2").code == 0
    calls = list(wire.calls)
    for at, call in enumerate(calls):
        operation = call.partition(":")[2]
        if operation not in NEW_CALLS or (fault != "refused" and operation not in NEW_MAKERS):
            continue
        with subtests.test(at=at, call=call):
            empty()
            master.start()
            wire.calls.clear()
            wire.at, wire.fault, wire.times = at, fault, 1 if fault == "ctrl-c" else 1000
            result = make("--cluster", "faulty", "--count", "2")
            wire.at = None
            assert wire.calls[at] == call
            assert result.code == (130 if fault == "ctrl-c" else 1), result
            assert left("faulty") == [], result
            assert master.is_as_it_was(), result
            assert "TerminateInstances" not in [n for n, p in wire.requests if master.id in p.get("InstanceIds", [])]


@pytest.mark.long
def test_fault_at_steps_on_this_instance(make: Icom, icom: Icom, master: Master, left: Left, steps: Steps) -> None:
    """The image is made once: faults on the way to it are those of test_bake.py, but for the first."""
    steps.at, steps.fault = 0, "ctrl-c"
    assert make("--cluster", "early", "--count", "2").code == 130
    assert left("early") == [], "neither the builder nor the raw image"
    steps.at, steps.fault = None, "error"
    assert make("--cluster", "smooth", "--count", "2").code == 0
    steps.done.clear()
    assert make("--cluster", "again", "--count", "2").code == 0
    own = [at for at, step in enumerate(steps.done) if step.startswith("master: ")]
    own = [own[0], own[len(own) // 2], own[-1]]
    for cluster in ("smooth", "again"):
        assert icom("teardown", "--yes", "--cluster", cluster).code == 0
    for at in own:
        steps.done.clear()
        steps.at = at
        result = make("--cluster", "faulty", "--count", "2")
        assert result.code == 1, (at, steps.done[-1], result)
        assert left("faulty") == [], steps.done[-1]
        assert master.is_as_it_was(), steps.done[-1]


@pytest.mark.long
def test_raw_image_goes_with_teardown_and_with_the_next_call(
    make: Icom, icom: Icom, master: Master, ec2: Any, left: Left, steps: Steps
) -> None:
    """It holds the user's keys: a call that kept what it made, or was killed, must not leave it for good."""
    steps.at, steps.fault = 3, "error"
    for _ in range(2):
        steps.done.clear()
        assert make("--cluster", "kept", "--count", "2", "--keep_on_failure").code == 1
        assert [tags(image)["icom:role"] for image in own_images(ec2, "kept")] == ["raw"], "the second call's alone"
    assert not master.is_as_it_was()
    gone = icom("teardown", "--yes", "--cluster", "kept")
    assert gone.code == 0, gone
    assert "- raw image ami-" in gone.out
    assert left("kept") == []
    assert master.is_as_it_was()


def test_cluster_of_a_laptop_is_refused(make: Icom, provision: Icom, master: Master) -> None:
    assert provision("--cluster", "laptop").code == 0
    refused = make("--cluster", "laptop", "--count", "2")
    assert refused.code == 2
    assert "made without --from_this_instance" in refused.err
    assert master.is_as_it_was()


def test_node_of_a_cluster_is_refused(make: Icom, master: Master, ec2: Any) -> None:
    ec2.create_tags(Resources=[master.id], Tags=[{"Key": "icom:cluster", "Value": "older"}])
    refused = make("--count", "2")
    assert refused.code == 2
    assert "icom provision --cluster older" in refused.err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--count", "1"], "2 or more"),
        (["--count", "2", "--no_bake"], "drop --no_bake"),
        (["--count", "2", "--ami", "ami-1"], "drop it"),
        (["--count", "2", "--instance_type", "m7i.large"], "instance_type"),
        (["--count", "2", "--region", "us-east-1"], f"This instance is in {REGION}"),
    ],
)
def test_what_cannot_be_is_refused(options: list[str], says: str, make: Icom, wire: Wire) -> None:
    refused = make(*options)
    assert refused.code == 2
    assert says in refused.err
    assert wire.calls == []


def test_elsewhere_is_refused(
    icom: Icom, wire: Wire, make: Icom, metadata: Metadata, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for document in ("{}", "<html>log in</html>", '{"instanceId": "a b", "region": "x"}'):
        metadata.document = document
        assert "this is no EC2 instance" in make("--count", "2").err
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    refused = make("--count", "2")
    assert refused.code == 2
    assert "this is no EC2 instance" in refused.err
    assert wire.calls == []


def test_icom_that_is_elsewhere_is_refused(
    make: Icom, wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind a link: on the workers it is a folder, and mpirun looks for its programs at the master's path."""
    place, real = tmp_path / "home" / "icom", tmp_path / "clone"
    place.rename(real)
    monkeypatch.setattr("provisioning.this_instance.ROOT", real)
    move = f"mv {real} {place} && make -C {place} setup-master"
    for prepare, first in (
        (lambda: None, ""),
        (place.mkdir, f"mv {place} {place}.other && "),
        (lambda: (place.rmdir(), place.symlink_to(real)), f"rm {place} && "),
    ):
        prepare()
        refused = make("--count", "2")
        assert refused.code == 2
        assert f"Move it: {first}{move}" in refused.err
    assert wire.calls == []


def test_key_with_a_passphrase_is_refused(make: Icom, wire: Wire, tmp_path: Path) -> None:
    """The workers would let it in, and mpirun could not use it."""
    key = tmp_path / "home/.ssh/id_ed25519"
    key.parent.mkdir(exist_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", key], check=True)
    refused = make("--count", "2")
    assert refused.code == 2
    assert f"{key} cannot be used without a passphrase" in refused.err
    assert wire.calls == []


def test_here_is_like_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    here = LocalTransport("master (i-1)")
    assert here.run("pwd; echo ${MASTER_ADDR-none}; cat").split() == [str(tmp_path), "none"]
    with pytest.raises(IcomError, match=r"master \(i-1\): exit code 3 of: .*\n  no such luck"):
        here.run("echo no such luck >&2; exit 3")
    with pytest.raises(IcomError, match=r"no end after 0.2 s"):
        here.run("sleep 36000; true", seconds=0.2)


def test_ctrl_c_at_the_terminal_does_not_reach_the_step(tmp_path: Path) -> None:
    """The terminal signals all of its foreground group: the step has to go on, to be undone in order."""
    code = (
        "import signal, sys; from provisioning.transport import LocalTransport\n"
        "signal.signal(signal.SIGINT, lambda *_: None); print('ready', flush=True)\n"
        "print(LocalTransport('here').run('echo $$ > pid; sleep 0.5; echo whole'))"
    )
    environment = os.environ | {"HOME": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=-1, text=True, start_new_session=True
    ) as process:
        while not (tmp_path / "pid").exists():
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        assert "whole" in process.communicate()[0]


def test_files_of_the_user_are_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hosts file that icom replaces first is the user's; those that it replaces later are its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for text in ("the user's", "icom's"):
        (tmp_path / "hosts").write_text(text)
        LocalTransport("here").run(script("keep_files", *FILES))
    assert (tmp_path / "hosts.before_icom").read_text() == "the user's"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hosts", "hosts.before_icom"]

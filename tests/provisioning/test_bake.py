"""The image that nodes start from: baked once per content of the project, used by all, removed when asked.

Guards provisioning.bake, images and install.
"""

from __future__ import annotations

import base64
import fcntl
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from provisioning import project
from provisioning.script import script
from tests.support.command import ROOT, long
from tests.support.fake_ssh import Steps
from tests.support.wire import Icom, Wire

Nodes = Callable[[str], list[dict[str, Any]]]
Left = Callable[[str], list[str]]
UBUNTU = "ami-00000000000000aa1"
FAULTS = ("error", "broken", "hang", "ctrl-c")
EVERY = 3
"""How many steps of ssh there are to each that meets a fault; each kind of fault begins at another one."""


@pytest.fixture
def bake(icom: Icom, moto: str, steps: Steps) -> Icom:
    """`icom bake --yes` with a node that says yes."""
    return lambda *options: icom("bake", "--yes", "--address_url", f"{moto}/address", *options)


@pytest.fixture
def content(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """What stands for the project's digest in this test."""
    name = f"content-of-{request.node.name}"
    monkeypatch.setattr("provisioning.project.digest", lambda: name)
    return name


def tags(resource: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in resource["Tags"]}


def test_bakes_once_and_launches_all_from_it(
    make: Icom, bake: Icom, icom: Icom, wire: Wire, ec2: Any, nodes: Nodes, left: Left, content: str, steps: Steps
) -> None:
    first = make("--cluster", "baker", "--count", "2", "--volume_gb", "100")
    assert first.code == 0, first
    (image,) = ec2.describe_images(Owners=["self"], Filters=[{"Name": "tag:icom:content", "Values": [content]}])[
        "Images"
    ]
    assert {node["ImageId"] for node in nodes("baker")} == {image["ImageId"]}
    assert sorted(tags(node)["icom:role"] for node in nodes("baker")) == ["master", "worker-1"]
    launched = [params for name, params in wire.requests if name == "RunInstances" and "DryRun" not in params]
    builder = launched[0]
    assert builder["ImageId"] == UBUNTU
    assert builder["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert "icom-end.timer" in base64.b64decode(builder["UserData"]).decode(), "it ends itself when nobody else does"
    size = builder["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"]
    assert 30 <= size < 100, "nodes will need a disk as large as this one's"
    done = [step for step in steps.done if step.startswith("builder: ")]
    parts = ("setup-master", "doctor", "--instance")
    order = [next(i for i, step in enumerate(done) if part in step) for part in parts]
    assert order == sorted(order)
    assert "icom-scrub" in done[-1], "nothing is done on the builder after the scrub"
    last = ("ec2:StopInstances", "ec2:CreateImage", "ec2:TerminateInstances")
    calls = [call for call in wire.calls if call in last]
    assert calls == list(last)

    # Another cluster, the same content: nothing is baked. So it is when this one grows.
    wire.calls.clear()
    assert make("--cluster", "eater", "--count", "2").code == 0
    assert {node["ImageId"] for node in nodes("eater")} == {image["ImageId"]}
    assert make("--cluster", "baker", "--count", "3", "--volume_gb", "100").code == 0
    assert {node["ImageId"] for node in nodes("baker")} == {image["ImageId"]}
    assert "ec2:CreateImage" not in wire.calls
    assert f"Nothing to do: image {image['ImageId']}" in bake("--cluster", "eater").out

    assert icom("teardown", "--yes", "--cluster", "eater").code == 0
    assert left("eater") == []
    kept = icom("teardown", "--yes", "--cluster", "baker")
    assert kept.code == 0, kept
    assert image["ImageId"] in kept.out
    assert icom("teardown", "--yes", "--cluster", "baker", "--all_images").code == 0
    assert left("baker") == []


@pytest.mark.long
def test_another_content_or_base_bakes_again(
    make: Icom, icom: Icom, nodes: Nodes, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make("--cluster", "one").code == 0
    assert make("--cluster", "two", "--ami", UBUNTU).code == 0
    monkeypatch.setattr("provisioning.project.digest", lambda: f"{content}-changed")
    assert make("--cluster", "three").code == 0
    images = [nodes(name)[0]["ImageId"] for name in ("one", "two", "three")]
    assert len(set(images)) == 3
    assert make("--cluster", "two", "--ami", UBUNTU).code == 0, "the same command again"
    for name in ("one", "two", "three"):
        assert icom("teardown", "--yes", "--cluster", name, "--all_images").code == 0


def test_bake_alone_leaves_the_image(
    bake: Icom, icom: Icom, ec2: Any, left: Left, content: str, tmp_path: Path
) -> None:
    result = bake("--cluster", "alone")
    assert result.code == 0, result
    (image,) = ec2.describe_images(Owners=["self"], Filters=[{"Name": "tag:icom:content", "Values": [content]}])[
        "Images"
    ]
    snapshot = image["BlockDeviceMappings"][0]["Ebs"]["SnapshotId"]
    assert left("alone") == sorted([image["ImageId"], snapshot])
    assert not list((tmp_path / "clusters").rglob("id_ed25519"))
    assert icom("teardown", "--yes", "--cluster", "alone", "--all_images").code == 0
    assert left("alone") == []


@pytest.mark.long
def test_bake_beside_a_cluster_leaves_its_rules(
    make: Icom, bake: Icom, icom: Icom, ec2: Any, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The builder is a guest in the cluster's security group, and here it is reached from another address."""

    def rules() -> list[dict[str, Any]]:
        mine = [{"Name": "tag:icom:cluster", "Values": ["host"]}]
        (group,) = ec2.describe_security_groups(Filters=mine)["SecurityGroups"]
        return list(group["IpPermissions"])

    assert make("--cluster", "host", "--ssh_from", "198.51.100.4").code == 0
    before = rules()
    monkeypatch.setattr("provisioning.project.digest", lambda: "newer")
    steps.meet_at(3, "error")
    assert bake("--cluster", "host", "--ssh_from", "198.51.100.99").code == 1
    assert rules() == before
    steps.meet_at(None, "")
    assert bake("--cluster", "host", "--ssh_from", "198.51.100.99").code == 0
    assert rules() == before
    assert icom("teardown", "--yes", "--cluster", "host", "--all_images").code == 0


def test_gpus_that_pytorch_cannot_use_are_told(make: Icom, wire: Wire, left: Left, content: str) -> None:
    """The builder has none; the nodes are asked before they are called ready."""
    result = make("--cluster", "gpus", "--instance_type", "p4de.24xlarge")
    assert result.code == 1, result
    assert "it has 8 GPUs, of which PyTorch can use 0" in result.err
    launched = [params for name, params in wire.requests if name == "RunInstances" and "DryRun" not in params]
    assert [params["InstanceType"] for params in launched] == ["m7i.2xlarge", "p4de.24xlarge"]
    assert left("gpus") == []


def test_files_are_not_replaced_under_a_training(tmp_path: Path) -> None:
    """The lock is that of `icom train --on`, held by the kernel for whoever trains."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "icom").mkdir()
    (tmp_path / "icom/old").touch()
    (tmp_path / ".icom.tar.gz").write_bytes(project.archive())
    unpack = ["sh", "-c", script("unpack_project", ".icom.tar.gz", "icom").line]
    with (tmp_path / "runs/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = subprocess.run(unpack, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert refused.returncode
    assert "A training runs here" in refused.stderr
    assert (tmp_path / "icom/old").exists()
    subprocess.run(unpack, cwd=tmp_path, check=True)
    assert not (tmp_path / "icom/old").exists()
    assert (tmp_path / "icom/Makefile").read_bytes() == (ROOT / "Makefile").read_bytes()


@pytest.mark.parametrize("steps_from", [0, long(1)])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_at_a_step_of_ssh_leaves_nothing(
    fault: str,
    steps_from: int,
    make: Icom,
    left: Left,
    steps: Steps,
    empty: Callable[[], None],
    subtests: pytest.Subtests,
) -> None:
    """What a step leaves behind is its own, how its failure is met is not: each step has at least one kind of fault."""
    assert make("--cluster", "smooth", "--count", "2").code == 0
    which = slice(steps_from + FAULTS.index(fault) % EVERY, None, EVERY) if steps_from else slice(0, 1)
    for at, step in list(enumerate(steps.done))[which]:
        with subtests.test(at=at, step=step):
            empty()
            steps.meet_at(at, fault)
            result = make("--cluster", f"s{at}-{fault}", "--count", "2")
            assert result.code == (130 if fault == "ctrl-c" else 1), result
            if fault == "error":
                assert "no such luck" in result.err
                assert "i-" in result.err
            if fault == "hang":
                assert re.search(r" \(i-[0-9a-f]+\): .*(no end after \d+ s of|timed out)", result.err), result.err
            assert left(f"s{at}-{fault}") == [], result


@pytest.mark.long
def test_second_call_completes_what_was_kept(
    make: Icom,
    icom: Icom,
    nodes: Nodes,
    left: Left,
    steps: Steps,
    empty: Callable[[], None],
    subtests: pytest.Subtests,
) -> None:
    """After a fault at every third step: the next call does all of them anyway."""
    assert make("--cluster", "smooth", "--count", "1").code == 0
    for at, step in list(enumerate(steps.done))[::EVERY]:
        with subtests.test(at=at, step=step):
            empty()
            steps.meet_at(at, "error")
            assert make("--cluster", "kept", "--keep_on_failure").code == 1
            assert left("kept")
            steps.meet_at(None, "")
            again = make("--cluster", "kept")
            assert again.code == 0, again
            assert [tags(node)["icom:role"] for node in nodes("kept")] == ["master"]
    assert icom("teardown", "--yes", "--cluster", "kept", "--all_images").code == 0
    assert left("kept") == []

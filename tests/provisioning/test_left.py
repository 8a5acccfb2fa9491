"""provisioning.teardown, strays and launches where EC2 does not keep its word: nothing is left unsaid.

Guards provisioning.teardown, strays and ec2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from provisioning.hostkeys import make_key
from tests.support.command import long
from tests.support.ec2 import Left, Nodes, security_group
from tests.support.wire import Icom, Wire

NAME = "icom-lost"


def named(ec2: Any, name: str = NAME) -> list[str]:
    """What has a cluster's name, by EC2's books: kinds."""
    by_name = {"Filters": [{"Name": "group-name", "Values": [name]}]}
    found = {
        "security-group": ec2.describe_security_groups(**by_name)["SecurityGroups"],
        "placement-group": ec2.describe_placement_groups(**by_name)["PlacementGroups"],
        "key-pair": [key for key in ec2.describe_key_pairs()["KeyPairs"] if key["KeyName"] == name],
        "image": [image for image in ec2.describe_images(Owners=["self"])["Images"] if name in image["Name"]],
    }
    return [kind for kind, some in found.items() if some]


@pytest.mark.parametrize(
    "operation", ["CreateSecurityGroup", long("ImportKeyPair"), long("CreatePlacementGroup"), long("CreateImage")]
)
def test_tags_that_ec2_loses(operation: str, provision: Icom, make: Icom, wire: Wire, ec2: Any, left: Left) -> None:
    """It answers as if it had set them."""
    wire.untagged = {operation}
    run = make if operation == "CreateImage" else provision
    result = run("--cluster", "lost", "--placement_group")
    assert result.code == 1, result
    assert "without the tags that it was given" in result.err
    assert named(ec2) == []
    assert left("lost") == []


def test_tags_that_ec2_loses_of_what_cannot_be_removed(
    provision: Icom, icom: Icom, wire: Wire, ec2: Any, left: Left
) -> None:
    """The policy lets icom remove only what carries the tag."""
    wire.untagged = {"ImportKeyPair"}
    wire.only, wire.fault = "ec2:DeleteKeyPair", "code:UnauthorizedOperation"
    result = provision("--cluster", "lost")
    assert result.code == 1, result
    assert "Nothing of it is left" not in result.out
    (key,) = ec2.describe_key_pairs()["KeyPairs"]
    assert key["KeyPairId"] in result.err
    assert "by hand" in result.err
    assert left("lost") == []
    gone = icom("teardown", "--yes", "--cluster", "lost")
    assert gone.code == 1, gone
    assert f"aws ec2 delete-key-pair --key-pair-id {key['KeyPairId']}" in gone.err
    assert gone.err.splitlines()[-1].endswith("icom teardown --cluster lost")
    assert named(ec2) == ["key-pair"]


@pytest.mark.long
def test_tags_that_somebody_took_away(make: Icom, icom: Icom, ec2: Any, left: Left) -> None:
    assert make("--cluster", "lost", "--placement_group").code == 0
    untagged = [
        security_group(ec2, "lost")["GroupId"],
        *(key["KeyPairId"] for key in ec2.describe_key_pairs()["KeyPairs"]),
        *(image["ImageId"] for image in ec2.describe_images(Owners=["self"])["Images"]),
    ]
    ec2.delete_tags(Resources=untagged, Tags=[{"Key": "icom:cluster"}])
    ec2.delete_placement_group(GroupName=NAME)
    ec2.create_placement_group(GroupName=NAME, Strategy="cluster")
    before = named(ec2)
    assert (len(before), len(untagged)) == (4, 3)
    for _ in range(2):  # the second has nothing with the tag any more
        gone = icom("teardown", "--yes", "--cluster", "lost", "--all_images")
        assert gone.code == 1, gone
        assert "Nothing is left" not in gone.out
        for id in untagged:
            assert id in gone.err
        assert f"placement-group {NAME}" in gone.err
        assert gone.err.splitlines()[-1].endswith("icom teardown --cluster lost")
        assert named(ec2) == before
    assert [id for id in left("lost") if not id.startswith("snap-")] == [], "the image holds its snapshot"


@pytest.mark.parametrize("when", ["before", "while"])
def test_key_pair_of_a_stranger(when: str, provision: Icom, icom: Icom, wire: Wire, ec2: Any) -> None:
    """Put in place of the cluster's own before the teardown looks, and right after it has looked."""
    assert provision("--cluster", "lost").code == 0
    theirs: list[str] = []

    def replace(answer: dict[str, Any] | None = None) -> None:
        if not theirs:
            ec2.delete_key_pair(KeyName=NAME)
            theirs.append(ec2.import_key_pair(KeyName=NAME, PublicKeyMaterial=make_key().public.encode())["KeyPairId"])

    if when == "before":
        replace()
    else:
        wire.changes["ec2:DescribeKeyPairs"] = replace
    gone = icom("teardown", "--yes", "--cluster", "lost")
    assert gone.code == 1, gone
    assert f"key-pair {theirs[0]}" in gone.err
    assert "Nothing is left" not in gone.out
    assert [key["KeyPairId"] for key in ec2.describe_key_pairs()["KeyPairs"]] == theirs


@pytest.mark.parametrize("told", [{"Instances": []}, {}])
def test_launch_that_is_answered_with_no_instance(told: dict[str, Any], provision: Icom, wire: Wire) -> None:
    def lie(answer: dict[str, Any]) -> None:
        answer.pop("Instances", None)
        answer.update(told)

    wire.changes["ec2:RunInstances"] = lie
    result = provision("--cluster", "lost")
    assert result.code == 1, result
    assert "Traceback" not in result.err
    assert "without an instance" in result.err
    assert result.err.splitlines()[-1].endswith("icom teardown --cluster lost")


def test_launch_that_is_answered_with_no_instance_once(provision: Icom, wire: Wire, left: Left) -> None:
    """The repetition with its token tells which one to end."""
    looks = iter([True])

    def lie(answer: dict[str, Any]) -> None:
        if next(looks, False):
            answer["Instances"] = []

    wire.changes["ec2:RunInstances"] = lie
    result = provision("--cluster", "lost")
    assert result.code == 1, result
    assert "Nothing of it is left" in result.out
    assert left("lost") == []


@pytest.fixture
def hide(wire: Wire, nodes: Nodes) -> Callable[[str, int], list[int]]:
    """DescribeInstances does not show a cluster's third instance, for a number of looks; how many are to come."""

    def start(cluster: str, looks: int) -> list[int]:
        to_come = [looks]

        def lie(answer: dict[str, Any]) -> None:
            if to_come[0] > 0:
                for reservation in answer.get("Reservations", []):
                    kept = [i for i in reservation["Instances"] if ("worker-2" not in str(i.get("Tags")))]
                    to_come[0] -= len(kept) < len(reservation["Instances"])
                    reservation["Instances"] = kept

        wire.changes["ec2:DescribeInstances"] = lie
        return to_come

    return start


@pytest.mark.long
def test_two_of_three_are_shown(
    provision: Icom, icom: Icom, nodes: Nodes, left: Left, wire: Wire, hide: Callable[[str, int], list[int]]
) -> None:
    """For 40 looks of two seconds: the cluster is not called done without the third, and it goes with the others."""
    hide("lost", 40)
    made = provision("--cluster", "lost", "--count", "3")
    assert made.code == 0, made
    assert "Done: 3 nodes" in made.out
    assert len(nodes("lost")) == 3
    hide("lost", 40)
    wire.only, wire.fault = "ec2:TerminateInstances", "code:UnauthorizedOperation"
    stuck = icom("teardown", "--yes", "--cluster", "lost")
    assert stuck.code == 1, stuck
    assert stuck.err.splitlines()[-1].endswith("icom teardown --cluster lost")
    assert all(node["InstanceId"] in stuck.err for node in nodes("lost"))
    wire.only = ""
    hide("lost", 40)
    gone = icom("teardown", "--yes", "--cluster", "lost")
    assert left("lost") == [], gone
    assert gone.code == 0 or gone.err.splitlines()[-1].endswith("icom teardown --cluster lost"), gone
    hide("lost", 0)
    assert icom("teardown", "--yes", "--cluster", "lost").code == 0


@pytest.mark.long
def test_failure_while_two_of_three_are_shown(
    provision: Icom, left: Left, hide: Callable[[str, int], list[int]]
) -> None:
    """EC2 never shows the third: it is ended by the id that its launch told."""
    hide("lost", 10**6)
    result = provision("--cluster", "lost", "--count", "3", "--wait_minutes", "0.001")
    assert result.code == 1, result
    assert left("lost") == []

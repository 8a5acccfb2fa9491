"""provisioning.ec2's rules of the security group: whoever is let in besides, in whichever way, is shut out and told.

Guards provisioning.ec2 and power.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from provisioning import launches
from tests.support.ec2 import security_group
from tests.support.wire import Icom, Wire

SSH = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22}
BY_HAND: dict[str, dict[str, Any]] = {
    "0.0.0.0/0": SSH | {"IpRanges": [{"CidrIp": "0.0.0.0/0"}]},
    "203.0.113.0/24": SSH | {"IpRanges": [{"CidrIp": "203.0.113.0/24", "Description": "office"}]},
    "::/0": SSH | {"Ipv6Ranges": [{"CidrIpv6": "::/0"}]},
    "2001:db8::/32": SSH | {"Ipv6Ranges": [{"CidrIpv6": "2001:db8::/32", "Description": "home"}]},
    "prefix list": SSH | {"PrefixListIds": [{"PrefixListId": "LIST"}]},
    "other group": SSH | {"UserIdGroupPairs": [{"GroupId": "OTHER"}]},
    "all ports, IPv6": {"IpProtocol": "-1", "Ipv6Ranges": [{"CidrIpv6": "::/0"}]},
    "all ports, IPv4": {"IpProtocol": "-1", "IpRanges": [{"CidrIp": "198.51.100.0/24"}]},
    "all ports, other group": {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "OTHER"}]},
    "ports around ssh": {"IpProtocol": "tcp", "FromPort": 1, "ToPort": 1024, "Ipv6Ranges": [{"CidrIpv6": "::/0"}]},
    "another port": {"IpProtocol": "tcp", "FromPort": 29500, "ToPort": 29500, "Ipv6Ranges": [{"CidrIpv6": "::/0"}]},
    "udp": {"IpProtocol": "udp", "FromPort": 22, "ToPort": 22, "PrefixListIds": [{"PrefixListId": "LIST"}]},
    "both families": SSH | {"IpRanges": [{"CidrIp": "192.0.2.0/24"}], "Ipv6Ranges": [{"CidrIpv6": "2001:db8::/48"}]},
}


@pytest.fixture
def by_hand(ec2: Any, wire: Wire) -> list[dict[str, Any]]:
    """Rules as somebody adds them."""
    vpc = next(v["VpcId"] for v in ec2.describe_vpcs()["Vpcs"] if v["IsDefault"])
    other = ec2.create_security_group(GroupName="other", Description="x", VpcId=vpc)["GroupId"]
    made = ec2.create_managed_prefix_list(PrefixListName="list", MaxEntries=3, AddressFamily="IPv4")
    text = json.dumps(list(BY_HAND.values())).replace("OTHER", other)
    rules: list[dict[str, Any]] = json.loads(text.replace("LIST", made["PrefixList"]["PrefixListId"]))
    return rules


def sources(rule: dict[str, Any]) -> list[str]:
    lists = [value for value in rule.values() if isinstance(value, list)]
    return [value for some in lists for one in some for key, value in one.items() if key != "Description"]


def assert_as_planned(ec2: Any, cluster: str) -> None:
    """By EC2's books."""
    group = security_group(ec2, cluster)
    sources = {
        (rule["IpProtocol"], kind, next(value for key, value in source.items() if key not in ("Description", "UserId")))
        for rule in group["IpPermissions"]
        for kind in ("IpRanges", "Ipv6Ranges", "PrefixListIds", "UserIdGroupPairs")
        for source in rule.get(kind, [])
    }
    assert sources == {("tcp", "IpRanges", "9.9.9.9/32"), ("-1", "UserIdGroupPairs", group["GroupId"])}


@pytest.mark.parametrize("when", ["while", "after"])
def test_rules_by_hand(
    when: str, by_hand: list[dict[str, Any]], provision: Icom, icom: Icom, ec2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nodes are waited for, or between two calls: the status shows who gets in to ssh, the end is as planned."""
    wait_for, shown = launches.wait_for, []

    def add() -> None:
        group = security_group(ec2, "open")["GroupId"]
        for rule in by_hand:
            ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])
        shown.append("".join(icom("status", "--cluster", "open").out.split()))

    def meanwhile(*arguments: Any) -> None:
        if not shown:
            add()
        wait_for(*arguments)

    if when == "while":
        monkeypatch.setattr(launches, "wait_for", meanwhile)
    result = provision("--cluster", "open")
    if when == "after":
        add()
        result = provision("--cluster", "open")
    assert result.code == 0, result
    assert_as_planned(ec2, "open")
    told = " ".join(result.out.split()).partition("no longer lets in")[2]
    for rule in by_hand:
        for source in sources(rule):
            assert f"from {source}" in told, rule
            reaches_ssh = rule["IpProtocol"] == "-1" or (rule["IpProtocol"] == "tcp" and rule["FromPort"] <= 22)
            assert not reaches_ssh or source in shown[0], rule

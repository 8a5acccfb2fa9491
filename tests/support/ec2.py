"""What EC2's books say of a cluster, for tests to compare with."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

REGION = "eu-central-1"
Nodes = Callable[[str], list[dict[str, Any]]]
"""The fixture `nodes`."""
Left = Callable[[str], list[str]]
"""The fixture `left`."""


def tags(resource: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in resource["Tags"]}


def security_group(ec2: Any, cluster: str) -> dict[str, Any]:
    mine = [{"Name": "tag:icom:cluster", "Values": [cluster]}]
    (group,) = ec2.describe_security_groups(Filters=mine)["SecurityGroups"]
    return dict(group)


def ssh_sources(ec2: Any, cluster: str) -> list[str]:
    rules = security_group(ec2, cluster)["IpPermissions"]
    return [source["CidrIp"] for rule in rules for source in rule["IpRanges"]]


def user_data(ec2: Any, instance: str) -> dict[str, Any]:
    """What cloud-init would read on a node."""
    answer = ec2.describe_instance_attribute(InstanceId=instance, Attribute="userData")
    text = base64.b64decode(answer["UserData"]["Value"]).decode()
    assert text.startswith("#cloud-config\n")
    loaded = yaml.safe_load(text)
    assert isinstance(loaded, dict)
    return loaded


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout

"""What exists of a cluster, read from the tags in EC2: the only place where that is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, TypeVar

from icom import names
from icom.errors import IcomError
from icom.names import Address, InstanceId, Malformed, Role
from provisioning.aws import Aws, filters, pages

TAG_CLUSTER = "icom:cluster"
TAG_ROLE = "icom:role"
TAG_RUN = "icom:run"
TAG_CONTENT = "icom:content"
"""Of an image: the digest of the project that is installed in it."""
TAG_BASE = "icom:base"
"""Of an image and of a node: the image that it was made from, as the options named it."""
TAG_MASTER = "icom:master"
"""Of all that `icom provision --from_this_instance` makes: the id of that instance, which is not the cluster's own."""
TAG_ENDS = "icom:ends"
ENDS_FORMAT = "%Y-%m-%dT%H:%M:%SZ"  # ISO 8601, UTC
MASTER = Role("master")
BUILDER = Role("builder")
"""Role of the instance that becomes an image; it is no node of the cluster."""
UNKNOWN = Role("?")
"""Role of an instance that carries the cluster's tag, and a role that icom gives nobody. No writer takes it."""
RAW = "raw"
"""Role of an image, and of its snapshot, from which only a builder starts: it holds what its instance's disk held."""
ALIVE = ["pending", "running", "stopping", "stopped"]  # "shutting-down" and "terminated" do not come back

T = TypeVar("T")


@dataclass(frozen=True)
class Node:
    """One instance of a cluster."""

    id: InstanceId
    role: Role
    run: str
    state: str
    type: str
    image: str
    zone: str
    subnet: str
    vpc: str
    private_ip: Address | None
    public_ip: Address | None
    spot: bool
    since: datetime
    base: str = ""
    """What stands in its tag icom:base."""
    ends: datetime | None = None
    """When it shuts itself down (--max_hours); None for never."""
    key_name: str | None = None
    placement: str | None = None
    """Name of its placement group."""
    profile: str | None = None
    """Name of its instance profile."""
    efa: bool = False
    master: InstanceId | None = None
    """Id of the instance that made it and is its master (--from_this_instance)."""

    @property
    def label(self) -> str:
        """What messages call it."""
        return f"{self.role} ({self.id})"

    @property
    def address(self) -> Address | None:
        """Where ssh finds it, if EC2 tells. A master that is an instance too is let in from inside the VPC."""
        return self.private_ip if self.master else self.public_ip or self.private_ip


@dataclass(frozen=True)
class Cluster:
    """What carries a cluster's tag. Names of key pair and placement group are icom-NAME where they exist."""

    name: str
    nodes: tuple[Node, ...]
    builders: tuple[Node, ...]
    """Of images that were not finished."""
    group: dict[str, Any] | None
    """The security group, as DescribeSecurityGroups tells it."""
    key: dict[str, Any] | None
    """The key pair, as DescribeKeyPairs tells it, public half included."""
    placement: str | None
    master: str | None = None
    """Id of the instance that is its master without being its own (--from_this_instance)."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing at all."""
        return not (self.nodes or self.builders or self.group or self.key or self.placement)


def role_names(count: int) -> list[Role]:
    """master, worker-1, … of a cluster of `count` nodes."""
    return [MASTER, *(Role(f"worker-{i}") for i in range(1, count))][:count]


def resource_name(cluster: str) -> str:
    """Name of the cluster's security group, key pair and placement group."""
    return f"icom-{cluster}"


def tags_of(resource: dict[str, Any]) -> dict[str, str]:
    """Tags of a resource that EC2 described."""
    return {tag["Key"]: tag["Value"] for tag in resource.get("Tags", [])}


def find_cluster(aws: Aws, name: str, run: str | None = None) -> Cluster:
    """Read what carries the cluster's tag; with `run`, only what that call of `icom provision` made."""
    owned = filters(tag_cluster=name) + (filters(tag_run=run) if run else [])
    nodes = find_nodes(aws, owned)
    own = resource_name(name)  # others with the tag go with the cluster, but are nothing that it uses
    groups = pages(aws.ec2, "describe_security_groups", "SecurityGroups", Filters=owned)
    groups = [group for group in groups if group["GroupName"] == own]
    keys = aws.ec2.describe_key_pairs(Filters=owned, IncludePublicKey=True)["KeyPairs"]
    keys = [key for key in keys if key["KeyName"] == own]
    placements = aws.ec2.describe_placement_groups(Filters=owned)["PlacementGroups"]
    placements = [p for p in placements if p["State"] in ("pending", "available") and p["GroupName"] == own]
    masters = [_or_none(names.instance_id, tags_of(thing).get(TAG_MASTER)) for thing in (*groups, *keys, *placements)]
    masters += [node.master for node in nodes]
    return Cluster(
        name,
        tuple(node for node in nodes if node.role != BUILDER),
        tuple(node for node in nodes if node.role == BUILDER),
        groups[0] if groups else None,
        keys[0] if keys else None,
        placements[0]["GroupName"] if placements else None,
        next(filter(None, masters), None),
    )


def find_outside_master(aws: Aws, id: str) -> Node | None:
    """The instance that a cluster has as its master without owning it; None if it is gone."""
    return next((replace(node, role=MASTER) for node in find_nodes(aws, filters(instance_id=id))), None)


def check_roles(cluster: Cluster) -> None:
    """Refuse a cluster in which two live nodes have the same role, or one has none that icom gives.

    Raises:
        IcomError: with the command that mends it.
    """
    for node in cluster.nodes:
        if node.role == UNKNOWN:
            raise IcomError(
                f"{node.id} carries the tag of cluster {cluster.name}, but no role that icom gives a node (icom:role). "
                f"If it is not yours, take the tag away: aws ec2 delete-tags --resources {node.id} --tags "
                f"Key={TAG_CLUSTER}; icom teardown would end it with the rest"
            )
    for first, second in zip(cluster.nodes, cluster.nodes[1:], strict=False):
        if first.role == second.role:
            raise IcomError(
                f"Two nodes of {cluster.name} are its {first.role}: {first.id} and {second.id}. Two calls of icom "
                f"provision ran at once. End one: aws ec2 terminate-instances --instance-ids {second.id}"
            )


def find_nodes(aws: Aws, matching: list[dict[str, Any]], states: list[str] | None = None) -> list[Node]:
    """Instances that match the filters and are in one of the states (default: ALIVE), master first."""
    wanted = matching + filters(instance_state_name=states or ALIVE)
    reservations = pages(aws.ec2, "describe_instances", "Reservations", Filters=wanted)
    nodes = [_node(instance) for reservation in reservations for instance in reservation["Instances"]]
    return sorted(nodes, key=lambda node: (*_rank(node.role), node.since))


def _rank(role: str) -> tuple[int, str]:
    number = role.removeprefix("worker-")
    return (0 if role == MASTER else int(number) if number.isdecimal() else 10**9, role)


def _or_none(parse: Callable[[object], T], text: object) -> T | None:
    """What EC2 tells, parsed; what somebody has garbled counts as none: it must not keep icom from the node."""
    try:
        return parse(text)
    except Malformed:
        return None


def _node(instance: dict[str, Any]) -> Node:
    tags = tags_of(instance)
    return Node(
        id=names.instance_id(instance["InstanceId"]),
        role=_or_none(names.role, tags.get(TAG_ROLE)) or UNKNOWN,
        run=_or_none(names.run_tag, tags.get(TAG_RUN)) or "?",
        state=instance["State"]["Name"],
        type=instance["InstanceType"],
        image=instance["ImageId"],
        base=_or_none(names.base_image, tags.get(TAG_BASE)) or "",
        zone=instance["Placement"]["AvailabilityZone"],
        subnet=instance.get("SubnetId", ""),
        vpc=instance.get("VpcId", ""),
        private_ip=_or_none(names.address, instance.get("PrivateIpAddress")),
        public_ip=_or_none(names.address, instance.get("PublicIpAddress")),
        spot=instance.get("InstanceLifecycle") == "spot",
        since=instance["LaunchTime"],
        ends=_ends(tags.get(TAG_ENDS, "")),
        key_name=instance.get("KeyName"),
        placement=instance["Placement"].get("GroupName") or None,
        profile=instance.get("IamInstanceProfile", {}).get("Arn", "").rpartition("/")[2] or None,
        efa=any(card.get("InterfaceType") == "efa" for card in instance.get("NetworkInterfaces", [])),
        master=_or_none(names.instance_id, tags.get(TAG_MASTER)),
    )


def _ends(text: str) -> datetime | None:
    """The end that a tag tells; a garbled one counts as none."""
    try:
        return datetime.strptime(text, ENDS_FORMAT).replace(tzinfo=timezone.utc)
    except ValueError:
        return None

"""What `icom provision` is going to do: a pure function of the options, what exists and what the region offers."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from icom.errors import UsageError
from provisioning.cluster import (
    ALIVE,
    BUILDER,
    ENDS_FORMAT,
    MASTER,
    RAW,
    TAG_BASE,
    TAG_CLUSTER,
    TAG_CONTENT,
    TAG_ENDS,
    TAG_MASTER,
    TAG_ROLE,
    TAG_RUN,
    Cluster,
    Node,
    check_roles,
    resource_name,
    role_names,
)
from provisioning.config import ProvisionConfig, as_options

if TYPE_CHECKING:
    from provisioning.images import Image
    from provisioning.survey import Survey
    from provisioning.this_instance import ThisInstance

BUILDER_GB, BUILDER_GB_MORE = 30, 20
"""Disk of the instance that becomes an image: nodes' disks have to be as large."""
BUILDER_HOURS = 2
"""After which it ends itself if nobody did."""


@dataclass(frozen=True)
class Plan:
    """All that is to be made, and what is there already."""

    config: ProvisionConfig
    run: str
    """Tag of everything that this call makes."""
    roles: tuple[str, ...]
    """Nodes to launch."""
    there: tuple[Node, ...]
    found: Survey
    """What the region offers; with the image to bake from, if it says so."""
    image: Image
    """To start from."""
    make_group: bool
    make_key: bool
    make_placement: bool
    ends: datetime | None
    this_instance: ThisInstance | None = None
    """The instance that this runs on, where it is the master."""
    join: bool = False
    """Whether `this_instance` is still to get the cluster's security group."""

    @property
    def name(self) -> str:
        """Of the security group, the key pair and the placement group."""
        return resource_name(self.config.cluster)

    @property
    def key_name(self) -> str:
        """The EC2 key pair of new nodes."""
        return self.config.key_name or self.name

    def tags(self, kind: str, role: str | None = None) -> dict[str, Any]:
        """TagSpecification for a resource type; every resource gets its tags in the call that makes it."""
        tags = {"Name": f"{self.name}-{role}" if role else self.name, TAG_CLUSTER: self.config.cluster}
        tags |= {TAG_RUN: self.run} | ({TAG_ROLE: role} if role else {})
        tags |= {TAG_BASE: self.image.base} if role else {}
        tags |= {TAG_MASTER: self.this_instance.node.id} if self.this_instance else {}
        if self.ends and kind == "instance":
            tags[TAG_ENDS] = f"{self.ends:{ENDS_FORMAT}}"
        return {"ResourceType": kind, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}


def missing_roles(config: ProvisionConfig, cluster: Cluster) -> list[str]:
    """Which nodes are still to be launched.

    Raises:
        UsageError: the cluster has another shape than was asked for, or is not running.
        IcomError: two nodes have one role.
    """
    check_roles(cluster)
    wanted = role_names(config.count)
    if config.from_this_instance:
        wanted.remove(MASTER)
    remedy = f"Tear it down first (icom teardown{as_options(config)}) or choose another --cluster."
    for node in cluster.nodes:
        if node.role not in wanted:
            raise UsageError(
                f"Cluster {config.cluster} has {len(cluster.nodes)} nodes, among them {node.role}; --count "
                f"{config.count} would have to remove some. {remedy}"
            )
        for what, has, asked in _shape(config, node):
            if has != asked:
                raise UsageError(
                    f"{node.role} of cluster {config.cluster} has {what} {has}; asked for was {asked}. The nodes of a "
                    f"cluster are alike. {remedy}"
                )
        if config.ami and config.ami not in (node.image, node.base):
            raise UsageError(
                f"Cluster {config.cluster} was made from {node.base or node.image}, not {config.ami}. {remedy}"
            )
        if node.state in ("stopping", "stopped"):
            raise UsageError(
                f"Cluster {config.cluster} is stopped ({node.role} is {node.state}). Start it: icom start"
                f"{as_options(config)}"
            )
    there = {node.role for node in cluster.nodes}
    return [role for role in wanted if role not in there]


def _shape(config: ProvisionConfig, node: Node) -> list[tuple[str, str, str]]:
    """(option, what a node has of it, what is asked for) of all that EC2 tells of a node: not the size of its disk."""
    yes = {True: "yes", False: "no"}
    shape = [
        ("--instance_type", node.type, config.instance_type),
        ("--spot", yes[node.spot], yes[config.spot]),
        ("--efa", yes[node.efa], yes[config.efa]),
        ("--placement_group", yes[node.placement is not None], yes[config.placement_group]),
        ("--instance_profile", node.profile or "none", config.instance_profile or "none"),
        ("the key pair (--key_name)", str(node.key_name), config.key_name or resource_name(config.cluster)),
    ]
    if node.state == "running":  # before it runs it has no public address yet
        shape.append(("--private_ip", yes[node.public_ip is None], yes[config.private_ip]))
    return shape


def make_plan(
    config: ProvisionConfig,
    cluster: Cluster,
    found: Survey,
    key_here: bool,
    roles: Sequence[str] = (),
    there: tuple[Node, ...] = (),
    this_instance: ThisInstance | None = None,
) -> Plan:
    """Lay down what is to be made.

    Args:
        config: the checked options.
        cluster: what exists.
        found: what the region offers.
        key_here: whether the private half of the key pair that `cluster` tells is on this computer.
        roles: of the nodes to launch; none where only the image is made that they would start from.
        there: nodes that go on as they are.
        this_instance: the instance that this runs on, where it is to be the master.

    Raises:
        UsageError: the nodes that exist let in a key that is not here.
    """
    if cluster.key and cluster.nodes and not config.key_name and not key_here:
        raise UsageError(
            f"The key of cluster {config.cluster} is not on this computer: it was made on another one. Go on there, or "
            f"tear the cluster down: icom teardown{as_options(config)}"
        )
    now = datetime.now(timezone.utc).replace(microsecond=0)
    group = cluster.group["GroupId"] if cluster.group else None
    return Plan(
        config=config,
        run=f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}",
        roles=tuple(roles),
        there=there,
        found=found,
        image=found.image,
        make_group=cluster.group is None,
        make_key=not config.key_name and (cluster.key is None or not key_here),
        make_placement=config.placement_group and cluster.placement is None,
        ends=_end(config, cluster, now, growing=bool(roles)),
        this_instance=this_instance,
        join=this_instance is not None and group not in this_instance.groups,
    )


def _end(config: ProvisionConfig, cluster: Cluster, now: datetime, growing: bool) -> datetime | None:
    """When new nodes end: with those that are there, else after --max_hours.

    Raises:
        UsageError: new nodes would end and those that are there would not, or the end is over.
    """
    if not cluster.nodes:
        return now + timedelta(hours=config.max_hours) if config.max_hours else None
    end = min((node.ends for node in cluster.nodes if node.ends), default=None)
    if growing and end is None and config.max_hours:
        raise UsageError(
            f"The nodes of {config.cluster} were made without --max_hours and have no end; it could only end the new "
            "ones. Drop it, or tear the cluster down and make it again: icom teardown" + as_options(config)
        )
    if growing and end and end <= now:
        raise UsageError(
            f"The nodes of {config.cluster} end at {end:%Y-%m-%d %H:%M} UTC (--max_hours), which is over; new ones "
            f"would end at once. Tear it down first: icom teardown{as_options(config)}"
        )
    return end


def disk_sizes(plan: Plan) -> dict[str, int]:
    """Device name -> GB of every EBS disk of a node: the root as asked for, others as large as the image has them.

    All are named in the request, since what it does not name is made as the image says: not encrypted, or to stay when
    its instance ends. Instance stores are no EBS disks, and come as they are.
    """
    others = {disk["DeviceName"]: disk["Ebs"]["VolumeSize"] for disk in plan.image.disks if "Ebs" in disk}
    return others | {plan.image.root_device: plan.config.volume_gb}


def builder_plan(plan: Plan) -> Plan:
    """The plan of the one instance that becomes the nodes' image.

    It has no GPU, which are dear and hard to get, and needs none: what is installed for them comes with PyTorch. It
    ends itself, whatever happens here.
    """
    arm = plan.image.architecture == "arm64"
    config = replace(
        plan.config,
        instance_type=("m7g.2xlarge" if arm else "m7i.2xlarge") if plan.found.gpus else plan.config.instance_type,
        volume_gb=min(plan.config.volume_gb, max(BUILDER_GB, plan.image.root_gb + BUILDER_GB_MORE)),
        spot=False,
        placement_group=False,
        capacity_reservation=None,
        efa=False,
        instance_profile=None,
    )
    ends = datetime.now(timezone.utc) + timedelta(hours=BUILDER_HOURS)
    return replace(plan, config=config, roles=(BUILDER,), ends=ends)


def image_request(plan: Plan, builder: str) -> dict[str, Any]:
    """The CreateImage request for the nodes' image."""
    assert plan.found.content
    tags = {"Name": plan.name, TAG_CLUSTER: plan.config.cluster, TAG_RUN: plan.run}
    tags |= {TAG_CONTENT: plan.found.content, TAG_BASE: plan.image.base}
    described = [{"Key": key, "Value": value} for key, value in tags.items()]
    return {
        "InstanceId": builder,
        # Of all images of the account each has its own; by its beginning it is found where its tags are lost.
        "Name": f"{plan.name}/{plan.found.content[:12]}-{plan.run}",
        "Description": f"icom, installed and tested, on {plan.image.base}",
        "TagSpecifications": [{"ResourceType": kind, "Tags": described} for kind in ("image", "snapshot")],
    }


def raw_image_request(plan: Plan) -> dict[str, Any]:
    """The CreateImage request for the root disk of the instance that this runs on, which goes on running."""
    assert plan.this_instance
    kinds = ("image", "snapshot")
    return {
        "InstanceId": plan.this_instance.node.id,
        "Name": f"{plan.name}/raw-{plan.run}",
        "Description": "for minutes: what is on the disk of an instance, not cleaned",
        "NoReboot": True,
        # Its other disks are data, and the scrub leaves them alone.
        "BlockDeviceMappings": [{"DeviceName": name, "NoDevice": ""} for name in plan.this_instance.data_disks],
        "TagSpecifications": [plan.tags(kind, RAW) for kind in kinds],
    }


def launch_request(plan: Plan, role: str, subnet: str, group: str, user_data: str) -> dict[str, Any]:
    """The RunInstances request for one node.

    Each node has a request of its own, because each has its own host key in its user data, and its role among the tags
    that it is born with.
    """
    config = plan.config
    interface: dict[str, Any] = {
        "DeviceIndex": 0,
        "SubnetId": subnet,
        "Groups": [group],
        "AssociatePublicIpAddress": not config.private_ip,
        "DeleteOnTermination": True,
    }
    if config.efa:
        interface["InterfaceType"] = "efa"
    request: dict[str, Any] = {
        "ImageId": plan.image.id,
        "InstanceType": config.instance_type,
        "MinCount": 1,
        "MaxCount": 1,
        # Repeating a request whose answer was lost gives the same instance, not a second one.
        "ClientToken": f"{plan.run}-{role}-{subnet}"[:64],
        "KeyName": plan.key_name,
        "NetworkInterfaces": [interface],
        "BlockDeviceMappings": [
            {
                "DeviceName": name,
                "Ebs": {"VolumeSize": size, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True},
            }
            for name, size in disk_sizes(plan).items()
        ],
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1, "HttpEndpoint": "enabled"},
        "InstanceInitiatedShutdownBehavior": "terminate" if plan.ends else "stop",
        "UserData": user_data,
        "TagSpecifications": [plan.tags("instance", role), plan.tags("volume", role)],
    }
    if config.placement_group:
        request["Placement"] = {"GroupName": plan.name}
    if config.instance_profile:
        request["IamInstanceProfile"] = {"Name": config.instance_profile}
    if config.spot:
        options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        request["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": options}
        request["InstanceInitiatedShutdownBehavior"] = "terminate"  # a one-time spot instance cannot be stopped
    if config.capacity_reservation:
        target = {"CapacityReservationId": config.capacity_reservation}
        request["CapacityReservationSpecification"] = {"CapacityReservationTarget": target}
        if plan.found.reservation_block:
            request["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
    return request


def ingress_rules(plan: Plan, group: str) -> list[dict[str, Any]]:
    """What may reach the nodes: ssh from the caller, and everything from each other."""
    ssh = {"CidrIp": str(plan.found.ssh_from), "Description": "ssh from whoever called icom provision"}
    among = {"GroupId": group, "Description": "the nodes among themselves"}
    return [
        {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [ssh]},
        {"IpProtocol": "-1", "UserIdGroupPairs": [among]},
    ]


def is_complete(plan: Plan) -> bool:
    """Whether there is nothing to make (the rules of an existing security group aside)."""
    running = all(node.state == ALIVE[1] for node in plan.there)
    make = plan.roles or plan.found.bake or plan.make_group or plan.make_key or plan.make_placement or plan.join
    return running and not make

"""What a region offers for a cluster: type, zones and subnets, image, quotas, the caller's address. Only reads."""

from __future__ import annotations

import ipaddress
import re
import socket
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from icom.errors import IcomError, UsageError
from provisioning import project
from provisioning.aws import Aws, error_code, filters, pages
from provisioning.cluster import Cluster
from provisioning.config import ProvisionConfig, ssh_source
from provisioning.images import Image, baked_image, base_image, find_image
from provisioning.prices import Prices, look_up

if TYPE_CHECKING:
    from provisioning.this_instance import ThisInstance

STANDARD = ("L-1216C47A", "L-34B43A08")
QUOTAS = {
    **dict.fromkeys("acdhimrtz", STANDARD),
    "g": ("L-DB2E81BA", "L-3819A6DF"),
    "vt": ("L-DB2E81BA", "L-3819A6DF"),
    "p": ("L-417A185B", "L-7212CCBC"),
    "p5": ("L-417A185B", "L-C4BD4855"),
}
"""Family -> codes of the quotas of its vCPUs that run on demand and as spot instances."""


@dataclass(frozen=True)
class Subnet:
    """A place to start nodes in."""

    id: str
    zone: str
    vpc: str
    free_addresses: int


@dataclass(frozen=True)
class Survey:
    """What was found."""

    account: str
    region: str
    vcpus: int
    """Of one instance."""
    gpus: int
    image: Image
    bake: bool
    """Whether the nodes' image is to be made first, from `image`."""
    content: str | None
    """Of the image that the nodes start from, as its tag tells it; None where it is to hold nothing of icom."""
    subnets: tuple[Subnet, ...]
    """In the order to try; all of one VPC, with addresses free."""
    vpc: str
    ssh_from: ipaddress.IPv4Network
    reservation_block: bool
    """Whether --capacity_reservation is a capacity block, which is its own market."""
    quota: str
    """What is known of the quota, in words."""
    prices: Prices


def survey_cluster(
    aws: Aws, config: ProvisionConfig, cluster: Cluster, missing: int, this_instance: ThisInstance | None = None
) -> Survey:
    """Find out what `missing` more nodes need.

    Nodes of one cluster have one image: that of those which are there, else the one with this content, else the base.

    Args:
        aws: the connection.
        config: the options.
        cluster: what exists.
        missing: how many more nodes.
        this_instance: the master of which the workers' image is made, with --from_this_instance.

    Raises:
        UsageError: what was asked for is not there: type, zone, subnet, addresses, image, key, quota.
        IcomError: the caller's address cannot be found.
    """
    kind = _instance_type(aws, config)
    first = next(iter(cluster.nodes), None)
    image = find_image(aws, first.image, first.base) if first else None
    bake = False
    if image is None:
        image, bake = _image_to_start_from(aws, config, kind, this_instance)
    found = _survey(aws, config, cluster, kind, image, bake and missing > 0, missing)
    if this_instance and found.vpc != this_instance.node.vpc:
        where = f"{found.subnets[0].id} is in {found.vpc}, this instance in {this_instance.node.vpc}"
        raise UsageError(f"{where}: another --subnet.")
    return found


def survey_image(aws: Aws, config: ProvisionConfig, cluster: Cluster) -> Survey:
    """Find out what the instance needs that becomes the image for nodes of these options.

    Raises:
        UsageError, IcomError: as survey_cluster.
    """
    kind = _instance_type(aws, config)
    image, bake = _image_to_start_from(aws, config, kind, None)
    return _survey(aws, config, cluster, kind, image, bake, 0)


def _survey(
    aws: Aws, config: ProvisionConfig, cluster: Cluster, kind: dict[str, Any], image: Image, bake: bool, missing: int
) -> Survey:
    """What is left to find out, once the image is known, `missing` nodes and with `bake` the builder before them."""
    _check_image(config, kind, image)
    zones = _zones(aws, config.instance_type)
    block = False
    if config.capacity_reservation:
        zone, block = _reservation(aws, config, missing)
        zones = [zone]
    builders = 1 if bake else 0
    subnets = _subnets(aws, config, cluster, zones, max(missing, builders))
    if config.key_name:
        _check_key_name(aws, config.key_name)
    vcpus, gpus = kind["VCpuInfo"]["DefaultVCpus"], _gpus(kind)
    of_this_type = missing if gpus else max(missing, builders)  # a builder has no GPUs
    return Survey(
        account=aws.account,
        region=aws.region,
        vcpus=vcpus,
        gpus=gpus,
        image=image,
        bake=bake,
        content=_content(config, kind),
        subnets=tuple(subnets),
        vpc=subnets[0].vpc,
        ssh_from=ssh_source(config.ssh_from or _own_address(aws, config, subnets[0]), config.ssh_from_anywhere),
        reservation_block=block,
        quota=_quota(aws, config, vcpus * of_this_type),
        prices=look_up(aws, config.instance_type, config.spot),
    )


def _instance_type(aws: Aws, config: ProvisionConfig) -> dict[str, Any]:
    from botocore.exceptions import ClientError

    name = config.instance_type
    try:
        found = aws.ec2.describe_instance_types(InstanceTypes=[name])["InstanceTypes"]
    except ClientError as error:
        if error_code(error) != "InvalidInstanceType":
            raise
        found = []
    if not found:
        raise UsageError(
            f"{aws.region} has no instance type {name}. See: aws ec2 describe-instance-type-offerings "
            f"--region {aws.region} --filters Name=instance-type,Values='{name.split('.')[0]}.*'"
        )
    kind: dict[str, Any] = found[0]
    if config.efa and not kind["NetworkInfo"].get("EfaSupported"):
        raise UsageError(f"{name} has no Elastic Fabric Adapter: drop --efa or take another --instance_type.")
    strategies = kind.get("PlacementGroupInfo", {}).get("SupportedStrategies", [])
    if config.placement_group and "cluster" not in strategies:
        raise UsageError(f"{name} cannot be in a cluster placement group: drop --placement_group.")
    if config.spot and "spot" not in kind.get("SupportedUsageClasses", ["spot"]):
        raise UsageError(f"{name} is not offered as spot instance: drop --spot.")
    return kind


def _gpus(kind: dict[str, Any]) -> int:
    return sum(gpu.get("Count", 0) for gpu in kind.get("GpuInfo", {}).get("Gpus", []))


def _content(config: ProvisionConfig, kind: dict[str, Any]) -> str | None:
    """What an image for this type of instance has to hold: PyTorch comes with CUDA or without. None for nothing."""
    if not (config.bake and config.setup):
        return None
    return project.digest() + ("-gpu" if _gpus(kind) else "")


def _image_to_start_from(
    aws: Aws, config: ProvisionConfig, kind: dict[str, Any], this_instance: ThisInstance | None
) -> tuple[Image, bool]:
    """The image for a cluster's first nodes, and whether theirs is still to be baked from it.

    The base of an instance's workers is that instance.
    """
    content = _content(config, kind)
    if this_instance:
        image = this_instance.image
    else:
        image = base_image(aws, config, kind["ProcessorInfo"]["SupportedArchitectures"], _gpus(kind) > 0)
    if content is None or image.content == content:
        return image, False
    baked = baked_image(aws, content, image)
    return baked or image, baked is None


def _check_image(config: ProvisionConfig, kind: dict[str, Any], image: Image) -> None:
    architectures = kind["ProcessorInfo"]["SupportedArchitectures"]
    if image.architecture not in architectures:
        raise UsageError(
            f"Image {image.id} is for {image.architecture}, {config.instance_type} is {' or '.join(architectures)}. "
            "Give another --ami or --instance_type."
        )
    if image.root_gb > config.volume_gb:
        raise UsageError(
            f"Image {image.id} needs {image.root_gb} GB of disk: raise --volume_gb from {config.volume_gb}."
        )


def _zones(aws: Aws, instance_type: str) -> list[str]:
    """Zones of the region that offer the type."""
    offers = pages(
        aws.ec2,
        "describe_instance_type_offerings",
        "InstanceTypeOfferings",
        LocationType="availability-zone",
        Filters=filters(instance_type=instance_type),
    )
    return sorted(offer["Location"] for offer in offers)


def _reservation(aws: Aws, config: ProvisionConfig, missing: int) -> tuple[str, bool]:
    """Zone of the capacity reservation, and whether it is a capacity block."""
    from botocore.exceptions import ClientError

    id = config.capacity_reservation
    try:
        found = aws.ec2.describe_capacity_reservations(CapacityReservationIds=[id])["CapacityReservations"]
    except ClientError as error:
        if not error_code(error).startswith("InvalidCapacityReservationId"):
            raise
        found = []
    if not found:
        raise UsageError(f"There is no capacity reservation {id} in {aws.region}.")
    reservation = found[0]
    if reservation["State"] != "active":
        raise UsageError(f"Capacity reservation {id} is {reservation['State']}, not active.")
    if reservation["InstanceType"] != config.instance_type:
        raise UsageError(
            f"Capacity reservation {id} is for {reservation['InstanceType']}, not {config.instance_type}: "
            f"give --instance_type {reservation['InstanceType']}."
        )
    if reservation["AvailableInstanceCount"] < missing:
        raise UsageError(
            f"Capacity reservation {id} has room for {reservation['AvailableInstanceCount']} more instances; "
            f"{missing} are wanted. Lower --count."
        )
    return reservation["AvailabilityZone"], reservation.get("ReservationType") == "capacity-block"


def _subnets(aws: Aws, config: ProvisionConfig, cluster: Cluster, zones: list[str], missing: int) -> list[Subnet]:
    """Subnets to try, in order. A cluster stays in the subnet that it has."""
    from botocore.exceptions import ClientError

    there = cluster.nodes[0].subnet if cluster.nodes else None
    wanted = config.subnet or ([there] if there else [])
    if there and there not in wanted:
        raise UsageError(f"The nodes of {cluster.name} are in {there}; --subnet cannot move them. Drop it.")
    try:
        if wanted:
            found = aws.ec2.describe_subnets(SubnetIds=[there] if there else wanted)["Subnets"]
            found.sort(key=lambda subnet: wanted.index(subnet["SubnetId"]))
        else:
            found = pages(aws.ec2, "describe_subnets", "Subnets", Filters=filters(default_for_az="true"))
            found.sort(key=lambda subnet: subnet["AvailabilityZone"])
    except ClientError as error:
        if not error_code(error).startswith("InvalidSubnetI"):
            raise
        raise UsageError(f"No such subnet in {aws.region}: {error.response['Error']['Message']}") from error
    if not found:
        raise UsageError(f"{aws.region} has no default VPC with subnets: name one with --subnet.")
    subnets = [Subnet(s["SubnetId"], s["AvailabilityZone"], s["VpcId"], s["AvailableIpAddressCount"]) for s in found]
    vpcs = {subnet.vpc for subnet in subnets}
    if len(vpcs) > 1:
        raise UsageError(f"The subnets are in several VPCs ({', '.join(sorted(vpcs))}); a cluster lives in one.")
    if cluster.group and cluster.group["VpcId"] not in vpcs:
        raise UsageError(
            f"Subnet {subnets[0].id} is in {subnets[0].vpc}, but {cluster.name} has its security group "
            f"{cluster.group['GroupId']} in {cluster.group['VpcId']}. Choose a subnet there, or tear it down first."
        )
    fitting = [subnet for subnet in subnets if subnet.zone in zones]
    if not fitting:
        raise UsageError(
            f"{config.instance_type} is offered in {', '.join(zones) or 'no zone'}; the subnets are in "
            f"{', '.join(sorted({s.zone for s in subnets}))}. Choose another --subnet, type or region."
        )
    roomy = [subnet for subnet in fitting if subnet.free_addresses >= missing]
    if not roomy:
        most = max(fitting, key=lambda subnet: subnet.free_addresses)
        raise UsageError(
            f"{missing} addresses are needed in one subnet; the most that is free is {most.free_addresses} in "
            f"{most.id} ({most.zone}). Choose another --subnet or a smaller --count."
        )
    return roomy


def _check_key_name(aws: Aws, name: str) -> None:
    from botocore.exceptions import ClientError

    try:
        aws.ec2.describe_key_pairs(KeyNames=[name])
    except ClientError as error:
        if error_code(error) != "InvalidKeyPair.NotFound":
            raise
        raise UsageError(
            f"EC2 in {aws.region} has no key pair {name}. Drop --key_name (icom makes one) or import yours."
        ) from error


def _own_address(aws: Aws, config: ProvisionConfig, subnet: Subnet) -> str:
    """The caller's address as the nodes will see it.

    Raises:
        IcomError: it cannot be found; --ssh_from is the way out.
    """
    if config.private_ip:
        found = aws.ec2.describe_subnets(SubnetIds=[subnet.id])["Subnets"][0]["CidrBlock"]
        towards = str(ipaddress.IPv4Network(found)[1])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting UDP sends nothing
            try:
                probe.connect((towards, 22))
            except OSError as error:
                raise IcomError(f"No route to {subnet.id} ({found}): {error.strerror}. Give --ssh_from.") from error
            return str(probe.getsockname()[0])
    try:
        with urllib.request.urlopen(config.address_url, timeout=10) as answer:
            text = answer.read(100).decode("ascii", "replace").strip()
        address = ipaddress.IPv4Address(text)  # one address: what a stranger answers opens no network
        if not address.is_global:
            raise ValueError(f"it answers {address}, which is no public address")
        return str(address)
    except (OSError, urllib.error.URLError, ValueError) as error:
        raise IcomError(
            f"Your public address could not be found at {config.address_url} ({error}). Give it: --ssh_from A.B.C.D/32"
        ) from error


def _quota(aws: Aws, config: ProvisionConfig, wanted: int) -> str:
    """Compare `wanted` more vCPUs with what the account may run.

    Raises:
        UsageError: they are too many.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    code = _quota_code(config.instance_type, config.spot)
    if code is None or config.capacity_reservation or not wanted:
        return "not checked"
    try:
        limit = aws.quotas.get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"]
    except (BotoCoreError, ClientError) as error:
        return f"not known ({error_code(error) or type(error).__name__})"
    running = pages(
        aws.ec2, "describe_instances", "Reservations", Filters=filters(instance_state_name=["pending", "running"])
    )
    used = 0
    for instance in (i for reservation in running for i in reservation["Instances"]):
        same_market = (instance.get("InstanceLifecycle") == "spot") == config.spot
        if same_market and _quota_code(instance["InstanceType"], config.spot) == code:
            cpu = instance.get("CpuOptions", {})
            used += cpu.get("CoreCount", 0) * cpu.get("ThreadsPerCore", 0)
    if used + wanted > limit:
        raise UsageError(
            f"Over the account's quota {code}: {wanted} more vCPUs, {used} in use, {limit:.0f} allowed. Lower --count, "
            "take a smaller --instance_type, or ask for more: Service Quotas in the AWS console."
        )
    return f"{used} + {wanted} of {limit:.0f} vCPUs"


def _quota_code(instance_type: str, spot: bool) -> str | None:
    """The code in QUOTAS for a type; None for families with quotas of their own."""
    series = instance_type.split(".", maxsplit=1)[0]
    letters = re.match(r"[a-z]*", series)
    codes = QUOTAS.get(series[:2]) or QUOTAS.get(letters.group() if letters else "")
    if codes is None:
        return None
    on_demand, as_spot = codes
    return as_spot if spot else on_demand

"""`icom provision --from_this_instance`: the EC2 instance that this runs on, as the master of a cluster.

It does not belong to that cluster. Nothing ends, stops or tags it: what icom ends is found by tags, and it gets none.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import subprocess
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path

from icom.errors import UsageError
from provisioning.aws import Aws, filters, pages
from provisioning.cluster import TAG_CLUSTER, Cluster, Node, find_outside_master, tags_of
from provisioning.config import ProvisionConfig
from provisioning.images import Image
from provisioning.install import FOLDER
from provisioning.project import ROOT

METADATA = "http://169.254.169.254"
METADATA_SECONDS = 2
TOKEN_SECONDS = 60
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class IdentityDocument:
    """What the instance metadata service says."""

    id: str
    region: str


@dataclass(frozen=True)
class ThisInstance:
    """The instance that this runs on."""

    node: Node
    """It, as master."""
    image: Image
    """Its root disk as an image that is still to be made; its base is the instance's id."""
    data_disks: tuple[str, ...]
    """Device names of its other EBS disks."""
    interface: str
    """Id of its first network interface."""
    groups: tuple[str, ...]
    """Ids of that interface's security groups."""


def identify(config: ProvisionConfig) -> IdentityDocument:
    """The instance that this runs on, fit to be a master: icom is where nodes have it, with an mpirun.

    Raises:
        UsageError: this is no EC2 instance, or not in --region; icom is elsewhere.
        IcomError: there is no mpirun.
    """
    from icom.launch.mpi import find_mpi

    own = _identity()
    if config.region not in (None, own.region):
        raise UsageError(f"This instance is in {own.region}, not in {config.region}: drop --region.")
    place = Path.home() / FOLDER
    if place.is_symlink() or place.resolve() != ROOT.resolve():  # mpirun wants its programs at the same path everywhere
        real = ROOT.resolve()
        free = f"rm {place} && " if place.is_symlink() else f"mv {place} {place}.other && " if place.exists() else ""
        raise UsageError(
            f"All nodes have icom in the folder {place}, and this one runs it from {real}. Move it: {free}mv {real} "
            f"{place} && make -C {place} setup-master EXTRAS=mpi,aws"
        )
    find_mpi("auto")
    _check_own_key(Path.home() / ".ssh/id_ed25519")
    return own


def _check_own_key(path: Path) -> None:
    """The workers let in this user's key if there is one, and mpirun logs in with it where nobody can type.

    Raises:
        UsageError: it has a passphrase.
    """
    if path.exists():
        words = ["ssh-keygen", "-y", "-P", "", "-f", str(path)]
        if subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode:
            raise UsageError(
                f"The key {path} cannot be used without a passphrase, and mpirun has to log in to the workers with it. "
                f"Move it away, or take the passphrase off: ssh-keygen -p -N '' -f {path}"
            )


def _identity() -> IdentityDocument:
    endpoint = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or METADATA
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this very machine

    def ask(path: str, method: str, header: str, value: str) -> str:
        request = urllib.request.Request(f"{endpoint.rstrip('/')}/latest/{path}", method=method)
        request.add_header(f"X-aws-ec2-metadata-{header}", value)
        with opener.open(request, timeout=METADATA_SECONDS) as answer:
            return str(answer.read(10_000).decode())

    try:
        token = ask("api/token", "PUT", "token-ttl-seconds", str(TOKEN_SECONDS))
        document = json.loads(ask("dynamic/instance-identity/document", "GET", "token", token))
        found = IdentityDocument(document["instanceId"], document["region"])
        if not re.fullmatch(r"i-[0-9a-f]+", found.id):
            raise ValueError(f"it calls itself {found.id}")
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--from_this_instance: this is no EC2 instance ({endpoint} does not say which: {error}). Elsewhere leave "
            "it away: icom provision launches the master too."
        ) from error


def master_here(
    aws: Aws, config: ProvisionConfig, cluster: Cluster, document: IdentityDocument
) -> tuple[ProvisionConfig, ThisInstance]:
    """The options as they follow from the instance that this runs on, and that instance.

    Raises:
        UsageError: this instance cannot be a master.
    """
    this_instance = _look_around(aws, document.id)
    return replace(_as_this_instance(config, cluster, this_instance), region=aws.region), this_instance


def check_master(cluster: Cluster, instance: str | None) -> None:
    """Refuse to go on with a cluster that has another master than `instance`, or, for None, than its own.

    Raises:
        UsageError: it has.
    """
    if cluster.empty or cluster.master == instance:
        return
    how = f"from {cluster.master} with --from_this_instance" if cluster.master else "without --from_this_instance"
    raise UsageError(
        f"Cluster {cluster.name} was made {how}. Go on that way, choose another --cluster, or tear it down: icom "
        f"teardown --cluster {cluster.name}"
    )


def _look_around(aws: Aws, id: str) -> ThisInstance:
    """What EC2 knows of the instance that this runs on."""
    found = pages(aws.ec2, "describe_instances", "Reservations", Filters=filters(instance_id=id))
    node = find_outside_master(aws, id)
    if node is None or not found:
        raise UsageError(f"Account {aws.account} has no instance {id} in {aws.region}: credentials of another account?")
    (instance,) = found[0]["Instances"]
    if TAG_CLUSTER in tags_of(instance):
        cluster = tags_of(instance)[TAG_CLUSTER]
        raise UsageError(
            f"This instance belongs to the cluster {cluster} itself, and icom teardown would end it. Grow that one: "
            f"icom provision --cluster {cluster} --region {aws.region}, where it was made."
        )
    root = instance["RootDeviceName"]
    disks = {disk["DeviceName"]: disk["Ebs"]["VolumeId"] for disk in instance["BlockDeviceMappings"] if "Ebs" in disk}
    if root not in disks:
        raise UsageError(f"The root disk of this instance ({root}) is no EBS volume: no image can be made of it.")
    (volume,) = aws.ec2.describe_volumes(VolumeIds=[disks[root]])["Volumes"]
    image = Image(
        id=node.image,
        base=id,
        architecture=instance["Architecture"],
        root_device=root,
        state="not made",
        disks=({"DeviceName": root, "Ebs": {"VolumeSize": volume["Size"]}},),
    )
    first = min(instance["NetworkInterfaces"], key=lambda card: card["Attachment"]["DeviceIndex"])
    groups = tuple(group["GroupId"] for group in first["Groups"])
    data = tuple(sorted(set(disks) - {root}))
    return ThisInstance(node, image, data, first["NetworkInterfaceId"], groups)


def _as_this_instance(config: ProvisionConfig, cluster: Cluster, this_instance: ThisInstance) -> ProvisionConfig:
    """The options, with what follows from this instance: workers are like it, in its subnet, and let it alone in."""
    return replace(
        config,
        instance_type=this_instance.node.type,
        ssh_user=getpass.getuser(),
        subnet=config.subnet or ([] if cluster.nodes else [this_instance.node.subnet]),
        private_ip=config.private_ip or this_instance.node.public_ip is None,
        ssh_from=config.ssh_from or f"{this_instance.node.private_ip}/32",
    )

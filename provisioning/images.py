"""Machine images: the base image of AWS, those that icom has baked, and making one from an instance."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from icom.errors import IcomError, UsageError
from provisioning.aws import FIRST_POLL_SECONDS, POLL_SECONDS, Aws, error_code, filters
from provisioning.cluster import TAG_BASE, TAG_CONTENT, tags_of
from provisioning.config import ProvisionConfig

# Public parameters of AWS and Canonical that name their current images.
UBUNTU = "/aws/service/canonical/ubuntu/server/24.04/stable/current/{arch}/hvm/ebs-gp3/ami-id"
DEEP_LEARNING = "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
UNLISTED_SECONDS = 120
DEBIAN_ARCH = {"x86_64": "amd64", "arm64": "arm64"}


@dataclass(frozen=True)
class Image:
    """A machine image."""

    id: str
    base: str
    """What it was made from: an image id, or the parameter that names AWS's current one. A base image names itself."""
    architecture: str
    root_device: str
    state: str
    """available, pending, …"""
    content: str | None = None
    """Digest of the project that is installed in it."""
    disks: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    """Its block device mappings, as DescribeImages tells them."""

    @property
    def root_gb(self) -> int:
        """Size of its root disk; an instance's has to be as large."""
        root = [disk for disk in self.disks if disk["DeviceName"] == self.root_device and "Ebs" in disk]
        return int(root[0]["Ebs"]["VolumeSize"]) if root else 0


def find_image(aws: Aws, id: str, base: str) -> Image | None:
    """An image by its id; None if there is none, or none for us."""
    from botocore.exceptions import ClientError

    try:
        found = aws.ec2.describe_images(ImageIds=[id])["Images"]
    except ClientError as error:
        if not error_code(error).startswith("InvalidAMIID"):
            raise
        return None
    return _image(found[0], base) if found else None


def base_image(aws: Aws, config: ProvisionConfig, architectures: list[str], gpu: bool) -> Image:
    """--ami, else AWS's current image for the type.

    Raises:
        UsageError: there is none.
    """
    from botocore.exceptions import ClientError

    name = id = config.ami or ""
    if not config.ami:
        arch = "arm64" if "arm64" in architectures else "x86_64"
        name = DEEP_LEARNING.format(arch=arch) if gpu else UBUNTU.format(arch=DEBIAN_ARCH[arch])
        try:
            id = str(aws.ssm.get_parameter(Name=name)["Parameter"]["Value"])
        except ClientError as error:
            if error_code(error) != "ParameterNotFound":
                raise
            raise UsageError(f"{aws.region} has no image {name}. Give one with --ami.") from error
    image = find_image(aws, id, name)
    if image is None or image.state != "available":
        raise UsageError(f"There is no image {id} in {aws.region}, or it is not available to you. Give another --ami.")
    return image


def baked_image(aws: Aws, content: str, base: Image) -> Image | None:
    """The newest image of this account with this content on this base; one that is still being made counts."""
    matching = filters(tag_content=content, tag_base=base.base, architecture=base.architecture)
    found = aws.ec2.describe_images(Owners=["self"], Filters=matching)["Images"]
    usable = [image for image in found if image["State"] in ("available", "pending")]
    usable.sort(key=lambda image: (image["State"] == "available", image.get("CreationDate", "")))
    return _image(usable[-1], base.base) if usable else None


def wait_for_image(aws: Aws, id: str, minutes: float) -> Image:
    """Wait until an image can be started from.

    Raises:
        IcomError: EC2 could not make it (with its reason), or the time is over.
    """
    deadline, pause = time.monotonic() + minutes * 60, FIRST_POLL_SECONDS
    unlisted = time.monotonic() + UNLISTED_SECONDS
    while True:
        # By a filter: an id that EC2 does not know yet is no error then.
        found = aws.ec2.describe_images(Owners=["self"], Filters=filters(image_id=id))["Images"]
        if found:
            unlisted = time.monotonic() + UNLISTED_SECONDS
        state = found[0]["State"] if found else "not listed yet"
        if state == "available":
            return _image(found[0], id)
        if not found and time.monotonic() >= unlisted:
            raise IcomError(f"EC2 does not list the image {id}: it was deregistered, or never came to be.")
        if state not in ("pending", "not listed yet"):
            reason = found[0].get("StateReason", {}).get("Message", "")
            raise IcomError(f"EC2 could not make the image {id}: it is {state}. {reason}")
        if time.monotonic() >= deadline:
            raise IcomError(f"The image {id} is {state} after {minutes:g} minutes.")
        time.sleep(pause)
        pause = min(2 * pause, POLL_SECONDS)


def _image(described: dict[str, Any], base: str) -> Image:
    tags = tags_of(described)
    return Image(
        id=described["ImageId"],
        base=tags.get(TAG_BASE, base),
        architecture=described["Architecture"],
        root_device=described["RootDeviceName"],
        state=described["State"],
        content=tags.get(TAG_CONTENT),
        disks=tuple(described.get("BlockDeviceMappings", [])),
    )

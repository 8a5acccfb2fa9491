"""Bake the image that nodes start from: an instance of its own is set up, tested, scrubbed, stopped and imaged.

Never a node's disk: that has keys, pictures and tokens on it. The instance is ended afterwards.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from provisioning.aws import Aws, filters, wait_for
from provisioning.bootstrap import BOOT_SECONDS
from provisioning.cluster import Node
from provisioning.ec2 import unless_made
from provisioning.images import Image, wait_for_image
from provisioning.install import install
from provisioning.launches import launch_somewhere, with_addresses
from provisioning.plan import Plan, builder_plan, image_request, raw_image_request
from provisioning.rollback import Call
from provisioning.script import script
from provisioning.ssh import patient_connect
from provisioning.teardown import delete_if_there, end_nodes

IMAGE_MINUTES = 60
"""How long EC2 may take to copy the disk."""
SCRUB = Path(__file__).with_name("scrub.py")
"""Runs on the instance alone."""
_SCRUB = ".icom-scrub.py"


def bake_image(call: Call, source: Image, group: str, client_key: str | None) -> Image:
    """Make the nodes' image.

    Args:
        call: whose plan has the tag that the image gets.
        source: what to start from.
        group: id of the security group.
        client_key: public key that the instance lets in besides the EC2 key pair's; None for none.

    Returns:
        The image, ready to start from.

    Raises:
        IcomError, botocore's errors: `rollback` removes what carries the tag of the plan's run.
    """
    aws, progress, minutes = call.aws, call.progress, call.plan.config.wait_minutes
    plan = replace(call.plan, image=source)
    with progress.doing("builder", "starting"):
        launch = builder_plan(plan)
        (id,) = launch_somewhere(aws, launch, group, client_key, call.login.folder, call.launches, progress.say)
        wait_for(aws, "running", [id], minutes)
        (builder,) = with_addresses(aws, plan, filters(instance_id=id), 1)
    _bootstrap_builder(call, builder)
    with progress.doing("builder", "stopping"):
        aws.ec2.stop_instances(InstanceIds=[id])
        wait_for(aws, "stopped", [id], minutes)
    with progress.doing("builder", "EC2 makes an image of its disk"):
        image = _image(aws, plan, image_request(plan, id))
    with progress.doing("builder", "ending"):
        end_nodes(aws, [id], minutes)
        call.launches.ids.clear()
    progress.say(f"image {image.id}, with icom in it")
    return image


def _bootstrap_builder(call: Call, builder: Node) -> None:
    progress = call.progress
    with progress.doing("builder", "booting"):
        node = patient_connect(call.login, builder, call.plan.config.wait_minutes, call.launches.check)
    with node:
        with progress.doing("builder", "finishing its boot"):
            node.run(script("wait_for_boot"), seconds=BOOT_SECONDS)
        install(node, builder.role, call.plan.found.gpus, progress)
        with progress.doing("builder", "scrubbing keys, tokens, histories and logs"):
            node.send({_SCRUB: SCRUB})
            node.run(script("scrub", _SCRUB, builder.id, as_root=True))


def image_this_instance(call: Call) -> Image:
    """Make an image of the running instance that this runs on, for a builder to start from.

    It holds all that the user has on this disk: the caller removes it as soon as the nodes' image is made.

    Raises:
        IcomError, botocore's errors: as bake_image.
    """
    with call.progress.doing("master", "EC2 makes an image of this instance's disk, which goes on running"):
        os.sync()  # EC2 copies what is on the disk
        return _image(call.aws, call.plan, raw_image_request(call.plan))


def _image(aws: Aws, plan: Plan, request: dict[str, Any]) -> Image:
    made = unless_made(
        lambda: aws.ec2.create_image(**request),
        "InvalidAMIName.Duplicate",
        lambda: _by_name(aws, request["Name"]),
        plan,
        lambda made: _forget(aws, made),
    )
    return wait_for_image(aws, made["ImageId"], IMAGE_MINUTES)


def _forget(aws: Aws, image: dict[str, Any]) -> None:
    """Remove an image and its snapshots."""
    delete_if_there(lambda: aws.ec2.deregister_image(ImageId=image["ImageId"]))
    for disk in image.get("BlockDeviceMappings", []):
        if snapshot := disk.get("Ebs", {}).get("SnapshotId"):
            delete_if_there(lambda id=snapshot: aws.ec2.delete_snapshot(SnapshotId=id))  # type: ignore[misc]


def _by_name(aws: Aws, name: str) -> dict[str, Any] | None:
    return next(iter(aws.ec2.describe_images(Owners=["self"], Filters=filters(name=name))["Images"]), None)

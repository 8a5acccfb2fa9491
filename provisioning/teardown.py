"""Remove a cluster, or what one call made of it, and prove by the tags that nothing is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from icom.errors import IcomError, UsageError
from provisioning.aws import POLL_SECONDS, Aws, connect, error_code, explained, filters, pages, wait_for, when_visible
from provisioning.cluster import TAG_CLUSTER, TAG_RUN, Cluster, find_cluster
from provisioning.config import TeardownConfig, check_cluster_name
from provisioning.hostkeys import folder_of

GONE = (
    *("InvalidInstanceID.NotFound", "InvalidGroup.NotFound", "InvalidKeyPair.NotFound", "InvalidVolume.NotFound"),
    *("InvalidPlacementGroup.Unknown", "InvalidAMIID.NotFound", "InvalidAMIID.Unavailable", "InvalidSnapshot.NotFound"),
)
IN_USE = ("DependencyViolation", "InvalidPlacementGroup.InUse", "VolumeInUse", "InvalidSnapshot.InUse")
IMAGES = ("image", "snapshot")
"""Kinds that outlive a cluster unless --all_images is given."""


def teardown(config: TeardownConfig) -> None:
    """`icom teardown`.

    Raises:
        IcomError: something is left.
    """
    check_cluster_name(config.cluster)
    with explained():
        aws = connect(config.region, config.profile)
        left = left_over(aws, config.cluster)
        doomed = [item for item in left if config.all_images or item[0] not in IMAGES]
        if not doomed:
            print(f"There is no cluster {config.cluster} in {aws.region}: nothing to remove.")
        else:
            for kind, id in doomed:
                print(f"- {kind} {id}")
            if not config.yes:
                confirm(f"Remove these {len(doomed)}?")
            remove(aws, config.cluster, config.wait_minutes, print, images=config.all_images)
            left = settle(aws, config.cluster, images=config.all_images)
        _report(aws, config, left)
    folder_of(aws.region, config.cluster).remove()


def confirm(question: str) -> None:
    """Go on only after a typed yes.

    Raises:
        UsageError: nobody can be asked.
        IcomError: the answer is not yes.
    """
    if not sys.stdin.isatty():
        raise UsageError("Nobody can be asked here: add --yes.")
    try:
        answer = input(f"{question} Type yes: ")
    except EOFError:
        answer = ""
    if answer.strip().lower() != "yes":
        raise IcomError("Nothing was done.")


def _report(aws: Aws, config: TeardownConfig, left: list[tuple[str, str]]) -> None:
    kept = [item for item in left if item[0] in IMAGES and not config.all_images]
    stuck = [item for item in left if item not in kept]
    if stuck:
        names = "\n  ".join(f"{kind} {id}" for kind, id in stuck)
        raise IcomError(
            f"Left of {config.cluster} in {aws.region}:\n  {names}\nAgain in some minutes: icom teardown --cluster "
            f"{config.cluster}"
        )
    print(
        f"Nothing is left of {config.cluster} in {aws.region}" + (", but its images (--all_images):" if kept else ".")
    )
    for kind, id in kept:
        print(f"  {kind} {id}")


def remove(
    aws: Aws,
    name: str,
    wait_minutes: float,
    say: Callable[[str], None],
    run: str | None = None,
    images: bool = False,
) -> None:
    """Remove all that carries the cluster's tag, or, with `run`, what that call of `icom provision` made.

    Images stay unless `images`. What is gone already is no error.
    """
    cluster = find_cluster(aws, name, run)
    ids = [node.id for node in cluster.nodes]
    if ids:
        say(f"ending {', '.join(f'{node.role} ({node.id})' for node in cluster.nodes)}")
    end_nodes(aws, ids, wait_minutes)
    _remove_names(aws, cluster)
    mine = filters(tag_cluster=name) + (filters(tag_run=run) if run else [])
    for volume in pages(aws.ec2, "describe_volumes", "Volumes", Filters=mine):
        gone(lambda volume=volume: aws.ec2.delete_volume(VolumeId=volume["VolumeId"]))  # type: ignore[misc]
    if images:
        _remove_images(aws, mine)


def _remove_names(aws: Aws, cluster: Cluster) -> None:
    if cluster.group:
        id = cluster.group["GroupId"]
        gone(lambda: aws.ec2.delete_security_group(GroupId=id))
    if cluster.key:
        key = cluster.key["KeyName"]
        gone(lambda: aws.ec2.delete_key_pair(KeyName=key))
    if cluster.placement:
        gone(lambda: aws.ec2.delete_placement_group(GroupName=cluster.placement))


def _remove_images(aws: Aws, mine: list[dict[str, Any]]) -> None:
    for image in pages(aws.ec2, "describe_images", "Images", Owners=["self"], Filters=mine):
        gone(lambda image=image: aws.ec2.deregister_image(ImageId=image["ImageId"]))  # type: ignore[misc]
    for snapshot in pages(aws.ec2, "describe_snapshots", "Snapshots", OwnerIds=["self"], Filters=mine):
        gone(lambda snapshot=snapshot: aws.ec2.delete_snapshot(SnapshotId=snapshot["SnapshotId"]))  # type: ignore[misc]


def end_nodes(aws: Aws, ids: list[str], wait_minutes: float) -> None:
    """Terminate instances and wait until they are.

    Raises:
        IcomError: they are not, in time.
    """
    from botocore.exceptions import ClientError

    if not ids:
        return
    try:
        when_visible(lambda: aws.ec2.terminate_instances(InstanceIds=ids), ("InvalidInstanceID.NotFound",))
    except ClientError as error:
        if error_code(error) not in GONE:
            raise
        for id in ids:  # one that is gone for good must not save the others
            gone(lambda id=id: aws.ec2.terminate_instances(InstanceIds=[id]))  # type: ignore[misc]
    wait_for(aws, "instance_terminated", ids, wait_minutes)


def gone(delete: Callable[[], Any], tries: int = 24) -> None:
    """Delete a thing; wait (two minutes) while others still hold it. That it is gone already is fine."""
    from botocore.exceptions import ClientError

    for attempt in range(tries):
        try:
            delete()
            return
        except ClientError as error:
            if error_code(error) in GONE:
                return
            if error_code(error) not in IN_USE or attempt == tries - 1:
                raise
        time.sleep(POLL_SECONDS)


def left_over(aws: Aws, name: str, run: str | None = None) -> list[tuple[str, str]]:
    """(kind, id) of all in EC2 that carries the cluster's tag, and with `run` that run's; ended instances excepted."""
    tagged = pages(aws.ec2, "describe_tags", "Tags", Filters=filters(key=TAG_CLUSTER, value=name))
    found = {(tag["ResourceType"], tag["ResourceId"]) for tag in tagged}
    if run:
        made = pages(aws.ec2, "describe_tags", "Tags", Filters=filters(key=TAG_RUN, value=run))
        found &= {(tag["ResourceType"], tag["ResourceId"]) for tag in made}
    ended = filters(tag_cluster=name) + filters(instance_state_name=["shutting-down", "terminated"])
    reservations = pages(aws.ec2, "describe_instances", "Reservations", Filters=ended)
    ghosts = {("instance", i["InstanceId"]) for reservation in reservations for i in reservation["Instances"]}
    return sorted(found - ghosts)


def settle(aws: Aws, name: str, run: str | None = None, images: bool = False, tries: int = 6) -> list[tuple[str, str]]:
    """What is left, asked several times: tags of things that were deleted stay visible for some seconds."""
    left = left_over(aws, name, run)
    for _ in range(tries):
        if not [item for item in left if images or item[0] not in IMAGES]:
            break
        time.sleep(POLL_SECONDS)
        left = left_over(aws, name, run)
    return left

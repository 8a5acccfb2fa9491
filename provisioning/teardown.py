"""Remove a cluster, or what one call made of it, and prove by the tags that nothing is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple, TypeVar

from icom.errors import IcomError, UsageError
from provisioning.aws import POLL_SECONDS, Aws, connect, error_code, explained, filters, pages, wait_for, when_visible
from provisioning.cluster import RAW, TAG_CLUSTER, TAG_MASTER, TAG_ROLE, TAG_RUN, find_nodes, tags_of
from provisioning.config import TeardownConfig, as_options
from provisioning.folder import folder_of, places_of
from provisioning.sshinclude import remove_include_if_unused
from provisioning.strays import Stray, find_strays, in_words

GONE = (
    *("InvalidInstanceID.NotFound", "InvalidGroup.NotFound", "InvalidKeyPair.NotFound", "InvalidVolume.NotFound"),
    *("InvalidPlacementGroup.Unknown", "InvalidAMIID.NotFound", "InvalidAMIID.Unavailable", "InvalidSnapshot.NotFound"),
)
IN_USE = ("DependencyViolation", "InvalidPlacementGroup.InUse", "VolumeInUse", "InvalidSnapshot.InUse")
IMAGES = ("image", "snapshot")
"""Kinds that outlive a cluster unless --all_images is given; raw ones never do."""
LOOK_AGAIN_TRIES, LOOK_AGAIN_SECONDS, LOOK_AGAIN_EMPTY = 12, 3, 3

T = TypeVar("T")


class ResourceKind(NamedTuple):
    """How things of a kind are found and deleted."""

    name: str
    """As EC2's tags call it."""
    describe: str
    key: str
    id: str
    delete: str
    owner: str = ""
    """Parameter that restricts the search to the account's own, where others' are found too."""


KINDS = (
    ResourceKind("volume", "describe_volumes", "Volumes", "VolumeId", "delete_volume"),
    ResourceKind("security-group", "describe_security_groups", "SecurityGroups", "GroupId", "delete_security_group"),
    # Not by its name: somebody may have given that to another key meanwhile.
    ResourceKind("key-pair", "describe_key_pairs", "KeyPairs", "KeyPairId", "delete_key_pair"),
    ResourceKind(
        "placement-group", "describe_placement_groups", "PlacementGroups", "GroupName", "delete_placement_group"
    ),
    ResourceKind("image", "describe_images", "Images", "ImageId", "deregister_image", "Owners"),
    ResourceKind("snapshot", "describe_snapshots", "Snapshots", "SnapshotId", "delete_snapshot", "OwnerIds"),
)
"""What a cluster can have besides instances, in the order to delete it."""


def teardown(config: TeardownConfig) -> None:
    """`icom teardown`.

    Raises:
        IcomError: something is left.
    """
    with explained():
        aws = connect(config.region, config.profile)
        folder = folder_of(aws.account, aws.region, config.cluster)  # of this account's cluster, not of its namesakes
        errors: list[str] = []
        left = left_over(aws, config.cluster)
        doomed = [item for item in left if config.all_images or item[0] not in IMAGES]
        if doomed:
            for kind, id in doomed:
                print(f"- {kind} {id}")
            if not config.yes:
                confirm(f"Remove these {len(doomed)}?")
            shown = instances(left)  # by their tags: DescribeInstances may lag behind
            errors = remove(aws, config.cluster, config.wait_minutes, print, images=config.all_images, launched=shown)
            try:
                with explained():
                    left = wait_until_gone(aws, config.cluster, images=config.all_images)
            except IcomError as error:  # the list from before stands then
                errors.append(str(error))
        strays = find_strays(aws, config.cluster)
        if doomed:
            _report(aws, config, left, errors, strays)
        elif strays:
            raise IcomError(f"{in_words(strays, config.cluster)}\nThen again: icom teardown{as_options(config)}")
        else:
            _look_elsewhere(aws, config)
            print(f"There is no cluster {config.cluster} in {aws.region}, account {aws.account}: nothing to remove.")
    folder.remove()
    remove_include_if_unused()


def _look_elsewhere(aws: Aws, config: TeardownConfig) -> None:
    """Refuse to say that nothing is left of a cluster that this computer made in another place.

    Raises:
        UsageError: there is one.
    """
    places = places_of(config.cluster)
    if places and (aws.account, aws.region) not in places:
        account, region = places[0]
        raise UsageError(
            f"There is no cluster {config.cluster} in {aws.region}, account {aws.account}, but this computer made one "
            f"in {region}, account {account}. With that account's credentials: icom teardown --cluster "
            f"{config.cluster} --region {region}"
        )


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


def _report(
    aws: Aws, config: TeardownConfig, left: list[tuple[str, str]], errors: list[str], strays: list[Stray]
) -> None:
    kept = [item for item in left if item[0] in IMAGES and not config.all_images]
    stuck = [item for item in left if item not in kept]
    if stuck or errors or strays:
        names = "".join(f"\n  {kind} {id}" for kind, id in stuck) or " nothing that its tag shows."
        reasons = "".join(f"\n  {error}" for error in errors)
        raise IcomError(
            f"Left of {config.cluster} in {aws.region}:{names}"
            + (f"\nWhat failed:{reasons}" if errors else "")
            + (f"\n{in_words(strays, config.cluster)}" if strays else "")
            + f"\nAgain in some minutes: icom teardown{as_options(config)}"
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
    launched: Collection[str] = (),
) -> list[str]:
    """Remove all that carries the cluster's tag, or, with `run`, what that call of `icom provision` made.

    As much as can be: what fails keeps nothing else from going. Images stay unless `images`. What is gone already is
    no error. `launched` are ids of instances that go too, whether EC2 shows their tags yet or not.

    Returns:
        What failed, in words.
    """
    doomed = filters(tag_cluster=name) + (filters(tag_run=run) if run else [])
    errors: list[str] = []

    def attempt(do: Callable[..., T], *arguments: Any) -> T | None:
        try:
            with explained():
                return do(*arguments)
        except IcomError as error:
            errors.append(str(error))
            return None

    nodes = attempt(find_nodes, aws, doomed) or []
    if nodes:
        say(f"ending {', '.join(node.label for node in nodes)}")
    attempt(end_nodes, aws, list(dict.fromkeys([*launched, *(node.id for node in nodes)])), wait_minutes)
    for kind in KINDS:
        which = doomed if images or kind.name not in IMAGES else doomed + filters(tag_role=RAW)
        for item in attempt(_found, aws, kind, which) or []:
            if kind.name == "security-group":
                attempt(leave_group, aws, item)
            attempt(_delete, aws, kind, item)
    return errors


def _delete(aws: Aws, kind: ResourceKind, item: dict[str, Any]) -> None:
    delete_if_there(partial(getattr(aws.ec2, kind.delete), **{kind.id: item[kind.id]}))


def leave_group(aws: Aws, group: dict[str, Any]) -> None:
    """Take a cluster's security group from the instance that is its master without being its own; all others stay.

    Raises:
        IcomError: that instance has no other group, and EC2 wants one.
    """
    master = tags_of(group).get(TAG_MASTER)
    if not master:
        return
    own = filters(**{"attachment.instance_id": master})
    for card in pages(aws.ec2, "describe_network_interfaces", "NetworkInterfaces", Filters=own):
        groups = [entry["GroupId"] for entry in card["Groups"]]
        kept = [id for id in groups if id != group["GroupId"]]
        if not kept:
            raise IcomError(f"{master} has no security group but {group['GroupId']}: give it another one, then again.")
        if kept != groups:
            aws.ec2.modify_network_interface_attribute(NetworkInterfaceId=card["NetworkInterfaceId"], Groups=kept)


def remove_raw_images(aws: Aws, name: str) -> None:
    """Remove the images of a master's uncleaned disk, with their snapshots, whichever call made them."""
    for kind in KINDS:
        if kind.name in IMAGES:
            for item in _found(aws, kind, filters(tag_cluster=name, tag_role=RAW)):
                _delete(aws, kind, item)


def _found(aws: Aws, kind: ResourceKind, matching: list[dict[str, Any]]) -> list[dict[str, Any]]:
    request: dict[str, Any] = {"Filters": matching} | ({kind.owner: ["self"]} if kind.owner else {})
    if aws.ec2.can_paginate(kind.describe):
        items = pages(aws.ec2, kind.describe, kind.key, **request)
    else:
        items = getattr(aws.ec2, kind.describe)(**request)[kind.key]
    return [item for item in items if item.get("State") not in ("deleting", "deleted")]


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
            delete_if_there(lambda id=id: aws.ec2.terminate_instances(InstanceIds=[id]))  # type: ignore[misc]
    wait_for(aws, "terminated", ids, wait_minutes)


def delete_if_there(delete: Callable[[], Any], tries: int = 24) -> None:
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
    """(kind, id) of all in EC2 that carries the cluster's tag, and with `run` that run's; ended instances excepted.

    The kind of raw images and their snapshots is not in IMAGES: they never stay.
    """
    tagged = pages(aws.ec2, "describe_tags", "Tags", Filters=filters(key=TAG_CLUSTER, value=name))
    found = {(tag["ResourceType"], tag["ResourceId"]) for tag in tagged}
    if run:
        made = pages(aws.ec2, "describe_tags", "Tags", Filters=filters(key=TAG_RUN, value=run))
        found &= {(tag["ResourceType"], tag["ResourceId"]) for tag in made}
    ended = filters(tag_cluster=name) + filters(instance_state_name=["shutting-down", "terminated"])
    reservations = pages(aws.ec2, "describe_instances", "Reservations", Filters=ended)
    ghosts = {("instance", i["InstanceId"]) for reservation in reservations for i in reservation["Instances"]}
    raw: set[tuple[str, str]] = set()
    if any(kind in IMAGES for kind, _ in found):
        tagged = pages(aws.ec2, "describe_tags", "Tags", Filters=filters(key=TAG_ROLE, value=RAW))
        raw = {(tag["ResourceType"], tag["ResourceId"]) for tag in tagged}
    return sorted((f"raw {kind}" if (kind, id) in raw else kind, id) for kind, id in found - ghosts)


def instances(left: list[tuple[str, str]]) -> list[str]:
    """The ids of the instances in such a list."""
    return [id for kind, id in left if kind == "instance"]


def wait_until_gone(aws: Aws, name: str, run: str | None = None, images: bool = False) -> list[tuple[str, str]]:
    """What is left, asked until several looks in a row show nothing.

    Tags of things that were deleted stay visible for some seconds, and those of things made just now come late.
    """
    empty = 0
    for attempt in range(LOOK_AGAIN_TRIES):
        if attempt:
            time.sleep(LOOK_AGAIN_SECONDS)
        left = left_over(aws, name, run)
        empty = 0 if [item for item in left if images or item[0] not in IMAGES] else empty + 1
        if empty == LOOK_AGAIN_EMPTY:
            break
    return left

"""Launch instances: all of a group in one zone or none; no launch is ever forgotten, not even one without an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from icom import names
from icom.errors import IcomError
from provisioning.aws import Aws, error_code, explained, filters, wait_for, when_visible
from provisioning.cluster import Node, find_nodes
from provisioning.ec2 import wait_until
from provisioning.folder import ClusterFolder, name_before_launch
from provisioning.hostkeys import make_key
from provisioning.plan import Plan, launch_request
from provisioning.teardown import end_nodes
from provisioning.userdata import user_data

Say = Callable[[str], None]

NO_ROOM = (
    *("InsufficientInstanceCapacity", "InsufficientHostCapacity", "InsufficientReservedInstanceCapacity"),
    *("InsufficientFreeAddressesInSubnet", "ReservationCapacityExceeded", "SpotMaxPriceTooLow", "Unsupported"),
)
"""What EC2 says when a zone or subnet cannot take the nodes and another one may."""


@dataclass
class Launches:
    """What a call has launched, for who removes it: the tags of what is new show late."""

    check: Callable[[], None]
    """Raises if the call is to stop."""
    ids: list[str] = field(default_factory=list)
    unknown: dict[str, Any] | None = None
    """A RunInstances request that was sent and of which nobody knows what became."""


def launch_somewhere(
    aws: Aws, plan: Plan, group: str, client_key: str | None, folder: ClusterFolder, launches: Launches, say: Say
) -> list[str]:
    """Launch all missing nodes in one subnet, the first of the plan's that takes all of them.

    Returns:
        Their ids, in the order of the plan's roles.

    Raises:
        IcomError: no subnet can take them all now; none runs then.
        botocore's ClientError: anything else that EC2 refuses.
    """
    from botocore.exceptions import ClientError

    keys = {role: make_key() for role in plan.roles}
    for role, key in keys.items():
        folder.remember([name_before_launch(plan.run, role)], key.public)
    refusals = []
    for subnet in plan.found.subnets:
        ids = []
        try:
            for role in plan.roles:
                key = keys[role]
                request = launch_request(plan, role, subnet.id, group, user_data(key, client_key, plan.ends))
                ids.append(id := _launch(aws, request, launches))
                folder.remember([id], key.public)
                say(f"{role}: {id} in {subnet.zone}")
            return ids
        except ClientError as error:
            if error_code(error) not in NO_ROOM:
                raise
            refusals.append(f"{subnet.zone}: {error_code(error)}: {error.response['Error']['Message']}")
            say(f"{subnet.zone} cannot take {role}: {error_code(error)}")
        # All nodes or none, per zone. Waiting until they are gone frees placement group and quota for the next.
        end_nodes(aws, ids, plan.config.wait_minutes)
        launches.ids.clear()
    raise IcomError(
        f"No zone can take {len(plan.roles)} x {plan.config.instance_type} now. "
        + "; ".join(refusals)
        + ". Try later, or another --instance_type, --region, --subnet, or without --spot."
    )


def _launch(aws: Aws, request: dict[str, Any], launches: Launches) -> str:
    """Launch one node; its instance id.

    Raises:
        IcomError: EC2 answers with none. What became of it is not known then.
    """
    from botocore.exceptions import ClientError

    launches.check()  # before it could have been sent
    launches.unknown = request
    try:
        answer = when_visible(lambda: aws.ec2.run_instances(**request))
    except ClientError as error:
        if _is_refusal(error):
            launches.unknown = None
        raise
    ids = [names.instance_id(instance["InstanceId"]) for instance in answer.get("Instances", [])]
    if not ids:
        raise IcomError("EC2 answered RunInstances without an instance.")
    launches.ids.extend(ids)
    launches.unknown = None
    return ids[0]


def _is_refusal(error: Any) -> bool:
    """Whether EC2 said no, and did not just fail to say what it did. Some of its refusals come as server errors."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status < 500 or error_code(error) in (*NO_ROOM, "RequestLimitExceeded")


def learn_launched(aws: Aws, launches: Launches) -> list[str]:
    """Find out what became of a launch whose answer was lost: its id, to end it, comes with the answer to a repetition.

    Returns:
        What stays unknown, in words.
    """
    if launches.unknown is None:
        return []
    try:
        with explained():
            # The same token: it gives the instance that was launched; if none was, one that is ended right away.
            _launch(aws, launches.unknown, launches)
    except IcomError as error:
        if launches.unknown:
            return [f"Whether an instance was launched is not known (token {launches.unknown['ClientToken']}): {error}"]
    return []


def wait_until_running(aws: Aws, plan: Plan, launched: Sequence[str], say: Say) -> None:
    """Wait for all nodes, new ones and those of an earlier call, until they run and EC2 finds them by their tags.

    Raises:
        IcomError: a node died (with EC2's reason), or the time is over.
    """
    ids = [*launched, *(node.id for node in plan.there)]  # tags may show late, and nobody finds a dead node by them
    say(f"waiting for {len(ids)} nodes to run")
    wait_for(aws, "running", ids, plan.config.wait_minutes)
    with_addresses(aws, plan, filters(instance_id=ids), len(ids))
    found: list[str] = []

    def listed() -> bool:
        found[:] = [node.id for node in find_nodes(aws, filters(tag_cluster=plan.config.cluster))]
        return set(ids) <= set(found)

    if not wait_until(listed):
        raise IcomError(f"EC2 does not list {', '.join(set(ids) - set(found))} by the tags it was given.")


def with_addresses(aws: Aws, plan: Plan, matching: list[dict[str, Any]], count: int) -> list[Node]:
    """Running instances once EC2 tells the addresses at which they are reached.

    Raises:
        IcomError: it does not.
    """
    nodes: list[Node] = []

    def addressed() -> bool:
        nodes[:] = find_nodes(aws, matching)
        return len(nodes) >= count and all(plan.config.private_ip or node.public_ip for node in nodes)

    if not wait_until(addressed):
        raise IcomError(
            "EC2 gave no public address to "
            + (", ".join(node.label for node in nodes if not node.public_ip) or "the nodes")
            + ". Does the subnet have a way to the internet? Else give --private_ip."
        )
    return nodes

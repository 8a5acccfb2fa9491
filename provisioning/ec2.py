"""Make what the plan says: first a rehearsal that makes nothing, then group, key, placement group, nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from icom.errors import IcomError
from provisioning.aws import Aws, error_code, explained, filters, wait_for, when_visible
from provisioning.cluster import TAG_CLUSTER, TAG_RUN, Cluster, Node, find_cluster, find_nodes, tags_of
from provisioning.hostkeys import Folder, make_key, unborn_name
from provisioning.plan import Plan, ingress_rules, launch_request
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


def rehearse(aws: Aws, plan: Plan) -> None:
    """Ask EC2 whether it would allow each call that makes something. Makes nothing.

    Raises:
        botocore's ClientError: what is not allowed or not possible.
    """
    if plan.make_group:
        _would(aws.ec2.create_security_group, **_group_request(plan))
    if plan.make_key:
        _would(aws.ec2.import_key_pair, **_key_request(plan, make_key().public))
    if plan.make_placement:
        _would(aws.ec2.create_placement_group, **_placement_request(plan))
    for role in plan.roles[:1]:
        request = launch_request(plan, role, plan.subnets[0].id, "", "")
        # What does not exist yet cannot be named.
        del request["NetworkInterfaces"][0]["Groups"]
        del request["ClientToken"]  # it belongs to the real launch
        if plan.make_key:
            del request["KeyName"]
        if plan.make_placement:
            del request["Placement"]
        _would(aws.ec2.run_instances, **request)


def _would(call: Any, **request: Any) -> None:
    from botocore.exceptions import ClientError

    try:
        call(**request, DryRun=True)
    except ClientError as error:
        if error_code(error) != "DryRunOperation":
            raise


def build(aws: Aws, plan: Plan, cluster: Cluster, folder: Folder, launches: Launches, say: Say) -> Cluster:
    """Make everything of the plan and wait until the nodes run.

    Returns:
        The cluster as EC2 describes it afterwards.

    Raises:
        IcomError, botocore's errors: the caller removes what carries the tag of the plan's run.
    """
    group = _security_group(aws, plan, cluster, say)
    client_key = None if plan.config.key_name else folder.client_key()
    if plan.make_key and client_key:
        _key_pair(aws, plan, cluster, client_key, say)
    if plan.make_placement:
        _placement_group(aws, plan, say)
    if plan.roles:
        _launch_somewhere(aws, plan, group, client_key, folder, launches, say)
    _wait_until_running(aws, plan, say)
    return find_cluster(aws, plan.config.cluster)


def _group_request(plan: Plan) -> dict[str, Any]:
    return {
        "GroupName": plan.name,
        "Description": f"icom cluster {plan.config.cluster}",
        "VpcId": plan.vpc,
        "TagSpecifications": [plan.tags("security-group")],
    }


def _key_request(plan: Plan, client_key: str) -> dict[str, Any]:
    return {
        "KeyName": plan.name,
        "PublicKeyMaterial": client_key.encode(),
        "TagSpecifications": [plan.tags("key-pair")],
    }


def _placement_request(plan: Plan) -> dict[str, Any]:
    return {"GroupName": plan.name, "Strategy": "cluster", "TagSpecifications": [plan.tags("placement-group")]}


def _security_group(aws: Aws, plan: Plan, cluster: Cluster, say: Say) -> str:
    """The id of the cluster's security group, made if need be, with exactly the plan's rules."""
    found = cluster.group
    if found is None:
        found = _unless_made(
            lambda: aws.ec2.create_security_group(**_group_request(plan)),
            "InvalidGroup.Duplicate",
            lambda: _described_group(aws, plan),
            plan,
        )
        say(f"security group {found['GroupId']}")
    group = str(found["GroupId"])
    _set_rules(aws, plan, found)
    return group


def _described_group(aws: Aws, plan: Plan) -> dict[str, Any] | None:
    groups = aws.ec2.describe_security_groups(Filters=filters(group_name=plan.name, vpc_id=plan.vpc))
    return groups["SecurityGroups"][0] if groups["SecurityGroups"] else None


def _set_rules(aws: Aws, plan: Plan, group: dict[str, Any]) -> None:
    """Let in what the plan says and nothing else: the caller's address changes from day to day."""
    from botocore.exceptions import ClientError

    id = str(group["GroupId"])
    wanted = ingress_rules(plan, id)
    there = group.get("IpPermissions", [])  # none in the answer to its creation
    keep = [rule for rule in there if _sources(rule) in [_sources(rule) for rule in wanted]]
    if stale := [rule for rule in there if rule not in keep]:
        aws.ec2.revoke_security_group_ingress(GroupId=id, IpPermissions=stale)
    missing = [rule for rule in wanted if _sources(rule) not in [_sources(rule) for rule in keep]]
    for rule in missing:
        request = {"GroupId": id, "IpPermissions": [rule]}
        try:
            when_visible(lambda request=request: aws.ec2.authorize_security_group_ingress(**request))  # type: ignore[misc]
        except ClientError as error:
            if error_code(error) != "InvalidPermission.Duplicate":  # the first answer was lost
                raise
    if plan.config.efa:
        # An adapter's own traffic needs a rule towards the group itself; the default one for all addresses is not it.
        among = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": id}]}
        try:
            when_visible(lambda: aws.ec2.authorize_security_group_egress(GroupId=id, IpPermissions=[among]))
        except ClientError as error:
            if error_code(error) != "InvalidPermission.Duplicate":
                raise


def _sources(rule: dict[str, Any]) -> tuple[Any, ...]:
    """What a rule lets in, in a form that can be compared."""
    return (
        rule["IpProtocol"],
        rule.get("FromPort"),
        sorted(entry["CidrIp"] for entry in rule.get("IpRanges", [])),
        sorted(entry["CidrIpv6"] for entry in rule.get("Ipv6Ranges", [])),
        sorted(entry["GroupId"] for entry in rule.get("UserIdGroupPairs", [])),
        sorted(entry["PrefixListId"] for entry in rule.get("PrefixListIds", [])),
    )


def _key_pair(aws: Aws, plan: Plan, cluster: Cluster, client_key: str, say: Say) -> None:
    if cluster.key:  # of a provision on another computer that launched nothing
        aws.ec2.delete_key_pair(KeyName=plan.name)
    _unless_made(
        lambda: aws.ec2.import_key_pair(**_key_request(plan, client_key)),
        "InvalidKeyPair.Duplicate",
        lambda: next(iter(aws.ec2.describe_key_pairs(KeyNames=[plan.name])["KeyPairs"]), None),
        plan,
    )
    say(f"key pair {plan.name}")


def _placement_group(aws: Aws, plan: Plan, say: Say) -> None:
    _unless_made(
        lambda: aws.ec2.create_placement_group(**_placement_request(plan)),
        "InvalidPlacementGroup.Duplicate",
        lambda: next(iter(aws.ec2.describe_placement_groups(GroupNames=[plan.name])["PlacementGroups"]), None),
        plan,
    )
    say(f"placement group {plan.name}")


def _unless_made(
    make: Callable[[], dict[str, Any]], duplicate: str, find: Callable[[], dict[str, Any] | None], plan: Plan
) -> dict[str, Any]:
    """Make a thing that has a name; a duplicate of this very run is the trace of an answer that was lost.

    Returns:
        What EC2 tells of it: the answer to its creation, or its description.
    """
    from botocore.exceptions import ClientError

    try:
        return make()
    except ClientError as error:
        if error_code(error) != duplicate:
            raise
        found: dict[str, Any] = {}

        def shown() -> bool:
            described = when_visible(find)
            found.update(described or {})
            return bool(found)

        until(shown)
        tags = tags_of(found)
        if tags.get(TAG_RUN) == plan.run:
            return found
        owner = "another icom provision made it a moment ago" if TAG_CLUSTER in tags else "icom did not make it"
        raise IcomError(
            f"{error.operation_name}: {plan.name} exists already, and {owner}. Choose another --cluster, or remove it."
        ) from error


def _launch_somewhere(
    aws: Aws, plan: Plan, group: str, client_key: str | None, folder: Folder, launches: Launches, say: Say
) -> None:
    """Launch all missing nodes in one subnet: the first of the plan's that takes all of them."""
    from botocore.exceptions import ClientError

    keys = {role: make_key() for role in plan.roles}
    for role, key in keys.items():
        folder.remember([unborn_name(plan.run, role)], key.public)
    refusals = []
    for subnet in plan.subnets:
        try:
            for role in plan.roles:
                key = keys[role]
                request = launch_request(plan, role, subnet.id, group, user_data(key, client_key, plan.ends))
                id = _launch(aws, request, launches)
                folder.remember([id], key.public)
                say(f"{role}: {id} in {subnet.zone}")
            return
        except ClientError as error:
            if error_code(error) not in NO_ROOM:
                raise
            refusals.append(f"{subnet.zone}: {error_code(error)}: {error.response['Error']['Message']}")
            say(f"{subnet.zone} cannot take {role}: {error_code(error)}")
        # All nodes or none, per zone. Waiting until they are gone frees placement group and quota for the next.
        end_nodes(aws, launches.ids, plan.config.wait_minutes)
        launches.ids.clear()
    raise IcomError(
        f"No zone can take {len(plan.roles)} x {plan.config.instance_type} now. "
        + "; ".join(refusals)
        + ". Try later, or another --instance_type, --region, --subnet, or without --spot."
    )


def _launch(aws: Aws, request: dict[str, Any], launches: Launches) -> str:
    """Launch one node; its instance id."""
    from botocore.exceptions import ClientError

    launches.check()  # before it could have been sent
    launches.unknown = request
    try:
        answer = when_visible(lambda: aws.ec2.run_instances(**request))
    except ClientError as error:
        if _is_refusal(error):
            launches.unknown = None
        raise
    id = str(answer["Instances"][0]["InstanceId"])
    launches.ids.append(id)
    launches.unknown = None
    return id


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


def _wait_until_running(aws: Aws, plan: Plan, say: Say) -> None:
    """Wait for all nodes, new ones and those of an earlier call.

    Raises:
        IcomError: a node died (with EC2's reason), or the time is over.
    """
    expected = len(plan.roles) + len(plan.there)
    nodes: list[Node] = []

    def listed() -> bool:
        nodes[:] = find_nodes(aws, filters(tag_cluster=plan.config.cluster))
        return len(nodes) >= expected

    if not until(listed):
        raise IcomError(f"EC2 lists {len(nodes)} live nodes where {expected} were started. See icom status.")
    say(f"waiting for {expected} nodes to run")
    wait_for(aws, "running", [node.id for node in nodes], plan.config.wait_minutes)


def until(done: Callable[[], bool], tries: int = 6, seconds: float = 2.0) -> bool:
    """Ask a few times; whether it came true."""
    for _ in range(tries):
        if done():
            return True
        time.sleep(seconds)
    return False

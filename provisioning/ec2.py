"""What a cluster has besides nodes: security group, key pair, placement group; and a rehearsal that makes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from icom.errors import IcomError
from provisioning.aws import Aws, error_code, filters, when_visible
from provisioning.cluster import BUILDER, TAG_CLUSTER, TAG_RUN, Cluster, tags_of
from provisioning.hostkeys import make_key
from provisioning.plan import Plan, builder_plan, ingress_rules, launch_request, raw_image_request

if TYPE_CHECKING:
    from provisioning.this_instance import ThisInstance

Say = Callable[[str], None]

SOURCES = {
    "IpRanges": ("CidrIp",),
    "Ipv6Ranges": ("CidrIpv6",),
    "UserIdGroupPairs": ("GroupId", "GroupName"),
    "PrefixListIds": ("PrefixListId",),
}
"""Kinds of sources in a rule of a security group -> what tells one from another, the first that EC2 tells."""
SSH_PORT = 22


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
    if plan.this_instance and plan.join:
        as_it_is = {"NetworkInterfaceId": plan.this_instance.interface, "Groups": list(plan.this_instance.groups)}
        _would(aws.ec2.modify_network_interface_attribute, **as_it_is)
    if plan.this_instance and plan.found.bake:
        _would(aws.ec2.create_image, **raw_image_request(plan))
    launches = [(plan, role) for role in plan.roles[:1]]
    if plan.found.bake:
        launches.append((builder_plan(plan), BUILDER))
    for launch, role in launches:
        request = launch_request(launch, role, plan.found.subnets[0].id, "", "")
        # What does not exist yet cannot be named.
        del request["NetworkInterfaces"][0]["Groups"]
        del request["ClientToken"]  # it belongs to the real launch
        if plan.make_key:
            del request["KeyName"]
        if plan.make_placement:
            request.pop("Placement", None)
        _would(aws.ec2.run_instances, **request)


def _would(call: Any, **request: Any) -> None:
    from botocore.exceptions import ClientError

    try:
        call(**request, DryRun=True)
    except ClientError as error:
        # What an instance was made from may be gone; permissions are looked at before that.
        if error_code(error) not in ("DryRunOperation", "InvalidAMIID.NotFound", "InvalidAMIID.Unavailable"):
            raise


def _group_request(plan: Plan) -> dict[str, Any]:
    return {
        "GroupName": plan.name,
        "Description": f"icom cluster {plan.config.cluster}",
        "VpcId": plan.found.vpc,
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


def ensure_group(aws: Aws, plan: Plan, cluster: Cluster, say: Say) -> str:
    """The id of the cluster's security group, made if need be, which lets in what the plan says."""
    found = cluster.group
    if found is None:
        found = unless_made(
            lambda: aws.ec2.create_security_group(**_group_request(plan)),
            "InvalidGroup.Duplicate",
            lambda: _described_group(aws, plan),
            plan,
            lambda made: aws.ec2.delete_security_group(GroupId=made["GroupId"]),
        )
        say(f"security group {found['GroupId']}")
    _open_group(aws, plan, found)
    return str(found["GroupId"])


def keep_rules(aws: Aws, plan: Plan, say: Say) -> None:
    """Bring the rules of the cluster's security group to the plan's again: one may have come while nodes were made."""
    if found := _described_group(aws, plan):
        _open_group(aws, plan, found)
        close_group(aws, plan, found, say)


def restore_rules(aws: Aws, cluster: Cluster) -> None:
    """Take back what a call has let into a cluster's security group, as that was before."""
    before = cluster.group
    if before is None:
        return
    (now,) = aws.ec2.describe_security_groups(GroupIds=[before["GroupId"]])["SecurityGroups"]
    known = _by_source(before["IpPermissions"])
    if new := [rule for source, rule in _by_source(now["IpPermissions"]).items() if source not in known]:
        aws.ec2.revoke_security_group_ingress(GroupId=before["GroupId"], IpPermissions=new)


def _described_group(aws: Aws, plan: Plan) -> dict[str, Any] | None:
    groups = aws.ec2.describe_security_groups(Filters=filters(group_name=plan.name, vpc_id=plan.found.vpc))
    return groups["SecurityGroups"][0] if groups["SecurityGroups"] else None


def _open_group(aws: Aws, plan: Plan, group: dict[str, Any]) -> None:
    """Let in what the plan says: the caller's address changes from day to day."""
    id = str(group["GroupId"])
    there = _by_source(group.get("IpPermissions", []))  # none in the answer to its creation
    for source, rule in _by_source(ingress_rules(plan, id)).items():
        if source not in there:
            _authorize(aws.ec2.authorize_security_group_ingress, id, rule)
    if plan.config.efa:
        # An adapter's own traffic needs a rule towards the group itself; the default one for all addresses is not it.
        among = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": id}]}
        _authorize(aws.ec2.authorize_security_group_egress, id, among)


def _authorize(call: Callable[..., Any], group: str, rule: dict[str, Any]) -> None:
    from botocore.exceptions import ClientError

    try:
        when_visible(lambda: call(GroupId=group, IpPermissions=[rule]))
    except ClientError as error:
        if error_code(error) != "InvalidPermission.Duplicate":  # it was there, or the first answer was lost
            raise


def close_group(aws: Aws, plan: Plan, group: dict[str, Any] | None, say: Say) -> None:
    """Let nothing else into the cluster's security group, if there was one, than the plan says."""
    if group is None:
        return
    id = str(group["GroupId"])
    wanted = _by_source(ingress_rules(plan, id))
    stale = {source: rule for source, rule in _by_source(group["IpPermissions"]).items() if source not in wanted}
    if stale:
        aws.ec2.revoke_security_group_ingress(GroupId=id, IpPermissions=list(stale.values()))
        say(f"security group {id} no longer lets in {', '.join(_in_words(*source) for source in stale)}")


def _by_source(rules: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rules by protocol, ports and source, with one source each: EC2 tells all those of a port as one."""
    single = {}
    for rule in rules:
        what = {part: rule.get(part) for part in ("IpProtocol", "FromPort", "ToPort")}
        ports = {part: value for part, value in what.items() if value is not None}
        for kind, names in SOURCES.items():
            for source in rule.get(kind, []):
                who = next((source[name] for name in names if source.get(name)), "?")
                what_and_who = (*what.values(), who)
                single[what_and_who] = ports | {kind: [source]}
    return single


def ssh_from(group: dict[str, Any]) -> list[str]:
    """Everyone whom a security group lets in to ssh, but for its own members: networks, prefix lists, other groups."""
    own = group["GroupId"]
    return [
        str(who)
        for protocol, first, last, who in _by_source(group["IpPermissions"])
        if who != own and (protocol == "-1" or (protocol == "tcp" and (first or 0) <= SSH_PORT <= (last or 0)))
    ]


def _in_words(protocol: str, first: int | None, last: int | None, source: str) -> str:
    ports = "" if first is None else f" {first}" if first == last else f" {first}-{last}"
    return f"{'all' if protocol == '-1' else protocol}{ports} from {source}"


def join_group(aws: Aws, instance: ThisInstance, group: str) -> None:
    """Add the cluster's security group to those of the instance that this runs on.

    `teardown.leave_group` takes it away again.
    """
    card = instance.interface
    (now,) = aws.ec2.describe_network_interfaces(NetworkInterfaceIds=[card])["NetworkInterfaces"]
    groups = [*(entry["GroupId"] for entry in now["Groups"]), group]  # the request replaces the whole list
    when_visible(lambda: aws.ec2.modify_network_interface_attribute(NetworkInterfaceId=card, Groups=groups))


def import_key(aws: Aws, plan: Plan, cluster: Cluster, client_key: str, say: Say) -> None:
    if cluster.key:  # of a provision on another computer that launched nothing
        aws.ec2.delete_key_pair(KeyPairId=cluster.key["KeyPairId"])
    unless_made(
        lambda: aws.ec2.import_key_pair(**_key_request(plan, client_key)),
        "InvalidKeyPair.Duplicate",
        lambda: next(iter(aws.ec2.describe_key_pairs(KeyNames=[plan.name])["KeyPairs"]), None),
        plan,
        lambda made: aws.ec2.delete_key_pair(KeyPairId=made["KeyPairId"]),
    )
    say(f"key pair {plan.name}")


def make_placement_group(aws: Aws, plan: Plan, say: Say) -> None:
    unless_made(
        lambda: aws.ec2.create_placement_group(**_placement_request(plan)),
        "InvalidPlacementGroup.Duplicate",
        lambda: next(iter(aws.ec2.describe_placement_groups(GroupNames=[plan.name])["PlacementGroups"]), None),
        plan,
        lambda made: aws.ec2.delete_placement_group(GroupName=plan.name),
    )
    say(f"placement group {plan.name}")


class LostTags(IcomError):
    """EC2 has made a thing without its tags, and it could not be removed: nothing finds it as icom's own."""


def unless_made(
    make: Callable[[], dict[str, Any]],
    duplicate: str,
    find: Callable[[], dict[str, Any] | None],
    plan: Plan,
    undo: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """Make a thing that has a name; a duplicate of this very run is the trace of an answer that was lost.

    Its tags are read back: what has none is found neither by the next call nor by the teardown.

    Returns:
        What EC2 tells of it: the answer to its creation, or its description.

    Raises:
        IcomError: it has no tags, and is removed again; LostTags: it is not.
    """
    from botocore.exceptions import ClientError

    try:
        made = make()
    except ClientError as error:
        if error_code(error) != duplicate:
            raise
        found = _described(find, bool)
        tags = tags_of(found)
        if tags.get(TAG_RUN) == plan.run:
            return found
        owner = "another icom provision made it a moment ago" if TAG_CLUSTER in tags else "icom did not make it"
        raise IcomError(
            f"{error.operation_name}: {plan.name} exists already, and {owner}. Choose another --cluster, or remove it."
        ) from error
    found = _described(find, lambda thing: tags_of(thing).get(TAG_RUN) == plan.run)
    if tags_of(found).get(TAG_RUN) != plan.run:
        _remove_untagged(made, found, plan, undo)
    return made


def _described(find: Callable[[], dict[str, Any] | None], enough: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """A thing as EC2 describes it, once that is enough; as it was last where it never is."""
    found: dict[str, Any] = {}

    def look() -> bool:
        described = when_visible(find)
        found.clear()
        found.update(described or {})
        return bool(enough(found))

    wait_until(look)
    return found


def _remove_untagged(
    made: dict[str, Any], shown: dict[str, Any], plan: Plan, undo: Callable[[Any], object]
) -> NoReturn:
    from botocore.exceptions import ClientError

    ids = [str(value) for key, value in made.items() if key in ("GroupId", "KeyPairId", "ImageId")]
    what = f"{plan.name} ({', '.join(ids)})" if ids else plan.name
    try:
        undo(shown | made)
    except ClientError as error:
        raise LostTags(
            f"EC2 made {what} without the tags that it was given, and did not let it be removed again "
            f"({error_code(error)}). Remove it by hand: icom teardown names it, and does not take it for its own."
        ) from error
    raise IcomError(f"EC2 made {what} without the tags that it was given. It is removed again: try once more.")


def wait_until(done: Callable[[], bool], tries: int = 60, seconds: float = 2.0) -> bool:
    """Ask for two minutes, in which EC2 may learn of its own doings; whether it came true."""
    for _ in range(tries):
        if done():
            return True
        time.sleep(seconds)
    return False

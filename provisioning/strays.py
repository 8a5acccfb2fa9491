"""What has a cluster's names without its tag: whose it is cannot be told from EC2, so it is named and never removed."""

from __future__ import annotations

from dataclasses import dataclass

from icom import names
from provisioning.aws import Aws, filters, pages
from provisioning.cluster import ALIVE, TAG_CLUSTER, resource_name, tags_of


@dataclass(frozen=True)
class Stray:
    """A thing that icom could have made, by its name.

    Attributes:
        kind: as EC2's tags call it.
        id: its id.
        remove: words of the aws command that removes it.
    """

    kind: str
    id: str
    remove: str


def find_strays(aws: Aws, cluster: str) -> list[Stray]:
    """All that is called as the cluster's own things are, and lacks its tag.

    EC2 may have lost the tags when it made them, or somebody has taken them away; or a stranger has given the name to
    a thing of his own, such as another key pair in place of the one that he deleted.
    """
    name = resource_name(cluster)
    alive = filters(key_name=name, instance_state_name=ALIVE)
    running = pages(aws.ec2, "describe_instances", "Reservations", Filters=alive)
    groups = pages(aws.ec2, "describe_security_groups", "SecurityGroups", Filters=filters(group_name=name))
    images = aws.ec2.describe_images(Owners=["self"], Filters=filters(name=f"{name}/*"))["Images"]
    found = [
        ("instance", "InstanceId", "terminate-instances --instance-ids", [i for r in running for i in r["Instances"]]),
        ("security-group", "GroupId", "delete-security-group --group-id", groups),
        (
            *("key-pair", "KeyPairId", "delete-key-pair --key-pair-id"),
            aws.ec2.describe_key_pairs(Filters=filters(key_name=name))["KeyPairs"],
        ),
        (
            *("placement-group", "GroupName", "delete-placement-group --group-name"),
            aws.ec2.describe_placement_groups(Filters=filters(group_name=name))["PlacementGroups"],
        ),
        ("image", "ImageId", "deregister-image --delete-associated-snapshots --image-id", images),
    ]
    return [
        Stray(kind, names.word(item[id]), f"aws ec2 {remove} {item[id]}")
        for kind, id, remove, items in found
        for item in items
        if tags_of(item).get(TAG_CLUSTER) != cluster and item.get("State") not in ("deleting", "deleted")
    ]


def in_words(strays: list[Stray], cluster: str) -> str:
    """The lines that tell of them, and how to remove each."""
    lines = "".join(f"\n  {stray.kind} {stray.id}: {stray.remove}" for stray in strays)
    return (
        f"Called {resource_name(cluster)} as {cluster}'s own, but without its tag: nobody can tell whose it is; "
        f"not removed:{lines}"
    )

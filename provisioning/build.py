"""Make what the plan says, where it is not there yet: the way in, the image, the nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from icom.errors import IcomError
from provisioning.aws import Aws
from provisioning.bake import IMAGE_MINUTES, bake_image, image_this_instance
from provisioning.cluster import Cluster, Node, check_roles, find_cluster
from provisioning.ec2 import ensure_group, import_key, join_group, make_placement_group, wait_until
from provisioning.images import Image, wait_for_image
from provisioning.launches import launch_somewhere, wait_until_running
from provisioning.plan import Plan
from provisioning.rollback import Call
from provisioning.teardown import end_nodes, remove_raw_images


@dataclass(frozen=True)
class Access:
    """Who gets in to instances.

    Attributes:
        group: id of their security group.
        client_key: public key that they let in besides the EC2 key pair's; None for none.
    """

    group: str
    client_key: str | None


def ensure_access(call: Call) -> Access:
    """The cluster's security group, which lets in what the plan says and maybe more, and its key pair.

    Raises:
        IcomError, botocore's errors: `rollback` removes what carries the tag of the plan's run. So for all steps.
    """
    aws, plan, say = call.aws, call.plan, call.progress.say
    group = ensure_group(aws, plan, call.cluster, say)
    if plan.this_instance and plan.join:
        join_group(aws, plan.this_instance, group)
        say("this instance is in it too")
    client_key = None if plan.config.key_name else call.login.folder.client_key()
    if plan.make_key and client_key:
        import_key(aws, plan, call.cluster, client_key, say)
    return Access(group, client_key)


def ensure_image(call: Call, access: Access) -> Image:
    """The image that nodes start from, baked if need be."""
    aws, plan, minutes = call.aws, call.plan, call.plan.config.wait_minutes
    image = plan.image
    if plan.this_instance:
        remove_raw_images(aws, plan.config.cluster)  # of a call that was killed
    if image.state == "pending":  # of a call that was interrupted
        with call.progress.doing(image.id, "EC2 still makes this image"):
            image = wait_for_image(aws, image.id, IMAGE_MINUTES)
    end_nodes(aws, [node.id for node in call.cluster.builders], minutes)
    if not plan.found.bake:
        return image
    if not plan.this_instance:
        return bake_image(call, image, access.group, access.client_key)
    raw = image_this_instance(call)
    baked = bake_image(call, raw, access.group, access.client_key)
    remove_raw_images(aws, plan.config.cluster)
    return baked


def ensure_nodes(call: Call, access: Access, image: Image) -> tuple[Node, ...]:
    """The plan's nodes, those that are there and new ones, which all run, master first."""
    aws, say, folder = call.aws, call.progress.say, call.login.folder
    plan = replace(call.plan, image=image)
    if plan.make_placement:
        make_placement_group(aws, plan, say)
    launched = []
    if plan.roles:
        launched = launch_somewhere(aws, plan, access.group, access.client_key, folder, call.launches, say)
    if plan.roles or plan.there:
        wait_until_running(aws, plan, launched, say)
    cluster = _whole(aws, plan, {*launched, *(node.id for node in plan.there)})
    check_roles(cluster)
    return cluster.nodes


def _whole(aws: Aws, plan: Plan, ids: set[str]) -> Cluster:
    """The cluster, once EC2 shows all of these nodes at once: one look may show fewer than the look before.

    Raises:
        IcomError: it does not.
    """
    found: list[Cluster] = []

    def shown() -> bool:
        found[:] = [find_cluster(aws, plan.config.cluster)]
        return ids <= {node.id for node in found[0].nodes}

    if not wait_until(shown):
        missing = ids - {node.id for node in found[0].nodes}
        raise IcomError(f"EC2 shows {len(ids) - len(missing)} of {len(ids)} nodes; it lacks {', '.join(missing)}.")
    return found[0]

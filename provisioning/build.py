"""Make what the plan says: security group, key pair, image, placement group, nodes."""

from __future__ import annotations

from dataclasses import replace

from icom.errors import IcomError
from provisioning.aws import Aws
from provisioning.bake import IMAGE_MINUTES, bake_image, image_this_instance
from provisioning.cluster import Cluster, check_roles, find_cluster
from provisioning.ec2 import join_group, key_pair, placement_group, security_group, wait_until
from provisioning.images import wait_for_image
from provisioning.launches import Launches, launch_somewhere, wait_until_running
from provisioning.plan import Plan
from provisioning.progress import Progress
from provisioning.ssh import Login
from provisioning.teardown import end_nodes, remove_raw_images


def build(aws: Aws, plan: Plan, cluster: Cluster, login: Login, launches: Launches, progress: Progress) -> Cluster:
    """Make everything of the plan and wait until the nodes run.

    Returns:
        The cluster as EC2 describes it afterwards.

    Raises:
        IcomError, botocore's errors: the caller removes what carries the tag of the plan's run.
    """
    say = progress.say
    group = security_group(aws, plan, cluster, say)
    if plan.this_instance and plan.join:
        join_group(aws, plan.this_instance, group)
        say("this instance is in it too")
    client_key = None if plan.config.key_name else login.folder.client_key()
    if plan.make_key and client_key:
        key_pair(aws, plan, cluster, client_key, say)
    if plan.this_instance:
        remove_raw_images(aws, plan.config.cluster)  # of a call that was killed
    if plan.image.state == "pending":  # of a call that was interrupted
        with progress.doing(plan.image.id, "EC2 still makes this image"):
            plan = replace(plan, image=wait_for_image(aws, plan.image.id, IMAGE_MINUTES))
    end_nodes(aws, [node.id for node in cluster.builders], plan.config.wait_minutes)
    if plan.bake:
        source = replace(plan, image=image_this_instance(aws, plan, progress)) if plan.this_instance else plan
        plan = replace(plan, image=bake_image(aws, source, group, client_key, login, launches, progress))
        if plan.this_instance:
            remove_raw_images(aws, plan.config.cluster)
    if plan.make_placement:
        placement_group(aws, plan, say)
    launched = launch_somewhere(aws, plan, group, client_key, login.folder, launches, say) if plan.roles else []
    if plan.roles or plan.there:
        wait_until_running(aws, plan, launched, say)
    return _whole(aws, plan, {*launched, *(node.id for node in plan.there)})


def _whole(aws: Aws, plan: Plan, ids: set[str]) -> Cluster:
    """The cluster, once EC2 shows all of these nodes at once: one look may show fewer than the look before.

    Raises:
        IcomError: it does not, or somebody has tagged another instance meanwhile.
    """
    found: list[Cluster] = []

    def shown() -> bool:
        found[:] = [find_cluster(aws, plan.config.cluster)]
        return ids <= {node.id for node in found[0].nodes}

    if not wait_until(shown):
        missing = ids - {node.id for node in found[0].nodes}
        raise IcomError(f"EC2 shows {len(ids) - len(missing)} of {len(ids)} nodes; it lacks {', '.join(missing)}.")
    if not plan.only_image:
        check_roles(found[0])
    return found[0]

"""`icom provision` and `icom bake`: look, plan, ask, make."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import fields
from functools import partial

from rich.console import Console

from icom.errors import IcomError, UsageError
from provisioning.aws import Aws, connect, explained
from provisioning.bootstrap import bootstrap
from provisioning.build import ensure_access, ensure_image, ensure_nodes
from provisioning.cluster import Node, find_cluster
from provisioning.config import BakeConfig, ProvisionConfig, as_options
from provisioning.ec2 import close_group, keep_rules, rehearse, restore_rules
from provisioning.environment import IN_ENVIRONMENT
from provisioning.folder import ClusterFolder, folder_of
from provisioning.plan import Plan, is_complete, make_plan, missing_roles
from provisioning.plan_table import plan_table
from provisioning.rollback import REMOVE_MINUTES, CallStop, rollback
from provisioning.sshinclude import add_include
from provisioning.survey import survey_cluster, survey_image
from provisioning.teardown import confirm, remove
from provisioning.this_instance import check_master, identify, master_here
from provisioning.transport import LocalTransport


def provision(config: ProvisionConfig) -> None:
    """`icom provision`: make the cluster of `config`, or finish it. The options have been checked.

    Raises:
        UsageError: what was asked for cannot be; nothing was made.
        IcomError: it failed; what this call made is removed again, unless --keep_on_failure.
        Stopped: Ctrl-C, SIGTERM or a closed terminal, the same.
    """
    stop = CallStop(config)
    with explained():
        document = identify(config) if config.from_this_instance else None
        aws = connect(document.region if document else config.region, config.profile, stop.check)
        folder = folder_of(aws.account, aws.region, config.cluster)
        before = find_cluster(aws, config.cluster)
        check_master(before, document.id if document else None)
        this_instance = None
        if document:
            config, this_instance = master_here(aws, config, before, document)
        roles = missing_roles(config, before)
        found = survey_cluster(aws, config, before, len(roles), this_instance)
        plan = make_plan(config, before, found, folder.has_client_key(before), roles, before.nodes, this_instance)
        _check_host_keys(plan, folder)
        if not _agreed(aws, plan, folder):
            return
        with stop, rollback(aws, plan, before, folder, stop) as call:
            say = call.progress.say
            access = ensure_access(call)
            close_group(aws, plan, before.group, say)
            image = ensure_image(call, access)
            launched = ensure_nodes(call, access, image)
            strangers = [node for node in launched if not folder.adopt(node)]
            folder.write_ssh_config(launched, call.login.user, call.login.identity)  # now, for who looks at a failure
            nodes = (this_instance.node, *launched) if this_instance else launched
            if config.setup:
                local = LocalTransport(nodes[0].label, stop.check) if this_instance else None
                bootstrap(call.login, nodes, plan.found.gpus, config.wait_minutes, call.progress, stop.check, local)
            keep_rules(aws, plan, say)
    if config.ssh_include:
        add_include()
    _finish(config, plan, len(nodes), strangers)


def bake(config: BakeConfig) -> None:
    """`icom bake`: make the image that nodes start from, unless there is one with this content.

    Raises:
        UsageError, IcomError, Stopped: as provision.
    """
    options = ProvisionConfig(**{field.name: getattr(config, field.name) for field in fields(BakeConfig)})
    stop = CallStop(options)
    with explained():
        aws = connect(options.region, options.profile, stop.check)
        folder = folder_of(aws.account, aws.region, options.cluster)
        before = find_cluster(aws, options.cluster)
        check_master(before, None)
        found = survey_image(aws, options, before)
        plan = make_plan(options, before, found, folder.has_client_key(before))
        if not plan.found.bake:
            print(f"Nothing to do: image {plan.image.id} has this content ({plan.image.state}).")
            return
        if not _agreed(aws, plan, folder):
            return
        # The builder may be a guest in the security group of a cluster, whose rules stay.
        leave_group = partial(restore_rules, aws, before)
        with stop:
            with rollback(aws, plan, before, folder, stop, leave_group) as call:
                ensure_image(call, ensure_access(call))
                nodes = find_cluster(aws, options.cluster).nodes
            _remove_all_but_image(aws, plan, leave_group)
            if not nodes:
                folder.remove()


def _check_host_keys(plan: Plan, folder: ClusterFolder) -> None:
    """Refuse to set up nodes that cannot be recognised from here.

    Raises:
        UsageError: there are some.
    """
    config = plan.config
    if config.setup and (unknown := [node.role for node in plan.there if not folder.adopt(node)]):
        raise UsageError(
            f"The host keys of {', '.join(unknown)} are not known on this computer: {config.cluster} was made on "
            f"another one. Go on there, or tear it down: icom teardown{as_options(config)}"
        )


def _agreed(aws: Aws, plan: Plan, folder: ClusterFolder) -> bool:
    """Show the plan, once EC2 says that it would allow it, and ask; whether to go on.

    Raises:
        IcomError, botocore's errors: EC2 would not; the answer is no; or others can read the cluster's key.
    """
    config = plan.config
    rehearse(aws, plan)
    Console(highlight=False).print(plan_table(plan))
    if config.dry_run:
        print("Dry run: nothing was made. EC2 would allow what it can be asked beforehand.")
        return False
    if not config.yes and not is_complete(plan):
        confirm("Make what is marked with +?")
    if not config.key_name:
        folder.client_key()  # made now, or refused now if others can read it
    return True


def _remove_all_but_image(aws: Aws, plan: Plan, leave_group: Callable[[], None]) -> None:
    """What `icom bake` needed on the way: security group and key pair, if it made them, and its rule if it did not.

    Raises:
        IcomError: some of it is left.
    """
    leave_group()
    if errors := remove(aws, plan.config.cluster, REMOVE_MINUTES, print, run=plan.run):
        raise IcomError(
            f"The image is made, but not all else is removed: {'; '.join(errors)}. "
            f"Again: icom teardown{as_options(plan.config)}"
        )


def _finish(config: ProvisionConfig, plan: Plan, count: int, strangers: list[Node]) -> None:
    """Say what there is and the next commands to type."""
    where = as_options(config)
    what = "Nothing to do:" if is_complete(plan) else "Done:"
    print(f"{what} {count} nodes of {config.cluster} run" + (" and can train." if config.setup else "."))
    for node in strangers:
        print(
            f"! The host key of {node.role} ({node.id}) is not known on this computer, so ssh refuses it. It was made "
            "on another one."
        )
    if plan.this_instance:
        train = "accelerate launch textual_inversion_icom.py …"
        print(f"  {IN_ENVIRONMENT}mpirun -f ~/hosts -n {count} -ppn 1 {train}\n  icom teardown{where}")
        return
    if config.setup:
        profile = f"AWS_PROFILE={shlex.quote(config.profile)} " if config.profile else ""
        print(f"  {profile}icom train --on {config.cluster} --train_data_dir photos --placeholder_token '<mine>' …")
    print(f"  icom ssh{where}\n  icom teardown{where}")

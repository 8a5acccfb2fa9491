"""`icom provision`: look, plan, ask, make; on failure or Ctrl-C remove what this call made."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields

from icom.errors import IcomError, Stopped, UsageError
from icom.signals import StopRequest
from provisioning.aws import Aws, add_console, connect, explained
from provisioning.bootstrap import bootstrap
from provisioning.build import build
from provisioning.cluster import Cluster, Node, find_cluster
from provisioning.config import BakeConfig, ProvisionConfig, as_options, key_file
from provisioning.ec2 import LostTags, keep_rules, rehearse, restore_rules
from provisioning.environment import IN_ENVIRONMENT
from provisioning.folder import ClusterFolder, folder_of
from provisioning.launches import Launches, learn_launched
from provisioning.plan import Plan, is_complete, make_plan, missing_roles
from provisioning.plan_table import plan_table
from provisioning.progress import Progress
from provisioning.ssh import Login
from provisioning.sshinclude import add_include
from provisioning.survey import Survey, survey
from provisioning.teardown import confirm, instances, remove, wait_until_gone
from provisioning.this_instance import IdentityDocument, ThisInstance, identify, master_here
from provisioning.transport import LocalTransport

REMOVE_MINUTES = 10
"""How long removing waits for instances to end; a short --wait_minutes must not make it give up."""
REMOVE_PASSES = 2


def provision(config: ProvisionConfig) -> None:
    """`icom provision`: make the cluster of `config`, or finish it. The options have been checked.

    Raises:
        UsageError: what was asked for cannot be; nothing was made.
        IcomError: it failed; what this call made is removed again, unless --keep_on_failure.
        Stopped: Ctrl-C, SIGTERM or a closed terminal, the same.
    """
    _make(config, only_image=False)


def bake(config: BakeConfig) -> None:
    """`icom bake`: make the image that nodes start from, unless there is one with this content.

    Raises:
        UsageError, IcomError, Stopped: as provision.
    """
    own = {field.name: getattr(config, field.name) for field in fields(BakeConfig)}
    _make(ProvisionConfig(**own, count=0), only_image=True)


def _make(config: ProvisionConfig, only_image: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    doing = f"ending this step, then removing what this call made, as icom teardown{as_options(config)} would"
    stop = StopRequest(doing, also=[signal.SIGHUP])
    removing = False

    def check() -> None:
        if stop.signal_number is not None and not removing:
            raise Stopped(f"Stopped making {config.cluster}.", stop.signal_number)

    with explained():
        aws, own = _connect(config, check)
        folder = folder_of(aws.account, aws.region, config.cluster)
        before = find_cluster(aws, config.cluster)
        config, this_instance = master_here(aws, config, before, own)
        found, plan = _plan(aws, config, before, folder, only_image, this_instance)
        if only_image and not plan.bake:
            print(f"Nothing to do: image {plan.image.id} has this content ({plan.image.state}).")
            return
        rehearse(aws, plan)
        console.print(plan_table(plan, found))
        if config.dry_run:
            print("Dry run: nothing was made. EC2 would allow what it can be asked beforehand.")
            return
        if not config.yes and not is_complete(plan):
            confirm("Make what is marked with +?")
        if not config.key_name:
            folder.client_key()  # made now, or refused now if others can read it
        progress = Progress(console)
        launches = Launches(check)
        login = Login(folder, config.ssh_user, key_file(config) if config.key_name else folder.key)
        with stop:  # only from here on is there anything to remove
            try:
                cluster = build(aws, plan, before, login, launches, progress)
                strangers = [node for node in cluster.nodes if not folder.adopt(node)]
                if not only_image:  # now, for who looks at a failure
                    folder.write_ssh_config(cluster.nodes, login.user, login.identity)
                if config.setup and not only_image:
                    bootstrap(
                        login,
                        (this_instance.node, *cluster.nodes) if this_instance else cluster.nodes,
                        *(plan.gpus, config.wait_minutes, progress, check),
                        LocalTransport(this_instance.node.label, check) if this_instance else None,
                    )
                keep_rules(aws, plan, progress.say)
                check()
            except BaseException as error:
                removing = True
                add_console(aws, error)
                if _after_failure(aws, plan, before, launches, error, _say_if_heard) and before.empty:
                    folder.remove()
                raise
            if only_image:
                _remove_all_but_image(aws, plan, before)
                if not cluster.nodes:
                    folder.remove()
                return
        if config.ssh_include:
            add_include()
        _finish(config, plan, len(cluster.nodes) + bool(this_instance), strangers)


def _connect(config: ProvisionConfig, check: Callable[[], None]) -> tuple[Aws, IdentityDocument | None]:
    """The connection to AWS, and with --from_this_instance the instance that this runs on, whose region it has."""
    own = identify(config) if config.from_this_instance else None
    return connect(own.region if own else config.region, config.profile, check), own


def _plan(
    aws: Aws,
    config: ProvisionConfig,
    before: Cluster,
    folder: ClusterFolder,
    only_image: bool,
    this_instance: ThisInstance | None,
) -> tuple[Survey, Plan]:
    """What the region offers, and what is to be made.

    Raises:
        UsageError: what was asked for cannot be.
    """
    missing = [] if only_image else missing_roles(config, before)
    found = survey(aws, config, before, len(missing), only_image, this_instance)
    key_here = folder.has_key(before.key["PublicKey"] if before.key else "")
    plan = make_plan(config, before, found, key_here, only_image, this_instance)
    if config.setup and (unknown := [node.role for node in plan.there if not folder.adopt(node)]):
        raise UsageError(
            f"The host keys of {', '.join(unknown)} are not known on this computer: {config.cluster} was made on "
            f"another one. Go on there, or tear it down: icom teardown{as_options(config)}"
        )
    return found, plan


def _say_if_heard(text: str) -> None:
    """Print; a terminal that is closed must not keep us from removing things."""
    with suppress(OSError, ValueError):
        print(text, flush=True)


def _after_failure(
    aws: Aws, plan: Plan, before: Cluster, launches: Launches, error: BaseException, say: Callable[[str], None]
) -> bool:
    """Remove what this call made, or say that it was kept.

    Returns:
        Whether it is removed.

    Raises:
        IcomError: the removal failed too; names what is left.
    """
    name, where = plan.config.cluster, as_options(plan.config)
    if plan.config.keep_on_failure:
        say(f"Kept what was made of {name}. The same command again goes on; icom teardown{where} removes it.")
        return False
    say("Removing what this call made …")
    errors: list[str] = []
    left: list[tuple[str, str]] = []
    for _ in range(REMOVE_PASSES):  # a request whose answer was lost may show up late: again, until nothing does
        try:
            with explained():
                unknown = learn_launched(aws, launches)
                errors = unknown + remove(
                    *(aws, name, REMOVE_MINUTES, say, plan.run, True),
                    [*launches.ids, *instances(left)],
                )
                _leave_group(aws, plan, before)
                left = wait_until_gone(aws, name, plan.run, images=True)
        except IcomError as second:
            errors.append(str(second))
        if not left and not errors:
            say("All else of it is removed." if isinstance(error, LostTags) else "Nothing of it is left.")
            if plan.there and plan.config.setup:
                say(
                    f"The {len(plan.there)} nodes that were there may have been told of new ones. The same command "
                    f"with --count {len(plan.there)} takes that back."
                )
            return True
    names = ", ".join(f"{kind} {id}" for kind, id in left)
    raise IcomError(
        f"{error}\nRemoving what this call made failed too: {'; '.join(errors) or 'it is still there'}\n"
        + (f"Still there: {names}\n" if left else "Some of it may still be there.\n")
        + f"See it: icom status{where}\nRemove it: icom teardown{where}"
    ) from error


def _leave_group(aws: Aws, plan: Plan, before: Cluster) -> None:
    """Close what `icom bake` has opened in the security group of a cluster, where it is a guest."""
    if plan.only_image and before.group:
        restore_rules(aws, before.group)


def _remove_all_but_image(aws: Aws, plan: Plan, before: Cluster) -> None:
    """What `icom bake` needed on the way: security group and key pair, if it made them, and its rule if it did not.

    Raises:
        IcomError: some of it is left.
    """
    name = plan.config.cluster
    _leave_group(aws, plan, before)
    if errors := remove(aws, name, REMOVE_MINUTES, print, run=plan.run):
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
            f"! The host key of {node.label} is not known on this computer, so ssh refuses it. It was made "
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

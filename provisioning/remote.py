"""`icom ssh`, `icom run`, `icom push`, `icom pull`: OpenSSH itself, with the cluster's own config and host keys."""

from __future__ import annotations

import shlex
from typing import NoReturn

from icom.errors import UsageError
from provisioning.aws import connect, explained, filters
from provisioning.cluster import MASTER, UNKNOWN, find_nodes
from provisioning.config import (
    PullConfig,
    PushConfig,
    RunConfig,
    SshConfig,
    WhereConfig,
    as_options,
)
from provisioning.folder import ClusterFolder, folder_of, ssh_names
from provisioning.openssh import OpenSsh


def ssh(config: SshConfig) -> NoReturn:
    """`icom ssh`."""
    node = _node(config)
    node.become("ssh", node.name)


def run(config: RunConfig) -> NoReturn:
    """`icom run`."""
    if not config.command:
        raise UsageError("What is to be run? For instance: icom run -- mpirun -f hosts hostname")
    node = _node(config)
    line = config.command[0] if len(config.command) == 1 else shlex.join(config.command)
    node.become("ssh", node.name, f"exec bash -lc {shlex.quote(line)}")  # a login shell has the environment of icom


def push(config: PushConfig) -> NoReturn:
    """`icom push`."""
    node = _node(config)
    node.become("scp", config.source, f"{node.name}:{config.target}")


def pull(config: PullConfig) -> NoReturn:
    """`icom pull`."""
    node = _node(config)
    node.become("scp", f"{node.name}:{config.source}", config.target)


def reachable_folder(where: WhereConfig, node: str | None) -> ClusterFolder:
    """The cluster's folder, with the addresses of today in its ssh config.

    Args:
        where: the cluster.
        node: the role of the node that has to run; None: all of them.

    Raises:
        UsageError: there is no such cluster, it was not made on this computer, has no such node, or a node does not
            run.
    """
    with explained():
        aws = connect(where.region, where.profile)
        folder = folder_of(aws.account, aws.region, where.cluster)
        nodes = find_nodes(aws, filters(tag_cluster=where.cluster))
    states: dict[str, str] = {node.role: node.state for node in nodes}
    if not states:
        raise UsageError(f"There is no cluster {where.cluster} in {aws.region}.")
    if nodes[0].master and node in (None, MASTER):
        raise UsageError(
            f"The master of {where.cluster} is {nodes[0].master}, which made it (--from_this_instance). Work there: "
            "mpirun -f ~/hosts, without icom ssh and --on."
        )
    if node is not None and node not in states:
        raise UsageError(f"{where.cluster} has no node {node}. It has: {', '.join(states)}.")
    if node == UNKNOWN:
        raise UsageError(f"Nodes of {where.cluster} without a role cannot be reached by a name.")
    for role in states if node is None else [node]:
        if states[role] != "running":
            raise UsageError(f"{role} is {states[role]}. icom start{as_options(where)} starts a stopped cluster.")
    if not folder.ssh_config.exists():
        raise UsageError(f"{where.cluster} was not made on this computer, which has no key for it.")
    folder.update_addresses(tuple(nodes))
    return folder


def _node(config: SshConfig | RunConfig | PushConfig | PullConfig) -> OpenSsh:
    return OpenSsh(reachable_folder(config, config.node).ssh_config, ssh_names(config.cluster, config.node)[0])

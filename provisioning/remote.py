"""`icom ssh`, `icom run`, `icom push`, `icom pull`: OpenSSH itself, with the cluster's own config and host keys."""

from __future__ import annotations

import os
import shlex
import sys
from typing import NoReturn

from icom.errors import IcomError, UsageError
from provisioning.aws import connect, explained, filters
from provisioning.cluster import find_nodes
from provisioning.config import (
    PullConfig,
    PushConfig,
    RunConfig,
    SshConfig,
    check_cluster_name,
)
from provisioning.hostkeys import Folder, folder_of


def ssh(config: SshConfig) -> NoReturn:
    """`icom ssh`."""
    folder = _folder(config)
    _become(["ssh", "-F", str(folder.ssh_config), "--", config.node])


def run(config: RunConfig) -> NoReturn:
    """`icom run`."""
    if not config.command:
        raise UsageError("What is to be run? For instance: icom run -- mpirun -f hosts hostname")
    folder = _folder(config)
    line = config.command[0] if len(config.command) == 1 else shlex.join(config.command)
    _become(["ssh", "-F", str(folder.ssh_config), "--", config.node, line])


def push(config: PushConfig) -> NoReturn:
    """`icom push`."""
    folder = _folder(config)
    _become(["scp", "-r", "-p", "-F", str(folder.ssh_config), "--", config.source, f"{config.node}:{config.target}"])


def pull(config: PullConfig) -> NoReturn:
    """`icom pull`."""
    folder = _folder(config)
    _become(["scp", "-r", "-p", "-F", str(folder.ssh_config), "--", f"{config.node}:{config.source}", config.target])


def _folder(config: SshConfig | RunConfig | PushConfig | PullConfig) -> Folder:
    """The cluster's folder, with the addresses of today in its ssh config.

    Raises:
        UsageError: the cluster was not made on this computer, has no such node, or the node does not run.
    """
    check_cluster_name(config.cluster)
    with explained():
        aws = connect(config.region, config.profile)
        folder = folder_of(aws.account, aws.region, config.cluster)
        nodes = find_nodes(aws, filters(tag_cluster=config.cluster))
    states = {node.role: node.state for node in nodes}
    state = states.get(config.node)
    if not states:
        raise UsageError(f"There is no cluster {config.cluster} in {aws.region}.")
    if state is None:
        raise UsageError(f"{config.cluster} has no node {config.node}. It has: {', '.join(states)}.")
    if state != "running":
        raise UsageError(f"{config.node} is {state}. icom start --cluster {config.cluster} starts a stopped cluster.")
    if not folder.ssh_config.exists():
        raise UsageError(f"{config.cluster} was not made on this computer, which has no key for it.")
    folder.update_addresses(tuple(nodes))
    return folder


def _become(words: list[str]) -> NoReturn:
    """Go on as another program, whose exit code is ours."""
    sys.stdout.flush()
    try:
        os.execvp(words[0], words)
    except FileNotFoundError as error:
        raise IcomError(f"This needs OpenSSH's {words[0]}. Debian, Ubuntu: apt-get install openssh-client") from error

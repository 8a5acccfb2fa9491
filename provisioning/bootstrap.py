"""Make instances into a cluster: host keys of their own, icom, a way from the master to the workers, the hosts file.

Every step can be done again, so that a second `icom provision` goes on where the first was stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from icom import names
from icom.errors import IcomError
from icom.names import Malformed, PublicKey
from provisioning.cluster import MASTER, Node
from provisioning.environment import give_environment
from provisioning.folder import name_before_launch
from provisioning.health import check_health
from provisioning.install import install
from provisioning.progress import Progress
from provisioning.script import Script, script
from provisioning.ssh import Login, OtherKey, SshTransport, patient_connect
from provisioning.sshfiles import host_block, known_host
from provisioning.transport import Transport

NEW_KEY = "/etc/ssh/icom_new_key"
BOOT_SECONDS = 900
RELOAD_TRIES, RELOAD_SECONDS = 20, 0.5
"""How often, and after which pause, a node is asked again that still shows its first host key."""
INCLUDE = "Include icom_config"
FILES = ("hosts", ".cache/huggingface/accelerate/default_config.yaml")
"""Those of the user that icom replaces, in the home folder of the master."""


def node_name(node: Node) -> str:
    """What the hosts file calls a node: localhost for the master, node1, node2, … for the workers."""
    return "localhost" if node.role == MASTER else f"node{names.role(node.role).removeprefix('worker-')}"


def hosts_file(nodes: tuple[Node, ...]) -> str:
    """The hosts file for mpirun on the master."""
    return "".join(names.line(names.host(node_name(node))) for node in nodes)


def ssh_config(nodes: tuple[Node, ...]) -> str:
    """The master's ssh config for the workers: their names, and only their recorded keys."""
    files = {"IdentityFile": "~/.ssh/id_ed25519", "UserKnownHostsFile": "~/.ssh/icom_known_hosts"}
    return "".join(
        host_block([node_name(node), names.address(node.private_ip)], node.private_ip, node.id, files)
        for node in nodes
        if node.role != MASTER
    )


def bootstrap(
    login: Login,
    nodes: tuple[Node, ...],
    gpus: int,
    wait_minutes: float,
    progress: Progress,
    check: Callable[[], None],
    this_instance: Transport | None = None,
) -> None:
    """Bring all nodes to where mpirun on the master trains on all of them.

    Args:
        login: how to get in.
        nodes: all of the cluster, master first.
        gpus: of each node.
        wait_minutes: how long to wait for a node's ssh.
        progress: told what is going on.
        check: called before each step and each attempt to connect; what it raises stops.
        this_instance: the way to the master where that is this machine. Its host key and its icom stay.

    Raises:
        IcomError: which step failed on which node, with the node's own lines.
    """
    with ExitStack() as stack:
        away: dict[str, SshTransport] = {}
        launched = nodes[1:] if this_instance else nodes
        for node in launched:
            with progress.doing(node.role, "booting"):
                away[node.id] = stack.enter_context(patient_connect(login, node, wait_minutes, check))
                away[node.id].run(script("wait_for_boot"), seconds=BOOT_SECONDS)
        for node in launched:
            first = login.folder.host_key(name_before_launch(node.run, node.role))
            if first in login.folder.host_keys(node.id):
                with progress.doing(node.role, "making a host key of its own"):
                    made = _replace_host_key(login, node, away[node.id], wait_minutes)
                    away[node.id] = stack.enter_context(made)
        for node in launched:
            install(away[node.id], node.role, gpus, progress)
        transports: dict[str, Transport] = {**away}
        if this_instance:
            this_instance.run(script("keep_files", *FILES))
            transports[nodes[0].id] = this_instance
        master = transports[nodes[0].id]
        key = _made_key(master, script("make_master_key"))
        for node in nodes:
            transports[node.id].run(script("authorize_key", f"{key} icom master"))
        _introduce(login, master, nodes)
        for node in nodes[1:]:
            master.run(f"ssh -o BatchMode=yes -o ConnectTimeout=10 {node_name(node)} true")
        progress.say("the master reaches all workers by ssh")
        with progress.doing("all nodes", "Accelerate's configuration, the profile"):
            give_environment(transports, nodes, gpus)
        with progress.doing("all nodes", "health: packages, AMX, clocks, network, a sum over all of them"):
            check_health(transports, nodes, nodes[0].type, gpus, progress.say)


def _replace_host_key(login: Login, node: Node, old: SshTransport, wait_minutes: float) -> SshTransport:
    """Let a node make its own host key, over the connection that its first key has verified; the new connection.

    Both keys are recorded until the new one has been seen, so that an interruption at any point locks nobody out.
    """
    new = _made_key(old, script("make_host_key", NEW_KEY, as_root=True))
    login.folder.remember([node.id], new)
    before = login.folder.host_keys(node.id)
    old.run(script("use_host_key", NEW_KEY, as_root=True))
    for _ in range(RELOAD_TRIES):  # sshd takes up the new key some time after it was asked to
        try:
            connection = patient_connect(login, node, wait_minutes, old.check, [new])
            break
        except OtherKey as error:
            if error.seen not in before:
                raise
        time.sleep(RELOAD_SECONDS)
    else:
        raise IcomError(f"{old.name} still shows its first host key, after its sshd was told to reload.")
    for other in login.folder.host_keys(node.id):  # the first one, and those of attempts that were interrupted
        if other != new:
            login.folder.forget(node.id, other)
    return connection


def _made_key(node: Transport, maker: Script) -> PublicKey:
    """The public key that a node makes, and tells as its only line."""
    try:
        key = names.public_key(node.run(maker))
        if not key.startswith("ssh-ed25519 "):
            raise Malformed("Another kind was asked for.")
        return key
    except Malformed as error:
        raise IcomError(f"{node.name} made no ed25519 key: {error}") from None


def _introduce(login: Login, master: Transport, nodes: tuple[Node, ...]) -> None:
    """Tell the master of the workers: names, addresses, host keys."""
    known = "".join(known_host([node.id], key) for node in nodes[1:] for key in login.folder.host_keys(node.id))
    master.send({".ssh/icom_known_hosts": known.encode(), ".ssh/icom_config": ssh_config(nodes).encode()})
    master.run(script("include_ssh_config", INCLUDE))
    master.send({"hosts": hosts_file(nodes).encode()})

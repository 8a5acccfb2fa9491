"""What every node is told about training: Accelerate's default configuration, and what its login shells set."""

from __future__ import annotations

from collections.abc import Mapping

from icom import names
from provisioning.cluster import Node
from provisioning.on_node import PROFILE
from provisioning.transport import Transport

IN_ENVIRONMENT = f". ~/{PROFILE} && cd ~/icom && "
"""Before a command on a node that `give_environment` has served: as in a login shell, in the project's folder."""


def give_environment(transports: Mapping[str, Transport], nodes: tuple[Node, ...], gpus: int) -> None:
    """Make plain `mpirun -f ~/hosts … accelerate launch …` work in the master's login shells.

    Every node gets Accelerate's default configuration with the master's private address, and a profile. The master's
    needs its hosts file and the way to the workers. Doing it again replaces both.

    Args:
        transports: to every node, by its id.
        nodes: all of the cluster, master first.
        gpus: of each node; 0: train on CPUs.

    Raises:
        IcomError: a step failed; names the node and shows its last lines.
    """
    for number, node in enumerate(nodes):
        # make finds the environment, be it conda's or a venv.
        task = f"environment {number} {len(nodes)} {names.address(nodes[0].private_ip)} {gpus}"
        transports[node.id].run(f"make -s -C ~/icom run CMD='python -m provisioning.on_node {task}'")

"""A step of `icom provision` on hosts that stand for nodes.

`python -m tests.support.node_steps STEP KEY ADDRESSES KEYS` runs on the host that stands for the user's computer, which
alone reaches them. Prints what the user is told.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path

from icom.errors import IcomError
from provisioning.cluster import Node, role_names
from provisioning.environment import give_environment
from provisioning.folder import ClusterFolder
from provisioning.health import check_health
from provisioning.ssh import Login, SshTransport, connect
from provisioning.transport import Transport

TYPE = "m7i.4xlarge"


def node(number: int, role: str, address: str) -> Node:
    place = {"zone": "eu-central-1a", "subnet": "subnet-1", "vpc": "vpc-1", "private_ip": address, "public_ip": None}
    now = datetime.now(timezone.utc)
    return Node(f"i-{number}", role, "run", "running", TYPE, "ami-1", spot=False, since=now, **place)


def main(step: str, identity: str, addresses: list[str], keys: list[str]) -> None:
    nodes = tuple(node(n, r, a) for n, (r, a) in enumerate(zip(role_names(len(addresses)), addresses, strict=True)))
    with tempfile.TemporaryDirectory() as empty, ExitStack() as stack:
        folder = ClusterFolder(Path(empty))
        transports: dict[str, Transport] = {}
        for one, key in zip(nodes, keys, strict=True):
            folder.remember([one.id], key)
            connection = connect(Login(folder, "root", Path(identity)), one)
            transports[one.id] = stack.enter_context(SshTransport(connection, one))
        if step == "health":
            check_health(transports, nodes, TYPE, 0, print)
        else:
            give_environment(transports, nodes, int(step))


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:]))
    except IcomError as error:
        sys.exit(str(error))

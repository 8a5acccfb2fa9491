"""Set nodes up again and again, each time with a fault at another ssh step, then without one. Prints the counts.

Either the node does not do the step, or it does and the answer is lost. Ctrl-C between steps is as the former to it.
Runs on the host of the box that stands for the user's computer, for a cluster that `icom provision` has made there.
The nodes' keys, names and ways to each other are made for real; the profile and the health check, which import PyTorch
on all nodes, are left to tests/provisioning/test_bake.py.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console

from icom.errors import IcomError
from provisioning import bootstrap as set_up_steps
from provisioning.aws import connect, filters
from provisioning.cluster import find_nodes
from provisioning.folder import folder_of, name_before_launch
from provisioning.progress import Progress
from provisioning.script import Script
from provisioning.ssh import Login, SshTransport

FAULTS = {"error": "no such luck", "broken connection": "the connection broke"}
"""Fault -> what is told of it. What the second leaves behind at a step is what the first would at the next one:
every third step meets it."""


def main(cluster: str) -> None:
    aws = connect(None, None)
    nodes = tuple(find_nodes(aws, filters(tag_cluster=cluster)))
    login = Login(folder := folder_of(aws.account, aws.region, cluster), "root", folder.key)

    def forget_that_keys_were_replaced() -> None:
        for node in nodes:
            name = name_before_launch(node.run, node.role)
            folder.forget(name, str(folder.host_key(name)))
            folder.remember([name], str(folder.host_key(node.id)))

    def attempt(at: int, fault: str) -> int:
        """How many steps were begun."""
        begun = 0

        def faulty(node: SshTransport, command: str | Script, **options: Any) -> str:
            nonlocal begun
            begun += 1
            if begun - 1 == at:
                if fault == "error":
                    command = "echo no such luck >&2; exit 3"
                else:
                    run(node, command, **options)
                    node.connection.client.get_transport().sock.close()
                    node.connection.open = lambda: None  # fabric connects anew where it notices before it sends
                    command = "true"
            return run(node, command, **options)

        run, SshTransport.run = SshTransport.run, faulty  # type: ignore[assignment, method-assign]
        try:
            set_up_steps.bootstrap(login, nodes, 0, 0.5, Progress(Console(quiet=True)), lambda: None)
        finally:
            SshTransport.run = run  # type: ignore[method-assign]
        return begun

    set_up_steps.give_environment = set_up_steps.check_health = lambda *arguments: None
    pause = time.sleep
    time.sleep = lambda seconds: pause(min(seconds, 0.1))
    forget_that_keys_were_replaced()
    steps = attempt(-1, "")
    for at in range(steps):
        for fault, says in FAULTS.items() if at % 3 == 0 else [*FAULTS.items()][:1]:
            forget_that_keys_were_replaced()
            try:
                attempt(at, fault)
                raise AssertionError(f"{fault} at step {at} was not told")
            except IcomError as error:
                assert says in str(error), error
                assert any(node.id in str(error) for node in nodes), error
        attempt(-1, "")
        for node in nodes:
            assert len(folder.host_keys(node.id)) == 1, folder.known_hosts.read_text()
    print(f"{steps} ssh steps, at each an error, at every third a broken connection too: the next set-up completed all")


if __name__ == "__main__":
    main(sys.argv[1])

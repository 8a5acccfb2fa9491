"""What a failed `icom provision` tells, and leaves for who looks.

Guards provisioning.provision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from icom.errors import IcomError
from provisioning import launches
from provisioning.aws import Aws
from tests.support.ec2 import Nodes, output_of
from tests.support.wire import Icom, Wire


@pytest.fixture
def nodes_die(ec2: Any, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The instances of a cluster stop while they are waited for."""

    def die(cluster: str) -> None:
        wait_for = launches.wait_for

        def in_vain(aws: Aws, wanted: str, ids: Collection[str], minutes: float) -> None:
            ec2.stop_instances(InstanceIds=[node["InstanceId"] for node in nodes(cluster)])
            wait_for(aws, wanted, ids, minutes)

        monkeypatch.setattr(launches, "wait_for", in_vain)

    return die


@pytest.mark.parametrize(("unsupported", "shown"), [(0, True), (1, True), (1000, False)])
def test_console_of_a_node_that_died(
    unsupported: int, shown: bool, provision: Icom, wire: Wire, nodes_die: Callable[[str], None]
) -> None:
    """Also where only the buffered console can be had; without one the message is as it was."""
    nodes_die("dying")
    wire.only, wire.fault, wire.times = "ec2:GetConsoleOutput", "code:UnsupportedOperation", unsupported
    result = provision("--cluster", "dying")
    assert result.code == 1
    assert "Not running: i-" in result.err
    assert ("The end of the console of i-" in result.err) == shown
    assert len(result.err.strip().splitlines()) == (12 if shown else 1), result.err
    assert "Nothing of it is left" in result.out


def test_ssh_knows_the_nodes_after_a_failure(
    icom: Icom, nodes: Nodes, moto: str, wire: Wire, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*arguments: Any) -> None:
        raise IcomError("no such luck")

    monkeypatch.setattr("provisioning.provision.bootstrap", fail)
    arguments = ("--cluster", "kept", "--keep_on_failure", "--no_bake", "--address_url", f"{moto}/address")
    assert icom("provision", "--yes", *arguments).code == 1
    (config,) = (tmp_path / "clusters").rglob("kept/ssh_config")
    (node,) = nodes("kept")
    assert (
        f"hostname {node['PublicIpAddress']}" in output_of("ssh", "-G", "-F", config, "icom-kept-master").splitlines()
    )

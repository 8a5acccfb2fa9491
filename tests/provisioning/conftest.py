"""moto's server in a process of its own, and ears and hands in botocore: what was called, and faults at will."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.box import Box, make_box
from tests.support.ec2 import REGION
from tests.support.fake_ssh import Steps, connector
from tests.support.wire import Icom, Wire, read_descriptions_once


@pytest.fixture
def empty(moto: str) -> Callable[[], None]:
    """Let moto forget everything. It never forgets ended instances by itself, and looks through all of them."""

    def forget() -> None:
        with urllib.request.urlopen(urllib.request.Request(f"{moto}/moto-api/reset", method="POST")) as answer:
            assert answer.status == 200

    return forget


@pytest.fixture
def wire(moto: str, empty: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Wire:
    """This process speaks to moto, and tells what it says."""
    import boto3

    empty()
    wire = Wire()
    loader = read_descriptions_once(monkeypatch)

    class Session(boto3.session.Session):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._session.register_component("data_loader", loader)
            self.events.register("provide-client-params", wire.parameters)
            self.events.register("before-call", wire.before_call)
            self.events.register("before-send", wire.before_send)
            self.events.register("after-call", wire.after_call)

    monkeypatch.setattr("boto3.session.Session", Session)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    environment = {
        "AWS_ENDPOINT_URL": moto,
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": REGION,
        "AWS_CONFIG_FILE": str(tmp_path / "no-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "no-credentials"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "ICOM_CLUSTERS_DIR": str(tmp_path / "clusters"),
        "HOME": str(tmp_path / "home"),
        "COLUMNS": "200",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # waits and backoff: counted, not slept
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # no test pulls the plug

    def exit_at_once(code: int) -> None:
        raise SystemExit(code)  # what a process that is gone would be to the one that started it

    monkeypatch.setattr("icom.signals.os._exit", exit_at_once)
    return wire


@pytest.fixture
def ec2(wire: Wire, moto: str) -> Any:
    """A client to look at moto with, whose calls are not recorded."""
    import botocore.session

    session = botocore.session.Session()
    return session.create_client("ec2", region_name=REGION, endpoint_url=moto)


@pytest.fixture
def left(ec2: Any) -> Callable[[str], list[str]]:
    """What carries a cluster's tag and is alive, by moto's own books."""

    def look(cluster: str) -> list[str]:
        tags = ec2.describe_tags(Filters=[{"Name": "key", "Values": ["icom:cluster"]}])["Tags"]
        ids = {tag["ResourceId"] for tag in tags if tag["Value"] == cluster}
        mine = [{"Name": "tag:icom:cluster", "Values": [cluster]}]
        reservations = ec2.describe_instances(Filters=mine)["Reservations"]
        ended = {i["InstanceId"] for r in reservations for i in r["Instances"] if i["State"]["Name"] == "terminated"}
        return sorted(ids - ended)

    return look


@pytest.fixture
def provision(icom: Icom, wire: Wire, moto: str) -> Icom:
    """Run `icom provision --yes` with the address service of the moto process; its instances have no ssh."""
    return lambda *options: icom("provision", "--yes", "--no_setup", "--address_url", f"{moto}/address", *options)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """What icom asks of nodes by ssh; they say yes."""
    steps = Steps()
    monkeypatch.setattr("provisioning.ssh.connect", connector(steps))
    monkeypatch.setattr("provisioning.transport.CLOCK", steps.clock)
    monkeypatch.setattr("provisioning.transport.PAUSE", steps.pause)
    monkeypatch.setattr("provisioning.project.archive", lambda: b"")
    monkeypatch.setattr("provisioning.project.digest", lambda: "content")
    return steps


@pytest.fixture
def make(icom: Icom, wire: Wire, moto: str, steps: Steps) -> Icom:
    """`icom provision --yes`, image and set-up included, with nodes that say yes."""
    return lambda *options: icom("provision", "--yes", "--address_url", f"{moto}/address", *options)


@pytest.fixture
def nodes(ec2: Any) -> Callable[[str], list[dict[str, Any]]]:
    """Instances of a cluster that are not terminated, by moto's books."""

    def look(cluster: str) -> list[dict[str, Any]]:
        mine = [{"Name": "tag:icom:cluster", "Values": [cluster]}]
        reservations = ec2.describe_instances(Filters=mine)["Reservations"]
        return [i for r in reservations for i in r["Instances"] if i["State"]["Name"] != "terminated"]

    return look


@pytest.fixture
def box(tmp_path: Path, hosts_possible: None) -> Iterator[Box]:
    """EC2 with hosts behind it."""
    with make_box(tmp_path) as made:
        yield made

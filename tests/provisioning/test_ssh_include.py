"""The Include in ~/.ssh/config, on a host with a home of its own: what counts is what ssh itself then says.

Guards provisioning.sshinclude.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from provisioning.cluster import Node, role_names
from provisioning.folder import SSH_CONFIGS, ClusterFolder
from tests.support.command import ROOT
from tests.support.hosts import HOME, Host, cluster

CONFIG = HOME / ".ssh/config"
CLUSTERS = HOME / "my data/icom/clusters"
OWN = b"# mine\r\nHost *\n  User me\n\nHost far\n\tHostName 192.0.2.9"  # no newline at its end


@pytest.fixture(scope="module")
def laptop(hosts_possible: None) -> Iterator[Host]:
    with cluster(1) as hosts:
        yield hosts[0]


@pytest.fixture
def config(laptop: Host) -> Path:
    """~/.ssh/config of the laptop; there is none."""
    path = laptop.path(CONFIG)
    path.unlink(missing_ok=True)
    return path


def call(laptop: Host, function: str, home: Path = HOME) -> str:
    """Run a function of the module, with umask 002, as many have it; what it complained of."""
    code = f"import os; os.umask(0o002); os.environ['HOME'] = '{home}'; from provisioning import sshinclude as module"
    variables = {name: value for name, value in os.environ.items() if name != "ICOM_CLUSTERS_DIR"}
    variables["XDG_DATA_HOME"] = str(HOME / "my data")
    done = laptop.run([sys.executable, "-c", f"{code}; module.{function}()"], variables, ROOT)
    assert (done.returncode, done.stdout) == (0, "")
    return done.stderr


@pytest.fixture
def make(laptop: Host) -> Iterator[Callable[[str, str], ClusterFolder]]:
    """Write the ssh config of a cluster of two nodes, at an address."""
    made: list[ClusterFolder] = []

    def make(name: str, address: str) -> ClusterFolder:
        levels = SSH_CONFIGS.count("*") - 1
        folder = ClusterFolder(laptop.path(CLUSTERS).joinpath(*["x"] * levels, name))
        folder.client_key()
        now = datetime.now(timezone.utc)
        nodes = tuple(
            Node(f"i-{name}-{role}", role, "", "running", "", "", "", "", "", address, None, spot=False, since=now)
            for role in role_names(2)
        )
        folder.write_ssh_config(nodes, "ubuntu", CLUSTERS / "key")
        made.append(folder)
        return folder

    yield make
    for folder in made:
        folder.remove()


def ssh(laptop: Host, name: str) -> dict[str, str]:
    """What ssh would do for a name, without connecting."""
    done = laptop.run(["ssh", "-G", name])
    assert done.returncode == 0, done
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


def test_ssh_finds_all_clusters_by_one_line(
    laptop: Host, config: Path, make: Callable[[str, str], ClusterFolder]
) -> None:
    config.write_bytes(OWN)
    config.chmod(0o640)
    first, second = make("one", "192.0.2.1"), make("two", "192.0.2.2")
    for _ in range(2):
        assert call(laptop, "add_include") == ""
    lines = config.read_bytes()
    assert lines.endswith(OWN) and lines.count(b"\n") == OWN.count(b"\n") + 1
    assert config.stat().st_mode & 0o777 == 0o640
    for name, address, node in (
        ("icom-one", "192.0.2.1", "i-one-master"),
        ("icom-one-master", "192.0.2.1", "i-one-master"),
        ("icom-two", "192.0.2.2", "i-two-master"),
        ("icom-two-worker-1", "192.0.2.2", "i-two-worker-1"),
    ):
        found = ssh(laptop, name)
        assert (found["hostname"], found["hostkeyalias"], found["user"]) == (address, node, "ubuntu")
        assert found["stricthostkeychecking"] == "true"
    assert ssh(laptop, "far")["hostname"] == "192.0.2.9"
    assert ssh(laptop, "far")["user"] == "me"

    first.remove()
    call(laptop, "remove_include_if_unused")
    assert config.read_bytes() == lines
    second.remove()
    for _ in range(2):
        assert call(laptop, "remove_include_if_unused") == ""
    assert config.read_bytes() == OWN
    assert config.stat().st_mode & 0o777 == 0o640


def test_no_config_before_none_after(laptop: Host, config: Path, make: Callable[[str, str], ClusterFolder]) -> None:
    config.parent.rename(config.parent.with_name("put-aside"))
    try:
        folder = make("one", "192.0.2.1")
        call(laptop, "add_include")
        assert (config.parent.stat().st_mode & 0o777, config.stat().st_mode & 0o777) == (0o700, 0o600)
        assert ssh(laptop, "icom-one")["hostname"] == "192.0.2.1"
        folder.remove()
        call(laptop, "remove_include_if_unused")
        assert not config.exists()
        config.parent.rmdir()
    finally:
        config.parent.with_name("put-aside").rename(config.parent)


def test_link_stays_a_link(laptop: Host, config: Path, make: Callable[[str, str], ClusterFolder]) -> None:
    (real := laptop.path(HOME / "dotfiles")).write_bytes(OWN)
    config.symlink_to("../dotfiles")
    folder = make("one", "192.0.2.1")
    call(laptop, "add_include")
    assert config.is_symlink() and real.read_bytes() != OWN
    assert ssh(laptop, "icom-one")["hostname"] == "192.0.2.1"
    folder.remove()
    call(laptop, "remove_include_if_unused")
    assert config.is_symlink() and real.read_bytes() == OWN


def test_config_that_cannot_be_written_is_a_warning(
    laptop: Host, config: Path, make: Callable[[str, str], ClusterFolder]
) -> None:
    make("one", "192.0.2.1")
    config.mkdir()
    try:
        assert "cannot write" in call(laptop, "add_include")
        assert "ssh looks in" in call(laptop, "add_include", Path("/nowhere"))
    finally:
        config.rmdir()

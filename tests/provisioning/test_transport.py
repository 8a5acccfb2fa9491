"""What all ways to a node do alike: to this machine, and over an ssh behind which is a shell. test_login.py has fabric.

Guards provisioning.transport, openssh and script.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from icom.errors import IcomError
from provisioning.openssh import OpenSsh
from provisioning.script import script
from provisioning.transport import LocalTransport, Transport

HOSTILE = "it's $(touch PWNED) `touch PWNED` \"; touch PWNED; \n-n ü"


@pytest.fixture(params=["local", "openssh"])
def node(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Transport:
    """A node called `the node`, whose home folder is `home`."""
    (home := tmp_path / "home").mkdir()
    (commands := tmp_path / "bin").mkdir()
    (commands / "ssh").write_text(f'#!/bin/bash\ncd {home}\nexec bash -c "${{!#}}"\n')
    (commands / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(home))
    return LocalTransport("the node") if request.param == "local" else OpenSsh(tmp_path / "config", "the node")


def test_commands_run_at_home_and_errors_name_the_node(node: Transport, tmp_path: Path) -> None:
    assert node.run("pwd").strip() == str(tmp_path / "home")
    with pytest.raises(IcomError, match=r"^the node: exit code 3 of: echo a >&2; exit 3\n  a$"):
        node.run("echo a >&2; exit 3")
    with pytest.raises(IcomError, match=r"^Asking failed on the node \(exit code 4\)\.\n  \(no output\)$"):
        node.run("exit 4", doing="Asking")
    with pytest.raises(IcomError, match=r"^the node: no end after 0\.2 s of: echo"):
        node.run("echo; exec sleep 36000", seconds=0.2)


@pytest.mark.parametrize("why", [KeyboardInterrupt, IcomError])
def test_what_stops_a_call_ends_the_step(why: type[BaseException], node: Transport, tmp_path: Path) -> None:
    """Ctrl-C, or what `check` raises: nothing is left running."""
    pid = tmp_path / "home/pid"

    def check() -> None:
        if pid.exists() and pid.read_text().endswith("\n"):
            raise why("stopped")

    node.check = check
    with pytest.raises(why, match=r"^stopped$"):
        node.run("echo $$ > pid; exec sleep 36000")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_files_arrive_whole(node: Transport, tmp_path: Path) -> None:
    (source := tmp_path / "source").write_bytes(content := os.urandom(300_000))
    (home := tmp_path / "home").joinpath("hosts").write_text("another one, and longer")
    node.send({"hosts": b"localhost\n", "a b ü": source, "empty": b""})
    arrived = {path.name: path.read_bytes() for path in home.iterdir()}
    assert arrived == {"hosts": b"localhost\n", "a b ü": content, "empty": b""}
    with pytest.raises(IcomError, match="missing"):
        node.send({"x": tmp_path / "missing"})


def test_arguments_of_a_script_are_no_part_of_it(node: Transport, tmp_path: Path) -> None:
    (tmp_path / "home/.ssh").mkdir()
    for _ in range(2):
        node.run(script("include_ssh_config", line := HOSTILE.replace("\n", " ")))
    assert (tmp_path / "home/.ssh/config").read_text() == f"{line}\n"
    node.run(script("keep_files", "nothing", HOSTILE))
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == [".ssh"]

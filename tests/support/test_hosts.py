"""The hosts themselves: what they have of their own, what can happen to them, and that nothing of them stays.

Guards tests/support/hosts.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.command import ROOT
from tests.support.hosts import HOME, Cluster, Host, HostKey, cluster
from tests.support.namespaces import ClusterError
from tests.support.waiting import wait_until

ENV = {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
pytestmark = pytest.mark.usefixtures("hosts_possible")

QUICK_SSH = ["ssh", "-o", "ConnectTimeout=2"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster(2) as made:
        yield made


def output(host: Host, *words: str | Path) -> str:
    done = host.run(words, ENV)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_each_is_a_machine_of_its_own(hosts: Cluster) -> None:
    first, second = hosts
    assert [output(host, "hostname") for host in hosts] == ["node0", "node1"]
    assert output(first, "getent", "hosts", "node0").split() == [first.address, "node0"]  # not 127.0.0.1
    assert set(output(first, "ls", "/sys/class/net").split()) == {"lo", "eth0"}
    assert output(first, "ps", "-e", "-o", "comm=").split() == ["cat", "sshd", "ps"]
    for place in ("/tmp", "/dev/shm", HOME):
        output(first, "touch", f"{place}/here")
        assert first.path(f"{place}/here").exists()
        assert not second.path(f"{place}/here").exists()
        assert not Path(place, "here").exists()
    assert first.path(ROOT / "pyproject.toml").read_text() == (ROOT / "pyproject.toml").read_text()


def test_ssh_works_by_name_between_all_and_to_a_host_that_came_later(hosts: Cluster) -> None:
    key = HostKey.new()
    late = hosts.add("late", key)
    for host in hosts:
        for other in hosts:
            assert output(host, "ssh", other.name, "hostname; pwd").split() == [other.name, str(HOME)]
    scanned = output(hosts[0], "ssh-keyscan", "-t", "ed25519", "late")
    assert scanned.endswith(key.public.strip())
    # Another key than the one that the others know is a stranger.
    late.path("/run/ssh/host_key").write_text(HostKey.new().private)
    late.kill_sshd()
    late.start_sshd()
    refused = hosts[0].run(["ssh", "late", "hostname"], ENV)
    assert refused.returncode == 255 and "IDENTIFICATION HAS CHANGED" in refused.stderr


def test_sshd_and_link_can_fail_and_come_back(hosts: Cluster) -> None:
    first, second = hosts[0], hosts[1]
    session = first.start(["ssh", "node1", "echo begun; exec sleep 1000"], ENV)
    assert session.stdout and session.stdout.readline() == "begun\n"
    assert len(second.kill_sshd()) >= 2  # listener and session
    session.communicate()
    assert session.returncode == 255
    assert first.run([*QUICK_SSH, "node1", "true"], ENV).returncode == 255
    assert second.processes("sleep 1000")  # what a session started outlives sshd
    second.start_sshd()
    assert output(first, "ssh", "node1", "hostname") == "node1"
    second.link_down()
    assert "timed out" in first.run([*QUICK_SSH, "node1", "true"], ENV).stderr
    second.link_up()
    wait_until(lambda: first.run([*QUICK_SSH, "node1", "true"], ENV).returncode == 0)


def test_a_signal_reaches_the_command(hosts: Cluster) -> None:
    with hosts[0].start(["sh", "-c", "trap 'echo caught; exit 3' INT; echo ready; sleep 999 & wait"], ENV) as started:
        assert started.stdout and started.stdout.readline() == "ready\n"
        wait_until(lambda: bool(hosts[0].processes("^sleep 999")))
        assert not hosts[1].processes("^sleep 999")
        started.send_signal(signal.SIGINT)
        assert started.stdout.readline() == "caught\n"
        assert started.wait() == 3
    with pytest.raises(subprocess.TimeoutExpired):
        hosts[0].run(["sleep", "998"], ENV, timeout=0.2)
    assert not hosts[0].processes("^sleep 998")


def test_a_disk_of_its_own_that_can_be_kept(tmp_path: Path) -> None:
    """What a host does to its files, the machine's do not see; a host that starts from its image sees just that."""
    mark = f"icom-test-{os.getpid()}"
    folders = [Path("/etc", mark), Path("/var/log", mark), Path("/root", mark)]
    with ExitStack() as clean:
        for folder in folders:
            clean.callback(shutil.rmtree, folder)
            folder.mkdir()
            (folder / "file").write_text("the machine's")
            (folder / "gone").touch()
        with cluster(0) as machines:
            first = machines.add("first", own_root=True)
            assert output(first, "sh", "-c", "hostname; pwd; cat /proc/1/comm").split() == ["first", "/root", "cat"]
            empty = ("/home", "/root", "/tmp")  # but for what is needed, where that is below them
            needed = [Path(folder).resolve() for folder in (ROOT, sys.prefix, sys.base_prefix)]
            way = {str(Path(*path.parts[:3])) for path in needed if f"/{path.parts[1]}" in empty}
            assert set(output(first, "find", *empty, "-mindepth", "1", "-maxdepth", "1").split()) == way
            for folder in folders[:2]:
                assert output(first, "cat", folder / "file") == "the machine's"
                output(first, "sh", "-c", f"cd {folder} && rm gone && chmod 0600 file && echo more >> file")
            for folder in folders[1:]:
                output(first, "sh", "-c", f"rm -rf {folder} && mkdir {folder} && touch {folder}/new")
            first.run(["touch", ROOT / mark])  # on its own disk, or refused
            first.save(tmp_path / "image")
            machines.remove(first)
            assert [host.name for host in machines] == []

            from_image, fresh = machines.add("from-image", image=tmp_path / "image"), machines.add(own_root=True)
            assert output(from_image, "find", *folders, "-type", "f").split() == [
                *(str(folders[0] / "file"), str(folders[1] / "new"), str(folders[2] / "new")),
            ]
            assert output(from_image, "cat", folders[0] / "file") == "the machine'smore"
            assert output(from_image, "stat", "-c", "%a", folders[0] / "file") == "600"
            assert len(output(fresh, "find", *folders[:2], "-type", "f").split()) == 4
            assert not fresh.path(folders[2]).exists()
            assert output(fresh, "script", "-qec", "tty", "/dev/null").startswith("/dev/pts/")
        for folder in folders:
            assert sorted(file.name for file in folder.iterdir()) == ["file", "gone"]
            assert (folder / "file").read_text() == "the machine's"
        assert not (ROOT / mark).exists()


def test_a_host_that_cannot_be_made_says_why() -> None:
    with cluster(1) as hosts:
        with pytest.raises(ClusterError, match="name too long"):
            hosts.add("x" * 100)
        assert output(hosts[0], "hostname") == "node0"


WAYS_OUT = {
    "the block ends": "",
    "an error in the block": "1 / 0",
    "a host cannot be made": "hosts.add('x' * 100)",
    "Ctrl-C in the block": "print('now', flush=True); time.sleep(1000)",
    "Ctrl-C while hosts are made": "while True: print('now', flush=True); hosts.add()",
    "kill -9": "print('now', flush=True); time.sleep(1000)",
}


@pytest.mark.parametrize("way", WAYS_OUT)
def test_nothing_stays_behind(way: str, hosts: Cluster) -> None:
    """Seen from a host that stands for the machine, where nobody else makes or ends anything."""
    machine = hosts[0]
    script = textwrap.dedent(f"""\
        import time
        from tests.support.hosts import cluster
        with cluster(2) as hosts:
            hosts[0].start(["sh", "-c", "setsid sleep 1000 & exec sleep 1000"])
            session = hosts[0].start(["ssh", "node1", "echo x > /tmp/x; echo begun; sleep 1000"])
            assert session.stdout.readline() == "begun\\n"
            {WAYS_OUT[way]}
        """)

    def state() -> str:
        commands = "ps -e -o comm=; ip -o link; cat /proc/mounts; ls -A /tmp /run /dev/shm /etc/netns; cat /etc/hosts"
        return machine.run(["sh", "-c", commands], ENV).stdout

    before = state()
    assert "sshd" in before and "eth0" in before and "tmpfs /tmp " in before
    process = machine.start([sys.executable, "-c", script], ENV, folder=ROOT)
    number = {"Ctrl": signal.SIGINT, "kill": signal.SIGKILL}.get(way[:4])
    if number:
        assert process.stdout and process.stdout.readline() == "now\n"
        assert state() != before
        for pid in machine.processes("tests.support.hosts"):
            os.kill(pid, number)
    said, _ = process.communicate()
    expected = {"an error": "ZeroDivisionError", "a host c": "name too long", "Ctrl-C i": "KeyboardInterrupt"}
    assert expected.get(way[:8], "") in said
    if number == signal.SIGKILL:  # nobody was left to wait for the end
        wait_until(lambda: state() == before)
    assert state() == before

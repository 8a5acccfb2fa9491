"""`icom provision` from end to end in a box: nodes as it leaves them, and nodes that are not what they should be.

Guards provisioning.bootstrap and remote.
"""

from __future__ import annotations

import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.box import Box, put_host_key, run_sshd
from tests.support.command import ROOT
from tests.support.hosts import HostKey

LATE_RELOAD = '(sleep 1; kill -HUP "$(cat /run/sshd.pid)") > /dev/null 2>&1 < /dev/null &'
"""A systemctl that has told sshd to reload when it returns, and sshd takes its time."""


@pytest.mark.long
def test_three_nodes_that_mpirun_can_use(box: Box, tmp_path: Path) -> None:
    box.install_in_base_image()
    box.put_command_in_base_image("systemctl", LATE_RELOAD)
    with box.start_provision("box", "--count", "3", "--no_bake") as process:
        out, _ = process.communicate()
    assert process.returncode == 0, out
    for told in ("master: booting", "worker-2: making a host key of its own", "all nodes: health: .*"):
        assert re.search(rf"^ +\d+ s  {told}: done in \d+ s$", out, re.MULTILINE), "who did what, how long"
    asked = [line.split()[:2] for line in out.splitlines()[-3:]]
    assert asked == [["icom", "train"], ["icom", "ssh"], ["icom", "teardown"]], "what to type next"
    master, first, second = box.nodes
    assert master.path(master.home / "hosts").read_text() == "localhost\nnode1\nnode2\n"

    # The hosts have keys of their own by now, and the laptop knows these alone.
    (folder,) = (Path(box.environment["ICOM_CLUSTERS_DIR"])).glob("*/*/box")
    known = (folder / "known_hosts").read_text()
    for host in (master, first, second):
        now = host.path("/etc/ssh/ssh_host_ed25519_key.pub").read_text().split()[1]
        (launch,) = (launch for launch in box.launches.values() if launch["address"] == host.address)
        before = yaml.safe_load(launch["user_data"])["ssh_keys"]["ed25519_public"].split()[1]
        assert now != before
        assert sum(line.startswith("i-") and now in line for line in known.splitlines()) == 1
        assert not [line for line in known.splitlines() if line.startswith("i-") and before in line]

    # The private half of the master's key has not left it.
    assert master.path(master.home / ".ssh/id_ed25519").exists()
    for host in (first, second):
        assert not host.path(host.home / ".ssh/id_ed25519").exists()

    mpirun = master.run(["mpirun.mpich", "-iface", "eth0", "-f", "hosts", "-n", "3", "-ppn", "1", "hostname"])
    assert sorted(mpirun.stdout.split()) == sorted(host.name for host in (master, first, second)), mpirun
    by_config = box.laptop.run(["ssh", "-F", folder / "ssh_config", "icom-box-worker-2", "hostname"])
    assert by_config.stdout.strip() == second.name, by_config

    words = [sys.executable, "-m", "icom", "ssh", "--cluster", "box", "worker-1"]
    at_home = box.laptop.run(["sh", "-c", f"echo hostname | {shlex.join(words)}"], box.environment, ROOT)
    assert at_home.stdout.split()[-1] == first.name, at_home

    ran = box.icom("run", "--cluster", "box", "--node", "worker-1", "--", "echo it; echo that >&2; exit 7")
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "it\n", "that\n")
    (pictures := tmp_path / "pictures").mkdir()
    (pictures / "a b.txt").write_text("x")
    assert box.icom("push", "--cluster", "box", str(pictures)).returncode == 0
    assert master.path(master.home / "pictures/a b.txt").read_text() == "x"
    assert box.icom("pull", "--cluster", "box", "pictures", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back/a b.txt").read_text() == "x"

    with box.start_provision("box", "--count", "3", "--no_bake") as again:
        out, _ = again.communicate()
    assert again.returncode == 0, out
    assert "Nothing to do" in out
    assert "made itself" not in out

    # Another host at the address of a worker is told nothing.
    second.kill_sshd()
    put_host_key(second, HostKey.new())
    run_sshd(second)
    with box.start_provision("box", "--count", "3", "--no_bake") as impostor:
        out, _ = impostor.communicate()
    assert impostor.returncode == 1
    assert f"worker-2 at {second.address} is not i-" in out
    assert "Nothing was sent to it" in out

    gone = box.icom("teardown", "--yes", "--cluster", "box")
    assert gone.returncode == 0, gone
    assert box.tagged("box") == []
    assert not folder.exists()


@pytest.mark.long
def test_node_that_cannot_be_reached_takes_everything_with_it(box: Box) -> None:
    """Nobody boots the second instance. The message names it; nothing is left of either."""
    box.do_not_boot(1)
    with box.start_provision("mute", "--count", "2", "--no_bake", "--wait_minutes", "0.05") as process:
        out, _ = process.communicate()
    assert process.returncode == 1
    assert "worker-1 (i-" in out
    assert "cannot be reached by ssh" in out
    assert box.tagged("mute") == []

    # Ctrl-C while it waits for such a node.
    box.do_not_boot(2)
    with box.start_provision("mute", "--count", "1", "--no_bake", "--wait_minutes", "30") as process:
        assert process.stdout
        for line in process.stdout:
            if "waiting for 1 nodes" in line:
                break
        process.send_signal(signal.SIGINT)
        out = process.stdout.read()
        assert process.wait() == 130
    assert "Nothing of it is left" in out
    assert box.tagged("mute") == []


@pytest.mark.long
def test_fault_at_every_ssh_step(box: Box) -> None:
    """A step that fails, a connection that breaks after one: the next call completes the set-up."""
    box.install_in_base_image()
    with box.start_provision("steps", "--count", "2", "--no_bake") as process:
        out, _ = process.communicate()
    assert process.returncode == 0, out
    words = [sys.executable, "-m", "tests.support.faulty_steps", "steps"]
    done = box.laptop.run(words, box.environment, ROOT)
    assert done.returncode == 0, done
    print(done.stdout)

"""Logging in to a host that is not ready for it: a real sshd, which gets its authorized key late or never.

Guards provisioning.ssh.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from provisioning.script import script
from tests.support.command import ROOT
from tests.support.hosts import HOME, cluster

LOG_IN = """
import sys, time
from dataclasses import fields
from pathlib import Path
from provisioning import ssh, transport
from provisioning.cluster import Node
from provisioning.folder import ClusterFolder
address, host_key, limit = sys.argv[1:]
there = {"id": "i-1", "role": "master", "private_ip": address}
node = Node(**{field.name: there.get(field.name) for field in fields(Node)})
ssh.LOGIN_SECONDS = float(limit)
login = ssh.Login(ClusterFolder(Path("/nowhere")), "root", Path.home() / ".ssh/id_ed25519")
tries, connect = 0, ssh.connect
transport.CLOCK = lambda: tries  # a second goes by with each, however busy this machine is
def counted(*arguments):
    global tries
    tries += 1
    print("try", flush=True)
    return connect(*arguments)
ssh.connect = counted
try:
    there = ssh.patient_connect(login, node, 5, lambda: None, [host_key])
    print(there.run("echo in"), tries)
except ssh.IcomError as error:
    sys.exit(f"{error} {tries}")
transport.CLOCK, looks = time.monotonic, 0
def check():
    global looks
    looks += 1
    if looks > 5:
        raise ssh.IcomError("asked to stop")
there.check = check
try:
    there.run("sleep 50")
except ssh.IcomError as error:
    print(error)
"""
STALL = """
there.check = lambda: None
try:
    there.run("echo $$ > shell; sleep 50", seconds=1)
except ssh.IcomError as error:
    print(error)
print("sending", flush=True)
try:
    there.check = lambda: print("piece", flush=True)
    there.send({"big": bytes(1 << 30)}, seconds=30)
except ssh.IcomError as error:
    print(error)
"""


@pytest.mark.long
def test_login_that_is_refused_while_the_node_boots(hosts_possible: None) -> None:
    with cluster(2) as hosts:
        keys = hosts[1].path(HOME / ".ssh/authorized_keys")
        right = keys.read_text()
        keys.write_text("")
        words = [sys.executable, "-c", LOG_IN, hosts[1].address, hosts[1].key.public]
        never = hosts[0].run([*words, "1.5"], folder=ROOT)
        refused, _, tries = never.stderr.strip().rpartition(" ")
        assert "does not let root in" in refused, never
        assert "--ssh_user" in refused
        assert int(tries) > 1
        with hosts[0].start([*words, "30"], folder=ROOT) as late:
            assert late.stdout
            for _ in range(2):  # a second try comes after a refusal
                assert late.stdout.readline() == "try\n"
            keys.write_text(right)
            out, _ = late.communicate()
        assert out.replace("try\n", "").startswith("in\n"), out
        assert out.endswith("asked to stop\n"), "Ctrl-C does not wait for the end of a step"

        with hosts[1].path("/run/ssh/config").open("a") as settings:
            settings.write("Subsystem sftp internal-sftp\n")
        hosts[1].kill_sshd()
        hosts[1].start_sshd()
        words[2] += STALL
        with hosts[0].start([*words, "30"], folder=ROOT) as stalled:
            assert stalled.stdout
            before = list(iter(stalled.stdout.readline, "piece\n"))
            assert stalled.stdout.readline() == "piece\n"  # the first is before sftp begins
            for session in hosts[1].processes("^sshd: root"):
                os.kill(session, signal.SIGSTOP)
            out, _ = stalled.communicate()
        assert "no end after 1 s of: echo $$ > shell; sleep 50" in "".join(before), before
        assert "big could not be written there in 30 s" in out, out[-2000:]


@pytest.mark.parametrize(("status", "code", "shown"), [(0, 0, ""), (1, 1, "broken module\n"), (2, 0, "")])
def test_boot_that_failed_tells_why(status: int, code: int, shown: str, tmp_path: Path) -> None:
    """A cloud-init that answers as the real one does: 1 is an error, 2 is done with warnings."""
    command = tmp_path / "cloud-init"
    command.write_text(f'#!/bin/sh\n[ "$2" = --long ] && echo broken module || echo status: x; exit {status}\n')
    command.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    words = ["sh", "-c", script("wait_for_boot").line]
    done = subprocess.run(words, env={"PATH": path}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", shown)

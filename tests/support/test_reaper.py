"""tests/support/reaper.py, with tests/conftest.py: whatever ends a test run, nothing that it started goes on.

Guards tests/support/reaper.py and tests/conftest.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.command import ROOT, long
from tests.support.waiting import wait_until

HANGING = """
import json, os, pathlib, subprocess, sys, time
from tests.support.command import start_process, train_arguments
from tests.support.hosts import cluster

def test_that_hangs(moto, tmp_path):
    with cluster(1) as hosts:
        there = [
            hosts[0].start(["sh", "-c", "echo ready; exec sleep 36000"]),
            start_process(*train_arguments(output_dir=tmp_path, max_train_steps=10**6)),
            start_process("--version", cold=True),
            subprocess.Popen(["sh", "-c", "setsid sleep 36000 & exec sleep 36000"], start_new_session=True),
        ]
        assert there[0].stdout.readline() == "ready\\n"
        port = int(moto.rsplit(":", 1)[1])
        told = pathlib.Path(os.environ["TOLD"])
        told.with_suffix(".new").write_text(json.dumps({"port": port}))
        told.with_suffix(".new").rename(told)
        time.sleep(36000)
"""


@pytest.mark.usefixtures("hosts_possible")
@pytest.mark.parametrize(
    ("workers", "how"),
    [(1, signal.SIGKILL), long(0, signal.SIGKILL), long(1, signal.SIGTERM), long(0, signal.SIGTERM)],
)
def test_killed_run_leaves_nothing(workers: int, how: signal.Signals, tmp_path: Path) -> None:
    """Processes, started cold, warm or far away, a server with its port, hosts with their namespaces and mounts."""
    told = tmp_path / "told"
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", *nested(tmp_path, HANGING), *(["-n", str(workers)] if workers else [])],
        cwd=ROOT,
        env=os.environ | {"TOLD": str(told)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_until(lambda: told.exists() or run.poll() is not None)
    assert run.poll() is None, run.communicate()[0]
    port = json.loads(told.read_text())["port"]
    assert listens(port)
    below = psutil.Process(run.pid).children(recursive=True)
    # The reaper, moto's server, the template and its fork, the host's and the two that sleep.
    assert len(below) >= 7
    spaces = {space for process in below if (space := network_of(process))} - {network_of(psutil.Process())}
    assert len(spaces) >= 2  # the switch's and the host's
    run.send_signal(how)
    run.communicate()
    wait_until(lambda: not any(alive(process) for process in below))
    assert not listens(port)
    wait_until(lambda: not spaces & {network_of(process) for process in psutil.process_iter()})


def nested(folder: Path, test: str) -> list[str | Path]:
    """Arguments of a pytest that runs a test of this text as one of this project's."""
    (folder / "test_nested.py").write_text(test)
    plugins = [word for name in ("tests.conftest", "tests.provisioning.conftest") for word in ("-p", name)]
    own = ["-o", f"cache_dir={folder / 'cache'}", f"--basetemp={folder / 'base'}", f"--rootdir={ROOT}"]
    return ["-q", folder / "test_nested.py", "-c", ROOT / "pyproject.toml", *own, *plugins]


def listens(port: int) -> bool:
    return any(c.laddr.port == port for c in psutil.net_connections("tcp4") if c.status == psutil.CONN_LISTEN)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def network_of(process: psutil.Process) -> str:
    """Its network namespace; nothing once it has ended."""
    try:
        return str(Path(f"/proc/{process.pid}/ns/net").readlink())
    except OSError:
        return ""


LEAVES = """
import subprocess
from tests import conftest

def test_that_leaves_something():
    conftest.ENDS_WITHIN = 1
    subprocess.run(["sh", "-c", "exec setsid sleep 36000 &"], check=True)
"""


@pytest.mark.long
def test_leaving_something_fails_the_run(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pytest", *nested(tmp_path, LEAVES)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done
    (told,) = (line for line in done.stdout.splitlines() if line.startswith("left behind by the tests, and killed: "))
    assert told.endswith(" sleep 36000")
    assert not Path("/proc", told.split(": ")[1].split()[0], "exe").exists()  # a zombie has none

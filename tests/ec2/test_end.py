"""--max_hours: what a node does at boot, and one end for all nodes of a cluster."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import pytest
import yaml

from provisioning.hostkeys import KeyPair
from provisioning.userdata import user_data

SYSTEMCTL = '#!/bin/sh\necho "$*" >> "$(dirname "$0")/calls"\n'


def test_timer_is_armed_early_in_the_boot(tmp_path: Path) -> None:
    """The script of bootcmd, run twice with its files in another place, and a systemctl that writes down its calls."""
    data = yaml.safe_load(user_data(KeyPair("x", "ssh-ed25519 x"), None, datetime(2031, 5, 6, 7, 8, 9, 5, timezone.utc)))
    assert not {"runcmd", "write_files"} & set(data), "these come late in the boot"
    ((shell, flag, script),) = data["bootcmd"]
    (units := tmp_path / "etc/systemd/system").mkdir(parents=True)
    (commands := tmp_path / "bin").mkdir()
    (commands / "systemctl").write_text(SYSTEMCTL)
    (commands / "systemctl").chmod(0o755)
    moved = script.replace("/etc/systemd", f"{tmp_path}/etc/systemd").replace("/var/lib", f"{tmp_path}/var/lib")
    environment = {"PATH": f"{commands}:{os.environ['PATH']}"}
    for _ in range(2):
        subprocess.run([shell, flag, moved], env=environment, check=True)
    calls = (commands / "calls").read_text().splitlines()
    once = ["daemon-reload", "enable icom-end.timer", "start --no-block icom-end.timer"]
    assert calls == once * 2, "without --no-block the boot waits for itself"
    # systemd takes the stamp's time as the last run: a first boot after the end is then a run that was missed.
    assert (tmp_path / "var/lib/systemd/timers/stamp-icom-end.timer").stat().st_mtime < 10**9
    timer = units / "icom-end.timer"
    assert "Persistent=true" in timer.read_text().splitlines()
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on this machine")
    (when,) = re.findall("OnCalendar=(.*)", timer.read_text())
    shown = subprocess.run(["systemd-analyze", "calendar", when], capture_output=True, text=True, check=True).stdout
    assert "Tue 2031-05-06 07:08:09 UTC" in shown
    verified = subprocess.run(["systemd-analyze", "verify", timer], capture_output=True, text=True, check=False)
    assert "icom-end" not in verified.stderr, verified

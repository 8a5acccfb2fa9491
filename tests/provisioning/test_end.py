"""--max_hours: what a node does at boot, and one end for all nodes of a cluster.

Guards provisioning.userdata and on_node.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

from provisioning.hostkeys import KeyPair
from provisioning.userdata import user_data
from tests.support.ec2 import Nodes, tags
from tests.support.ec2 import user_data as user_data_of
from tests.support.wire import Icom

SYSTEMCTL = '#!/bin/sh\necho "$*" >> "$(dirname "$0")/calls"\n'


def test_timer_is_armed_early_in_the_boot(tmp_path: Path) -> None:
    """The script of bootcmd, run twice with its files in another place, and a systemctl that writes down its calls."""
    data = yaml.safe_load(
        user_data(KeyPair("x", "ssh-ed25519 x"), None, datetime(2031, 5, 6, 7, 8, 9, 5, timezone.utc))
    )
    assert not {"runcmd", "write_files"} & set(data), "these come late in the boot"
    ((shell, flag, script, *arguments),) = data["bootcmd"]
    (units := tmp_path / "etc/systemd/system").mkdir(parents=True)
    (commands := tmp_path / "bin").mkdir()
    (commands / "systemctl").write_text(SYSTEMCTL)
    (commands / "systemctl").chmod(0o755)
    moved = script.replace("/etc/systemd", f"{tmp_path}/etc/systemd").replace("/var/lib", f"{tmp_path}/var/lib")
    environment = {"PATH": f"{commands}:{os.environ['PATH']}"}
    for _ in range(2):
        subprocess.run([shell, flag, moved, *arguments], env=environment, check=True)
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


@pytest.mark.long
def test_nodes_that_are_added_end_with_the_others(provision: Icom, icom: Icom, ec2: Any, nodes: Nodes) -> None:
    """Whatever --max_hours says by then; the timer and the tag of every node say the same."""
    assert provision("--cluster", "ending", "--max_hours", "5").code == 0
    (master,) = nodes("ending")
    end = datetime.strptime(tags(master)["icom:ends"], "%Y-%m-%dT%H:%M:%SZ")
    assert timedelta(hours=4.9) < end - master["LaunchTime"].replace(tzinfo=None) <= timedelta(hours=5)
    for count, options in enumerate(([], ["--max_hours", "99"], ["--max_hours", "5"]), 2):
        grown = provision("--cluster", "ending", "--count", str(count), *options)
        assert grown.code == 0, grown.err
        said = " ".join(grown.out.split())
        assert f"Ends: {end:%Y-%m-%d %H:%M} UTC (as the nodes that are there" in said
        assert ("--max_hours has no effect" in said) == bool(options)
    made = nodes("ending")
    assert len(made) == 4
    assert {tags(node)["icom:ends"] for node in made} == {f"{end:%Y-%m-%dT%H:%M:%SZ}"}
    for node in made:
        assert f"OnCalendar={end:%Y-%m-%d %H:%M:%S} UTC" in str(user_data_of(ec2, node["InstanceId"])["bootcmd"])
        behaviour = ec2.describe_instance_attribute(
            InstanceId=node["InstanceId"], Attribute="instanceInitiatedShutdownBehavior"
        )
        assert behaviour["InstanceInitiatedShutdownBehavior"]["Value"] == "terminate"
    assert "Nothing to do" in provision("--cluster", "ending", "--count", "4", "--max_hours", "5").out
    assert f"ends {end:%Y-%m-%d %H:%M} UTC" in " ".join(icom("status", "--cluster", "ending").out.split())


def test_nodes_without_an_end_get_none(provision: Icom, nodes: Nodes, ec2: Any) -> None:
    assert provision("--cluster", "endless").code == 0
    refused = provision("--cluster", "endless", "--count", "2", "--max_hours", "5")
    assert refused.code == 2
    assert "have no end" in refused.err
    same = provision("--cluster", "endless", "--max_hours", "5")
    assert same.code == 0
    assert "--max_hours has no effect" in " ".join(same.out.split())
    (master,) = nodes("endless")
    assert "icom:ends" not in tags(master)
    ec2.create_tags(Resources=[master["InstanceId"]], Tags=[{"Key": "icom:ends", "Value": "2020-01-02T03:04:05Z"}])
    late = provision("--cluster", "endless", "--count", "2")
    assert late.code == 2
    assert "2020-01-02 03:04 UTC" in late.err

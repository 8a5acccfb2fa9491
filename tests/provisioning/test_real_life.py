"""tests/support/real_life.py removes what it made, whatever happens: it is what runs on AWS, for money.

Guards tests/support/real_life.py.
"""

from __future__ import annotations

import re
import signal
import sys

import pytest

from tests.support.box import Box
from tests.support.command import ROOT
from tests.support.hosts import Command


def start(box: Box, name: str, *options: str) -> Command:
    arguments = ["--yes", "--cluster", name, "--private_ip", "--ssh_user", "root", "--subnet", box.subnet, *options]
    return box.laptop.start([sys.executable, "-m", "tests.support.real_life", *arguments], box.environment, ROOT)


@pytest.mark.long
def test_nothing_is_left_whatever_happens(box: Box) -> None:
    """The nodes never boot. What `icom provision` made stays when it fails, so that teardown has something to do."""
    for number in range(9):
        box.do_not_boot(number)
    with start(box, "unlucky", "--keep_on_failure", "--wait_minutes", "0.01") as process:
        out, _ = process.communicate()
    assert process.returncode == 1, out
    assert "At most 4.00 USD" in out
    assert "Kept what was made of unlucky" in out
    assert "real_life: exit code 1 from icom provision" in out
    assert box.tagged("unlucky") == []

    # A signal, to the script alone.
    with start(box, "stopped", "--keep_on_failure") as process:
        assert process.stdout
        for line in process.stdout:
            if re.search(r": i-[0-9a-f]+ in ", line):  # the first instance
                break
        process.send_signal(signal.SIGTERM)
        out = process.stdout.read()
        assert process.wait() == 1
    assert "Kept what was made of stopped" in out
    assert "real_life: SIGTERM came during icom provision" in out
    assert box.tagged("stopped") == []

    # A cluster that was there before is somebody's.
    with box.start_provision("mine", "--no_setup") as process:
        process.communicate()
    before = box.tagged("mine")
    with start(box, "mine") as process:
        out, _ = process.communicate()
    assert process.returncode == 1
    assert "mine exists" in out
    assert len(before) > 3
    assert box.tagged("mine") == before

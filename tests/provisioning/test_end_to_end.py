"""A cluster's whole life: the very script that runs on AWS, tests/support/real_life.py, in the box.

Guards all of provisioning.
"""

from __future__ import annotations

import sys

import pytest

from tests.support.box import NODES, Box
from tests.support.command import ROOT


@pytest.mark.long
def test_life_of_a_cluster(box: Box) -> None:
    """Plan, nodes, a training over three of them by mpirun, its embedding here, and nothing left."""
    options = ["--yes", "--cluster", "life", *NODES, "--subnet", box.subnet]
    words = [sys.executable, "-m", "tests.support.real_life", *options]
    done = box.laptop.run(words, box.environment, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All of it worked, and nothing is left." in done.stdout
    assert "3 processes on 3 hosts" in done.stdout
    builder, *nodes = box.launches.values()
    assert len(nodes) == 3
    assert builder["image"] not in {node["image"] for node in nodes}
    assert box.nodes == []
    assert box.tagged("life") == []

"""Several processes in a pod, one for each GPU: their places, and what comes of their ends.

Guards icom.launch.processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import ROOT, train_arguments
from tests.support.ranks import SWITCHES, free_port

SHOW = """
import os
from icom.parallel.place import find_place
place = find_place(os.environ)
said = (place.rank, place.world_size, place.local_rank, place.local_size, place.master_address, place.master_port)
os.write(1, (" ".join(map(str, said)) + "\\n").encode())  # at once: another process writes too
"""
JOB = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "icom-0.icom", "MASTER_PORT": "29511"}
TRAINER = {
    **{"PET_NODE_RANK": "1", "PET_NNODES": "3", "PET_NPROC_PER_NODE": "1", "JOB_COMPLETION_INDEX": "1"},
    **{"PET_MASTER_ADDR": "icom-0.icom", "PET_MASTER_PORT": "29511"},
}
OPERATOR = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "icom-0.icom", "MASTER_PORT": "29511"}


def start(count: str, *command: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "icom.launch.processes", count, *command],
        env={name: value for name, value in os.environ.items() if name not in SWITCHES} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def code_of(*lines: str) -> int:
    """Of two processes, which run a line of shell each."""
    case = f"case $LOCAL_RANK in 0) {lines[0]};; 1) {lines[1]};; esac"
    process = start("2", "sh", "-c", case)
    process.communicate()
    return process.returncode


@pytest.mark.parametrize("pod", [JOB, TRAINER, OPERATOR], ids=["job", "trainjob", "pytorchjob"])
def test_places_in_the_second_of_three_pods(pod: dict[str, str]) -> None:
    out, err = start("2", sys.executable, "-c", SHOW, **pod).communicate()
    assert sorted(out.splitlines()) == ["2 6 0 2 icom-0.icom 29511", "3 6 1 2 icom-0.icom 29511"], err


def test_ends_with_the_code_of_the_first_that_failed() -> None:
    assert code_of("exit 0", "exit 0") == 0
    assert code_of("sleep 1; exit 75", "exit 2") == 2
    assert code_of("exit 75", "sleep 1; exit 1") == 75
    assert code_of("sleep 1; exit 75", "kill -KILL $$") == 137


def test_sigterm_reaches_all() -> None:
    script = "trap 'echo saved; exit 143' TERM; echo ready; while :; do sleep 0.1; done"
    process = start("2", "sh", "-c", script)
    assert process.stdout
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "ready\n"]
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate()
    assert (out, process.returncode) == ("saved\nsaved\n", 143)


@pytest.mark.long
def test_two_processes_of_a_pod_train_together(tmp_path: Path) -> None:
    options = train_arguments(output_dir=tmp_path / "out", backend="cpu")
    process = start("2", sys.executable, "-m", "icom", *options, MASTER_PORT=str(free_port()))
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "total batch 2 (1 x 2 processes over gloo x 1 accumulated)" in " ".join(out.split())
    assert (tmp_path / "out" / "learned_embeds.safetensors").exists()


@pytest.mark.parametrize(
    ("count", "command", "environment", "words"),
    [
        ("0", ["true"], {}, "how many"),
        ("two", ["true"], {}, "how many"),
        ("2", [], {}, "how many"),
        ("2", ["no-such-program"], {}, "Cannot start no-such-program"),
        ("2", ["true"], TRAINER | {"PET_NPROC_PER_NODE": "4"}, "PET_NPROC_PER_NODE asks for 4"),
        ("2", ["true"], OPERATOR | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "each would start 2"),
    ],
)
def test_what_cannot_be_started(count: str, command: list[str], environment: dict[str, str], words: str) -> None:
    process = start(count, *command, **environment)
    _, err = process.communicate()
    assert process.returncode in (1, 2) and words in err and "Traceback" not in err, err

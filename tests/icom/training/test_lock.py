"""icom.training.lock: one run at a time in an output folder.

Guards icom.training.lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from icom.training.checkpoint_folders import list_checkpoints
from tests.support.command import Result, assert_refused, start_process, train_arguments
from tests.support.waiting import wait_until

Train = Callable[..., Result]


@pytest.fixture
def living(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in tmp_path that has a checkpoint and does not end by itself."""
    process = start_process(*train_arguments(output_dir=tmp_path, max_train_steps=10**6, checkpointing_steps=1))
    wait_until(lambda: process.poll() is not None or bool(list_checkpoints(tmp_path)))
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGSTOP)  # else the folder changes while it is compared
    yield process
    process.kill()
    process.communicate()


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_second_run_leaves_a_living_one_alone_and_a_dead_one_holds_nothing(
    train: Train, tmp_path: Path, living: subprocess.Popen[str]
) -> None:
    before = content(tmp_path)
    for options in ({}, {"resume_from_checkpoint": "latest"}):
        result = train(output_dir=tmp_path, **options)
        who = f"Another run is writing to {tmp_path}: process {living.pid} on {socket.gethostname()}, since "
        assert_refused(result, 1, who, "Wait for its end, stop it, or choose another --output_dir.")
        since = re.search(r"since ([-\d]+ [:\d]+ [-+]\d+)\.", result.err)
        assert since
        age = datetime.now(timezone.utc) - datetime.strptime(since[1], "%Y-%m-%d %H:%M:%S %z")
        assert timedelta(seconds=-1) < age < timedelta(hours=1)
        assert content(tmp_path) == before

    living.kill()
    living.communicate()
    step = int(list_checkpoints(tmp_path)[-1].name.removeprefix("checkpoint-"))
    result = train(output_dir=tmp_path, max_train_steps=step + 1, resume_from_checkpoint="latest")
    assert (result.code, f"resumed after step {step}" in result.out) == (0, True)
    assert not list(tmp_path.glob(".*"))  # not even the file that it left


@pytest.mark.parametrize("said", ["", "{", "[1]", '{"pid": 1}', '{"pid": 7, "host": "\\u001b[2J", "since": "?"}'])
def test_holder_that_did_not_say_who_it_is(train: Train, tmp_path: Path, said: str) -> None:
    (tmp_path / ".running").write_text(said)
    with (tmp_path / ".running").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = train(output_dir=tmp_path)
    who = "process 7" if "7" in said else "a process that did not leave its name"
    assert_refused(result, 1, f"Another run is writing to {tmp_path}: {who}.")
    assert "\x1b[2J" not in result.err


def test_file_system_without_locks_is_no_obstacle(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    result = train(output_dir=tmp_path)
    assert result.code == 0
    assert f"{tmp_path / '.running'} cannot be locked (No locks available): take care that no other" in result.err


def test_a_lock_on_a_removed_file_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder ends between a second run's opening of the file and its locking, and a third run comes."""
    from icom.training.lock import only_run_in

    flock = fcntl.flock
    held = only_run_in(tmp_path)
    held.__enter__()
    third = only_run_in(tmp_path)

    def late(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        held.__exit__(None, None, None)
        third.__enter__()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(Exception, match=f"process {os.getpid()} on"), only_run_in(tmp_path):
        pass
    assert json.loads((tmp_path / ".running").read_text())["pid"] == os.getpid()
    third.__exit__(None, None, None)
    assert not list(tmp_path.iterdir())

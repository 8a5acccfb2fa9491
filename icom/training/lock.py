"""One run at a time in an output folder: a lock that ends with the process that holds it, however that ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from icom.errors import IcomError

RUNNING = ".running"
"""The file in --output_dir that is locked; it says who does. One that nobody has locked means nothing."""
_LARGEST = 4096


@contextmanager
def only_run_in(output: Path) -> Iterator[None]:
    """Keep other runs out of `output`. Where the file system has no locks, the run goes on without, and says so.

    Raises:
        IcomError: a living process has the lock; names it.
    """
    path = output / RUNNING
    descriptor = None
    try:
        descriptor = locked(path)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(_this_process()).encode())
    except BlockingIOError:
        raise IcomError(
            f"Another run is writing to {output}: {_holder(path)}. Wait for its end, stop it, or choose another "
            "--output_dir."
        ) from None
    except OSError as error:
        if descriptor is None:  # else a full disk: the lock holds without a name
            print(
                f"icom: {path} cannot be locked ({error.strerror or error}): take care that no other run writes to "
                f"{output} meanwhile.",
                file=sys.stderr,
            )
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):
                path.unlink()  # while it is locked, see `locked`
            os.close(descriptor)


def is_running(output: Path) -> bool:
    """Whether a run has `output` now. Files of one that died are none; without locks in the file system, nor is one."""
    try:
        descriptor = os.open(output / RUNNING, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def locked(path: Path) -> int:
    """Open and lock the file; the descriptor, which is the lock.

    Raises:
        BlockingIOError: another process has it.
        OSError: there are no locks here.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its holder may have removed the file between our open and our lock: then the lock is on nothing.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _this_process() -> dict[str, str | int]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}


def _holder(path: Path) -> str:
    """Who has the lock, for people."""
    try:
        with path.open(encoding="utf-8") as file:
            said = json.loads(file.read(_LARGEST))
        pid, host, since = int(said["pid"]), str(said["host"]), str(said["since"])
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that did not leave its name"
    if not (host + since).isprintable():
        return f"process {pid}"
    return f"process {pid} on {host}, since {since}"

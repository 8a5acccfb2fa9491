"""Workers of Ray Data that hold VAE and text encoder: started, asked batch by batch, and ended, from a process that
knows nothing of Ray.

Ray's driver is a process of its own (icom/data/ray_driver.py), because Ray ends its driver when the cluster is lost,
and takes signals for itself. It writes what workers made of each batch into a pipe, in order, and it ends, with all
that it started, when its standard input does: whatever became of the process at the other end.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from icom.config.encoders import EncoderOptions
from icom.errors import IcomError, TemporaryFailure, UsageError
from icom.names import plain

EXTRA = "make setup-master EXTRAS=ray, or python -m pip install -e '.[ray]'"
"""How to get Ray."""
BATCH, STARTED, FAILED = b"B", b"S", b"F"
"""What the driver writes: one of these, the length of what follows in 8 bytes (big-endian), and that."""
_ANSWER_SECONDS = 10.0
"""A cluster's head has so long to take a connection."""
_START_SECONDS = 180.0
"""And so long to take this process in; or a Ray of our own to start."""
_END_SECONDS = 20.0
_FIRST_SECONDS = 120.0
"""When nothing has come for so long, somebody may want to know what is waited for."""
_LONGEST_FOLDER = 40
"""Ray makes sockets below its folder, 62 characters further, and Linux takes 107 in all."""


@dataclass(frozen=True)
class Stretch:
    """Batches of consecutive numbers at equal distances: range(start, start + batch), and so on every `step`, below
    `stop`, which also cuts the last of them."""

    start: int
    stop: int
    step: int
    batch: int


def need_ray_extra() -> None:
    """Say how to get Ray where it is missing.

    Raises:
        IcomError: it is missing.
    """
    for module in ("ray", "pyarrow", "pandas"):
        if importlib.util.find_spec(module) is None:
            raise IcomError(f"--encoder_workers needs {module}, which comes with the extra `ray`: {EXTRA}.")


class RayWorkers:
    """What workers made of each batch, as bytes, in order. Inside its `with`, they work ahead.

        with RayWorkers(options, job, [Stretch(0, 8, 4, 4)], 10**6) as workers:
            for content in workers: ...

    Attributes:
        about: one phrase for the user: where they are.
    """

    def __init__(self, options: EncoderOptions, job: Mapping[str, Any], work: Sequence[Stretch], size: int) -> None:
        """Start them; returns when Ray has answered, and not when they have loaded anything.

        Args:
            options: how many there are, and where.
            job: what they do, as JSON takes it; see icom/data/ray_encoder.py.
            work: the batches.
            size: about how many bytes come of one; bounds how far they work ahead.

        Raises:
            IcomError: Ray is missing, does not answer, or is of another version.
        """
        need_ray_extra()
        self.about = "a Ray of its own" if options.ray_address is None else f"Ray at {options.ray_address}"
        if options.ray_address not in (None, "auto"):
            _knock(str(options.ray_address))
        self._asked_at, self._told, self._batches = time.monotonic(), False, 0
        self._folder = _short_folder()
        try:
            with (self._folder / "driver.log").open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "icom.data.ray_driver"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C in a terminal is for this process, which ends them in time
                )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        assert self._process.stdin
        assert self._process.stdout
        self._input, self._output = self._process.stdin, self._process.stdout
        says = {
            "folder": str(self._folder),
            "address": options.ray_address,
            "workers": options.encoder_workers,
            "cpus": options.encoder_cpus,
            "gpus": options.encoder_gpus,
            "token": secrets.token_hex(32),
            "job": json.dumps(dict(job)),
            "work": [[one.start, one.stop, one.step, one.batch] for one in work],
            "size": size,
        }
        try:
            with contextlib.suppress(BrokenPipeError):  # its end is noticed below
                self._input.write(json.dumps(says).encode() + b"\n")
                self._input.flush()
            self._receive(STARTED, time.monotonic() + _START_SECONDS)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RayWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> RayWorkers:
        return self

    def __next__(self) -> bytes:
        """What was made of the next batch.

        Raises:
            IcomError: a worker cannot go on.
            TemporaryFailure: Ray is lost.
        """
        content = self._receive(BATCH)
        self._batches += 1
        return content

    def close(self) -> None:
        """End the workers, and a Ray of our own."""
        with contextlib.suppress(OSError):
            self._input.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # Ray's processes are bound to it, and end as well
            self._process.wait()
        self._output.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _receive(self, wanted: bytes, deadline: float | None = None) -> bytes:
        kind = self._read(1, deadline)
        content = self._read(int.from_bytes(self._read(8), "big"))
        if kind == FAILED:
            said = json.loads(content)
            classes = (IcomError, UsageError, TemporaryFailure)
            raise next(one for one in classes if one.exit_code == said["code"])(said["message"])
        assert kind == wanted, kind
        return content

    def _read(self, length: int, deadline: float | None = None) -> bytes:
        parts, descriptor = bytearray(), self._output.fileno()
        while len(parts) < length:
            while not select.select([descriptor], [], [], 1.0)[0]:
                if deadline is not None and time.monotonic() > deadline:
                    raise IcomError(
                        f"{self.about} did not start within {_START_SECONDS:.0f} s{self._last_words()}. "
                        "Is there a Ray, of the same version, at this address?"
                    )
                if not self._batches and not self._told and time.monotonic() > self._asked_at + _FIRST_SECONDS:
                    self._told = True
                    print(
                        f"icom: still waiting for the encoders on {self.about}: they are loading, or it has no "
                        "free cores or GPUs for them (`ray status`; --encoder_cpus, --encoder_gpus).",
                        file=sys.stderr,
                    )
            part = os.read(descriptor, length - len(parts))
            if not part:
                raise TemporaryFailure(
                    f"{self.about} is lost{self._last_words()}. Start the same command again: with "
                    "--resume_from_checkpoint latest a training goes on from its last checkpoint."
                )
            parts += part
        return bytes(parts)

    def _last_words(self) -> str:
        """Of the driver, whose log says more."""
        lines = (self._folder / "driver.log").read_text(errors="replace").strip().splitlines()
        return f" ({plain(lines[-1])[:300]})" if lines else ""


def write(pipe: IO[bytes], kind: bytes, content: bytes) -> None:
    """What `RayWorkers` reads."""
    pipe.write(kind + len(content).to_bytes(8, "big") + content)
    pipe.flush()


def _knock(address: str) -> None:
    """See whether anybody is there: Ray itself would wait for minutes.

    Raises:
        IcomError: nobody is.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise IcomError(
            f"Nothing answers at --ray_address {address} ({error}). Start the cluster (ray start --head), and let this "
            "machine join it, or leave --ray_address out for a Ray of this process's own."
        ) from None


def _short_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="icom-ray-"))
    if len(str(folder)) > _LONGEST_FOLDER:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="icom-ray-", dir="/tmp"))
    return folder

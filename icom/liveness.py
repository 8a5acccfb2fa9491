"""Heartbeats between the processes of a run: who is gone is named, and nobody waits for them for ever.

A collective that a peer has left fails at once when the peer's machine says so (the process died), and never when it
cannot (the network is down, the machine hangs). PyTorch's answer is a timeout for collectives, but rank 0 draws
validation pictures for minutes while the others wait in one. So every process beats in the store, once a second, from a
thread of its own that needs neither the main thread nor the collectives, and looks whether the others do.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

BEAT_SECONDS = 1.0
SILENT_SECONDS = 25.0
"""Without a beat for so long a process is lost. Imports and reading a model hold threads up for seconds."""
SUSPECT_SECONDS = 4.0
"""When a collective has failed already: who has not beaten for so long is the one that broke it."""
GRACE_SECONDS = 15.0
"""The main thread has so long to stop by itself (it may be drawing a picture, or inside a product)."""

_PROBLEM = "problem"

_AGAIN = (
    "Go on with the machines that are left: the same command without the lost ones in the hosts file, and "
    "--resume_from_checkpoint latest."
)

_PROXIES = ("hydra_", "orted", "prted")
_MPIRUN = ("mpirun", "mpiexec", "orterun", "prterun")


@dataclass(frozen=True)
class Problem:
    """Why the run cannot go on.

    Attributes:
        message: for the user.
        speaker: the rank that tells it; the others end silently.
        lost: ranks that are gone.
    """

    message: str
    speaker: int
    lost: frozenset[int] = field(default_factory=frozenset)


class Watch:
    """This process's beats, and what it knows of the others'.

    Attributes:
        handled: to be set when the main thread has learned of a problem and is about to end.
    """

    def __init__(self, store: Store, rank: int, hosts: Sequence[str], launchers: Sequence[psutil.Process] = ()) -> None:
        """Start beating.

        Args:
            store: that all processes use; a connection that nobody else waits on.
            rank: of this process.
            hosts: rank -> name of its machine.
            launchers: processes without which this one should not go on.
        """
        self.rank, self.hosts = rank, list(hosts)
        self._store, self._launchers = store, launchers
        self.handled = threading.Event()
        self._stopped = threading.Event()
        now = time.monotonic()
        self._beats: list[tuple[bytes, float]] = [(b"", now) for _ in hosts]
        self._answered = now  # when the store last did
        self._store_gone = False
        self._told: Problem | None = None
        for run in (self._beat, self._guard):
            threading.Thread(target=run, daemon=True).start()

    def problem(self, silent_for: float = SILENT_SECONDS) -> Problem | None:
        """What is wrong, if anything: a process told so, or one has not beaten for so many seconds."""
        if self._told:
            return self._told
        now = time.monotonic()
        if self._store_gone or now - self._answered > silent_for:
            # The store lives in rank 0's process. Everybody else sees this, so one of another machine speaks.
            lost = {r for r, host in enumerate(self.hosts) if r == 0 or host == self.hosts[0] != self.hosts[self.rank]}
        else:
            lost = {r for r, (_, when) in enumerate(self._beats) if now - when > silent_for} - {self.rank}
        if not lost:
            return None
        rest = [rank for rank in range(len(self.hosts)) if rank not in lost]
        why = "It died, or the network is down." if len(lost) == 1 else "They died, or the network is down."
        return Problem(f"lost {self._names(lost)}. {why} {_AGAIN}", min(rest), frozenset(lost))

    def why_broken(self, error: str) -> Problem:
        """After a collective failed: wait until it is known who broke it, at most some seconds."""
        deadline = time.monotonic() + 3 * SUSPECT_SECONDS
        while time.monotonic() < deadline:
            if problem := self.problem(SUSPECT_SECONDS):
                return problem
            time.sleep(BEAT_SECONDS / 4)
        return Problem(f"the processes lost each other ({error.splitlines()[0]}), though all of them are alive.", 0)

    def tell(self, problem: Problem) -> Problem:
        """Tell the others why this process ends.

        Returns:
            What ends the run: this, or what another process told before.
        """
        if self._told is None:
            try:
                self._told = _decoded(self._store.compare_set(_PROBLEM, "", _encoded(problem)))
            except RuntimeError:  # the store is gone: nobody to tell
                self._told = problem
        return self._told

    def stop(self) -> None:
        """Stop beating; the others must not be waiting for this process any more."""
        self._stopped.set()

    def _beat(self) -> None:
        keys = [*map(_key, range(len(self.hosts))), _PROBLEM]
        count = 0
        try:
            for key in keys:
                self._store.compare_set(key, "", "" if key == _PROBLEM else "0")
            while not self._stopped.wait(BEAT_SECONDS):
                if self._told is None and (gone := next((p for p in self._launchers if not _is_alive(p)), None)):
                    here = self._names({self.rank})
                    self.tell(Problem(f"lost the launcher's hold on {here}: {gone.name()} there died. {_AGAIN}", 0))
                count += 1
                self._store.set(_key(self.rank), str(count))
                *beats, told = self._store.multi_get(keys)
                now = self._answered = time.monotonic()
                for rank, beat in enumerate(beats):
                    if beat != self._beats[rank][0]:
                        self._beats[rank] = (beat, now)
                if told and self._told is None:
                    self._told = _decoded(told)
        except RuntimeError:  # torch's DistError: the connection is gone, and with it rank 0
            self._store_gone = not self._stopped.is_set()

    def _guard(self) -> None:
        """End the process where its main thread does not come to it."""
        since = None
        while not self._stopped.wait(BEAT_SECONDS / 2):
            problem = self.problem()
            if problem is None or self.handled.is_set():
                since = None
            elif since is None:
                since = time.monotonic()
            elif time.monotonic() - since > GRACE_SECONDS:
                if problem.speaker == self.rank:
                    print(f"icom: {problem.message}", file=sys.stderr, flush=True)
                os._exit(1)

    def _names(self, ranks: set[int]) -> str:
        by_host: dict[str, list[str]] = {}
        for rank in sorted(ranks):
            by_host.setdefault(self.hosts[rank], []).append(str(rank))
        return ", ".join(
            f"{host} (rank{'s' if len(of_host) > 1 else ''} {', '.join(of_host)})" for host, of_host in by_host.items()
        )


def launchers() -> list[psutil.Process]:
    """The processes that mpirun reached this one through: when one dies, nobody could stop this one any more.

    On the machine where mpirun runs, up to mpirun itself; on the others all of them, for it was an sshd that started
    them. None where another launcher was at work: what is above torchrun may end when a user logs out.
    """
    parents = psutil.Process().parents()
    if not any(parent.name().startswith(_PROXIES) for parent in parents):
        return []
    last = next((i for i, parent in enumerate(parents) if parent.name().startswith(_MPIRUN)), len(parents) - 1)
    return [parent for parent in parents[: last + 1] if parent.pid != 1]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _encoded(problem: Problem) -> str:
    return json.dumps({"message": problem.message, "speaker": problem.speaker, "lost": sorted(problem.lost)})


def _decoded(text: bytes) -> Problem:
    content = json.loads(text)
    return Problem(content["message"], content["speaker"], frozenset(content["lost"]))

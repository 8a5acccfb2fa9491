"""Heartbeats between the processes of a run: who is gone is named, and nobody waits for them for ever.

A collective that a peer has left fails at once when the peer's machine says so (the process died), and never when it
cannot (the network is down, the machine hangs). PyTorch's answer is a timeout for collectives, but rank 0 draws
validation pictures for minutes while the others wait in one. So every process

- has a connection to rank 0 that carries nothing (icom/parallel/lines.py): its end is the end of the process, and is
  seen in milliseconds, which counts, because some launchers kill all the others a third of a second later;
- beats in the store, once a second, from a thread that needs neither the main thread nor the collectives;
- knows the processes that mpirun reached it through, without which nobody could stop it any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

from icom.errors import IcomError
from icom.names import plain
from icom.parallel.lines import Lines, call, said_goodbye, say_goodbye
from icom.parallel.listening import listen
from icom.parallel.place import Place
from icom.parallel.store import Forged
from icom.signals import end_process

if TYPE_CHECKING:
    import socket

    from icom.parallel.store import SignedStore

BEAT_SECONDS = 1.0
SILENT_SECONDS = 25.0
"""Without a beat for so long a process is lost. Imports and reading a model hold threads up for seconds."""
SUSPECT_SECONDS = 4.0
"""When a collective has failed already: who has not beaten for so long is the one that broke it."""
GRACE_SECONDS = 15.0
"""The main thread has so long to stop by itself (it may be drawing a picture, or inside a product)."""
REAP_SECONDS = 5
"""Once a process is lost, mpirun has so long to end before it is told to, and again before it is killed."""

_PROBLEM, _PORT = "problem", "watch port"

RESTARTED_BY = "ICOM_RESTARTED_BY"
"""Set in what `icom launch` makes for those who start a run again by themselves: slurm, kubernetes."""
_AGAIN = {
    "slurm": "The job goes back into Slurm's queue, and on from the last checkpoint when it starts again.",
    "kubernetes": "Kubernetes starts the pods again, and they go on from the last checkpoint.",
    "Slurm": (
        "Submit the same command again with --resume_from_checkpoint latest; `icom launch slurm` makes jobs that do so "
        "themselves."
    ),
}
"""Who starts the run again by itself, or else the launcher -> how the run goes on."""
_AGAIN_WITH_HOSTS_FILE = (
    "Go on with the machines that are left: the same command without the lost ones in the hosts file, and "
    "--resume_from_checkpoint latest."
)

_PROXIES = ("hydra_", "orted", "prted")
_MPIRUN = ("mpirun", "mpiexec", "orterun", "prterun")


@dataclass(frozen=True)
class RunProblem:
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
        problem: what ends the run, once something does.
        handled: to be set when the main thread has learned of a problem and is about to end.
    """

    def __init__(self, store: SignedStore, place: Place, hosts: Sequence[str], launchers: Launchers) -> None:
        """Start watching.

        Args:
            store: that all processes use; a connection that nobody else waits on.
            place: of this process.
            hosts: rank -> name of its machine.
            launchers: of this process.

        Raises:
            OSError: rank 0 cannot be reached.
            Forged: somebody else writes into the store.
        """
        rank = place.rank
        assert place.master_address
        self.rank, self.hosts = rank, list(hosts)
        self.problem: RunProblem | None = None
        self.handled = threading.Event()
        self._store, self._launchers = store, launchers
        restarted_by = os.environ.get(RESTARTED_BY, place.launcher)
        self._again = _AGAIN.get(restarted_by, _AGAIN_WITH_HOSTS_FILE)
        self._stopped = threading.Event()
        self._parting = False
        self._lock = threading.Lock()
        now = time.monotonic()
        self._beats: list[tuple[int, float]] = [(-1, now) for _ in hosts]
        self._answered = now  # when the store last did
        self._line: socket.socket | None = None  # to rank 0
        if rank == 0:
            server = listen(place, 0)
            store.set(_PORT, str(server.getsockname()[1]))
            lines = Lines(server, len(self.hosts), store.key)
            self._start(lambda: self._listen(lines))
        else:
            port = int(store.get(_PORT))
            self._line = call(place.master_address, port, rank, store.key, SILENT_SECONDS)
            self._start(self._hear)
        self._start(self._beat)
        self._start(self._guard)

    def tell(self, problem: RunProblem) -> RunProblem:
        """Tell the others why the run ends, and the user if that is for this process to do.

        Returns:
            What ends the run: this, or what another process told before.
        """
        if self.problem is None and 0 not in problem.lost:  # else the store is gone as well
            try:
                problem = self._decoded(self._store.compare_set(_PROBLEM, "", _encoded(problem)))
            except RuntimeError:
                pass
            except Forged as error:  # which all of them see
                problem = RunProblem(str(error), 0)
        with self._lock:
            if self.problem is None:
                self._learn(problem)
            assert self.problem
            return self.problem

    def why_broken(self, error: str) -> RunProblem:
        """After a collective failed: wait until it is known who broke it, at most some seconds."""
        deadline = time.monotonic() + 3 * SUSPECT_SECONDS
        while self.problem is None and time.monotonic() < deadline:
            self._look(SUSPECT_SECONDS)
            time.sleep(0.02)
        alive = f"the processes lost each other ({error.splitlines()[0]}), though all of them are alive."
        return self.problem or self.tell(RunProblem(alive, 0))

    def expect_ends(self) -> None:
        """From now on nobody can be missed: what was to be computed together is."""
        self._parting = True

    def stop(self) -> None:
        """Stop beating; the others must not be waiting for this process any more."""
        self.expect_ends()
        self._stopped.set()
        if self._line:
            say_goodbye(self._line)

    @staticmethod
    def _start(run: Callable[[], None]) -> None:
        threading.Thread(target=run, name=f"icom {run.__name__}", daemon=True).start()

    def _learn(self, problem: RunProblem) -> None:
        self.problem = problem
        if problem.speaker == self.rank:
            with contextlib.suppress(OSError):  # where the launcher is gone, nobody may be reading
                print(f"\nicom: {plain(problem.message)}", file=sys.stderr, flush=True)  # below the progress bar
        if problem.lost:
            self._launchers.end()

    def _lose(self, lost: set[int], speaker: int = 0) -> None:
        if not self._parting:
            why = "It died, or the network is down." if len(lost) == 1 else "They died, or the network is down."
            self.tell(RunProblem(f"lost {self._names(lost)}. {why} {self._again}", speaker, frozenset(lost)))

    def _lose_rank_0(self) -> None:
        # All the others see this and have no store any more to agree in. Rank 0's whole machine may be gone.
        elsewhere = [rank for rank, host in enumerate(self.hosts) if host != self.hosts[0]]
        self._lose({0}, min(elsewhere, default=1))

    def _listen(self, lines: Lines) -> None:
        """On rank 0: learn of the others' end by that of their connections."""
        with contextlib.closing(lines):
            while not self._stopped.is_set():
                if ended := lines.poll(BEAT_SECONDS):
                    self._lose(ended)

    def _hear(self) -> None:
        """On the others: learn of rank 0's end."""
        assert self._line
        with self._line:
            if not said_goodbye(self._line):
                self._lose_rank_0()

    def _beat(self) -> None:
        keys = [*map(_key, range(len(self.hosts)))]
        count = 0
        try:
            for key in keys:
                self._store.compare_set(key, "", "0")
            while not self._stopped.wait(BEAT_SECONDS):
                if gone := self._launchers.gone():
                    here = self._names({self.rank})
                    self.tell(RunProblem(f"lost the launcher's hold on {here}: {gone} there died. {self._again}", 0))
                count += 1
                self._store.set(_key(self.rank), str(count))
                beats = self._store.multi_get(keys)
                now = self._answered = time.monotonic()
                for rank, beat in enumerate(map(int, beats)):
                    if beat > self._beats[rank][0]:  # an older one, written again, is no sign of life
                        self._beats[rank] = (beat, now)
                if self.problem is None and self._store.check([_PROBLEM]):
                    self.tell(self._decoded(self._store.get(_PROBLEM)))
        except RuntimeError:  # torch's DistError: the connection is gone, and with it rank 0
            self._lose_rank_0()
        except Forged as error:
            self.tell(RunProblem(str(error), self.rank))

    def _look(self, silent_for: float) -> None:
        """Whether somebody has not beaten for so many seconds."""
        now = time.monotonic()
        if self.rank and now - self._answered > silent_for:
            self._lose_rank_0()
        lost = {rank for rank, (_, when) in enumerate(self._beats) if now - when > silent_for} - {self.rank}
        if lost and self.problem is None:
            self._lose(lost)

    def _guard(self) -> None:
        """Notice silence, and end the process (if it is icom's own) where its main thread does not come to it."""
        looked = time.monotonic()
        patience: tuple[bool, float] | None = None  # whether the main thread knows, and until when it may take
        while not self._stopped.wait(BEAT_SECONDS / 2):
            now = time.monotonic()
            if now - looked > SUSPECT_SECONDS:  # it was this process that stood still: Ctrl-Z, a paused machine
                self._answered = now
                self._beats = [(beat, now) for beat, _ in self._beats]
            looked = now
            if self.problem is None:
                self._look(SILENT_SECONDS)
            elif patience is None or self.handled.is_set() != patience[0]:
                patience = self.handled.is_set(), now + GRACE_SECONDS
            elif now > patience[1]:
                end_process(exit_code_of(self.problem.lost))
                return

    def _decoded(self, text: bytes) -> RunProblem:
        try:
            content = json.loads(text)
            return RunProblem(str(content["message"]), int(content["speaker"]), frozenset(map(int, content["lost"])))
        except (ValueError, KeyError, TypeError):  # without a secret, anybody can sign anything
            raise self._store.forged(_PROBLEM) from None

    def _names(self, ranks: set[int]) -> str:
        by_host: dict[str, list[str]] = {}
        for rank in sorted(ranks):
            by_host.setdefault(self.hosts[rank], []).append(str(rank))
        return ", ".join(
            f"{host} (rank{'s' if len(of_host) > 1 else ''} {', '.join(of_host)})" for host, of_host in by_host.items()
        )


class Launchers:
    """The processes that mpirun reached this one through.

    On the machine where mpirun runs, up to mpirun itself; on the others all of them, for it was an sshd that started
    them. None where another launcher was at work: what is above torchrun may end when a user logs out.
    """

    def __init__(self) -> None:
        parents = [(parent, parent.name()) for parent in psutil.Process().parents() if parent.pid != 1]
        if not any(name.startswith(_PROXIES) for _, name in parents):
            parents = []
        mpirun = [i for i, (_, name) in enumerate(parents) if name.startswith(_MPIRUN)]
        self._mpirun = parents[mpirun[-1]][0] if mpirun else None
        self._parents = parents[: mpirun[-1] + 1] if mpirun else parents

    def gone(self) -> str | None:
        """The name of one that has died."""
        return next((name for process, name in self._parents if not _is_alive(process)), None)

    def end(self) -> None:
        """See to it that mpirun ends soon, and ssh with it.

        It would wait for ever for a machine that cannot be reached. In a process of its own, because this one ends.
        """
        if self._mpirun:
            command = [
                sys.executable,
                "-m",
                "icom.parallel.liveness",
                str(self._mpirun.pid),
                str(self._mpirun.create_time()),
            ]
            subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)


def exit_code_of(lost: frozenset[int]) -> int:
    """Of a process whose run ends: 75 (sysexits' "temporary failure") where others are gone, else 1."""
    return os.EX_TEMPFAIL if lost else IcomError.exit_code


def end_mpirun(pid: int, create_time: float) -> None:
    """Let mpirun end by itself; then tell it and all that it started to; then kill them."""
    try:
        mpirun = psutil.Process(pid)
        if mpirun.create_time() != create_time:
            return
        started = [mpirun, *mpirun.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    _, left = psutil.wait_procs([mpirun], REAP_SECONDS)
    if left:
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for process in started:
                if process.pid != os.getpid():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        end(process)
            psutil.wait_procs(started, REAP_SECONDS)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _encoded(problem: RunProblem) -> str:
    return json.dumps({"message": problem.message, "speaker": problem.speaker, "lost": sorted(problem.lost)})


if __name__ == "__main__":
    end_mpirun(int(sys.argv[1]), float(sys.argv[2]))

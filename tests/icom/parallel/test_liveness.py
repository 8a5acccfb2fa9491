"""icom.parallel.liveness: who is gone is noticed, told once, and ends icom's own processes and no others.

Guards icom.parallel.liveness and icom.signals.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from icom.parallel import liveness
from icom.parallel.liveness import Launchers, RunProblem, Watch
from icom.parallel.place import Place
from icom.parallel.store import SignedStore
from tests.support.command import ROOT


def place(rank: int, size: int) -> Place:
    """On one machine."""
    return Place(rank, size, rank, size, master_address="127.0.0.1")


def test_hanging_rank_is_noticed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """One that still has its connections but does nothing; here a store that does not take its beats."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    for name, seconds in (("BEAT_SECONDS", 0.05), ("SILENT_SECONDS", 5.0), ("GRACE_SECONDS", 1000.0)):
        monkeypatch.setattr(liveness, name, seconds)

    class Lossy(SignedStore):
        def set(self, name: str, value: str | bytes) -> None:
            """Nothing arrives."""

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [kind(store, b"", "here") for kind in (SignedStore, Lossy, SignedStore)]
    watches = [Watch(s, place(rank, 3), ["a", "b", "c"], Launchers()) for rank, s in enumerate(stores)]
    while not all(watch.problem for watch in watches):
        time.sleep(0.02)
    for watch in watches:
        watch.stop()
    assert {(watch.problem.speaker, watch.problem.lost) for watch in watches if watch.problem} == {(0, frozenset({1}))}
    assert capfd.readouterr().err.count("icom: lost b (rank 1)") == 1


def test_one_speaks_when_rank_0_is_gone(capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody can ask rank 0's store any more who does; its machine has another rank, which may be gone as well."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [SignedStore(store.clone(), b"", "here") for _ in range(4)]
    watches = [Watch(s, place(rank, 4), ["a", "a", "b", "b"], Launchers()) for rank, s in enumerate(stores)]
    for watch in watches[1:]:
        watch._lose_rank_0()
    for watch in watches:
        watch.stop()
    assert {watch.problem.lost for watch in watches[1:] if watch.problem} == {frozenset({0})}
    assert capfd.readouterr().err.count("icom: lost a (rank 0)") == 1


def test_stopped_watch_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when it was waiting for the main thread to learn of a problem: it would end the process much later."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    monkeypatch.setattr(liveness, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(liveness, "GRACE_SECONDS", 1000.0)
    before = set(threading.enumerate())
    watch = Watch(SignedStore(HashStore(), b"", "here"), place(0, 1), ["a"], Launchers())
    watch.tell(RunProblem("something is wrong", 0))
    threads = set(threading.enumerate()) - before
    assert len(threads) == 3
    time.sleep(0.2)  # the guard has seen the problem; were it slower, this test would only show less
    watch.stop()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), thread


HANGS = """
import sys, threading, time
from torch.distributed import HashStore
from icom.parallel import liveness
from icom import signals
from icom.parallel.place import Place
from icom.parallel.store import SignedStore

if sys.argv[1] == "icom's own":
    signals.own_process()
liveness.BEAT_SECONDS = liveness.GRACE_SECONDS = 0.05
alone = Place(master_address="127.0.0.1")
watch = liveness.Watch(SignedStore(HashStore(), b"", "here"), alone, ["a"], liveness.Launchers())
watch.tell(liveness.RunProblem("something is wrong", 0))
(guard,) = (thread for thread in threading.enumerate() if "guard" in thread.name)
guard.join(60)  # the main thread hangs
print("went on")
"""


@pytest.mark.parametrize(("whose", "code", "out"), [("icom's own", 1, ""), ("somebody's", 0, "went on\n")])
def test_main_thread_that_hangs_is_ended_with_its_process(whose: str, code: int, out: str) -> None:
    """A program that imports icom (a test runner, a notebook) is never ended: icom does not know what else it does."""
    done = subprocess.run([sys.executable, "-c", HANGS, whose], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, out), done.stderr

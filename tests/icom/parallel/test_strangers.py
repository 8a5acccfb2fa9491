"""Strangers at the ports of a run: who only knocks changes nothing, and whoever writes is not believed.

Guards icom.parallel.store, lines, listening, secret and meeting.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from icom import machine
from icom.errors import IcomError, UsageError
from icom.parallel.lines import MOST_CALLERS, Lines, call
from icom.parallel.listening import listen, refuse_newcomers
from icom.parallel.place import Place
from icom.parallel.secret import find_secret, new_secret, sign
from icom.parallel.store import MOST_BYTES, Forged, SignedStore
from icom.training.report import read_metrics
from tests.support.command import ROOT, long, train_arguments
from tests.support.hostile import SCREEN
from tests.support.ranks import Ranks, free_port
from tests.support.waiting import wait_until

StartRanks = Callable[..., Ranks]

ON_ONE_MACHINE = Place(0, 3, 0, 3, master_address="127.0.0.1")
KEY = b"key"


class Pwned:
    """What a careless reader would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("PWNED"),))


GARBAGE = [
    b"\0" * 1000,
    b"\xff" * 1000,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    SCREEN.encode(),
    pickle.dumps(Pwned()),
    secrets.token_bytes(100_000),
    b"\x01\x3c\x85\xf4\x3c",  # TCPStore's greeting, and then nothing
]


class Stranger:
    """Somebody who can reach the ports, and has no secret."""

    def __init__(self) -> None:
        self.held: list[socket.socket] = []

    def knock(self, port: int, count: int) -> None:
        """Connect many times: some say nothing, the others garbage; none hangs up."""
        for number in range(count):
            with contextlib.suppress(OSError):  # hung up on, or nobody there any more
                line = socket.create_connection(("127.0.0.1", port), 5)
                self.held.append(line)
                if number % 2:
                    line.setblocking(False)
                    line.send(GARBAGE[number // 2 % len(GARBAGE)])

    def store(self, port: int) -> Any:
        """The store of a run, as its processes see it."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        return PrefixStore("icom/0", TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))

    def leave(self) -> None:
        """Hang up."""
        for line in self.held:
            line.close()


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    somebody = Stranger()
    yield somebody
    somebody.leave()


def listening(process: Any) -> dict[int, str]:
    """Port -> address of a process's listening sockets, as the kernel has them."""
    connections = psutil.Process(process.pid).net_connections()
    return {c.laddr.port: c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


def wait_for_the_store(group: Ranks) -> None:
    """Until rank 0 listens."""

    def is_there() -> bool:
        assert group.processes[0].poll() is None, group.processes[0].communicate()
        return group.port in listening(group.processes[0])

    wait_until(is_there)


# ---------------------------------------------------------------- the pieces


def test_secret_is_checked_and_never_shown() -> None:
    assert find_secret({}) == find_secret({"ICOM_SECRET": ""}) == b""
    assert len(find_secret({"ICOM_SECRET": new_secret()})) == 64
    assert new_secret() != new_secret()
    for wrong in ("hunter2", "g" * 64, "ab" * 15, "ab" * 32 + "\n", "ab" * 1000):
        with pytest.raises(UsageError, match="openssl rand -hex 32") as error:
            find_secret({"ICOM_SECRET": wrong})
        assert wrong not in str(error.value)


def test_signatures_as_openssl_makes_them() -> None:
    """Over each part's length (8 bytes) and the part."""
    message = b"\0\0\0\0\0\0\0\1a\0\0\0\0\0\0\0\2bc"
    words = ["openssl", "dgst", "-sha256", "-mac", "HMAC", "-macopt", f"key:{KEY.decode()}", "-binary"]
    assert sign(KEY, b"a", b"bc") == subprocess.run(words, input=message, capture_output=True, check=True).stdout
    assert sign(KEY, b"ab", b"c") != sign(KEY, b"a", b"bc") != sign(KEY, b"a", b"bc", b"")


def test_only_what_the_run_wrote_under_that_name_is_read() -> None:
    """Not a value of another name, of another key, cut, made longer, or with a bit changed; each operation looks."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    plain = HashStore()
    store = SignedStore(plain, KEY, "HERE:1")
    store.set("a", b"\x00value")
    assert store.compare_set("b", "", "first") == store.compare_set("b", "", "second") == b"first"
    assert (store.get("a"), store.multi_get(["a", "b"])) == (b"\x00value", [b"\x00value", b"first"])
    assert store.check(["a", "b"]) and not store.check(["a", "c"])
    good = plain.get("a")
    SignedStore(plain, b"another", "").set("other", b"\x00value")
    flipped = [good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :] for i in (0, 31, 32, len(good) - 1)]
    for text in (plain.get("b"), plain.get("other"), good[:-1], good + b"x", good[:5], b"\x00value", *flipped):
        plain.set("a", text)
        for read in (
            lambda: store.get("a"),
            lambda: store.multi_get(["b", "a"]),
            lambda: store.check(["a"]),
            lambda: store.compare_set("a", "", "mine"),
        ):
            with pytest.raises(Forged, match="HERE:1 under 'a' is not signed"):
                read()
    with pytest.raises(IcomError, match="more than the processes' store takes"):
        store.set("a", bytes(MOST_BYTES))
    with pytest.raises(RuntimeError):
        store.add("n", 1)


def test_who_reads_first_says_that_one_has_no_secret() -> None:
    """Of two processes either may be the one that tells; of two secrets nobody says that one is empty."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    plain = HashStore()
    for name, key in {"empty": b"", "signed": KEY, "other": b"another"}.items():
        SignedStore(plain, key, "").set(name, b"value")
    for name, reader, says in [
        ("empty", KEY, "ICOM_SECRET, but with an empty key (who wrote it has no ICOM_SECRET): nothing"),
        ("signed", b"", "is not signed with an empty key (this process has no ICOM_SECRET): nothing"),
        ("other", KEY, "is not signed with this process's ICOM_SECRET: nothing"),
    ]:
        with pytest.raises(Forged, match=re.escape(says)):
            SignedStore(plain, reader, "").get(name)
    plain.set("moved", plain.get("empty"))
    with pytest.raises(Forged, match="'moved' is not signed with this process's ICOM_SECRET: nothing"):
        SignedStore(plain, KEY, "").get("moved")


def test_largest_value_arrives_and_torch_hangs_up_on_larger_ones() -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    plain = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    SignedStore(plain, KEY, "").set("a", bytes(MOST_BYTES - 32))
    assert len(SignedStore(plain.clone(), KEY, "").get("a")) == MOST_BYTES - 32
    other = plain.clone()
    with pytest.raises(RuntimeError):
        other.set("b", bytes(MOST_BYTES + 1))
        other.get("a")
    assert not plain.check(["b"])


def test_lines_take_the_ranks_and_nobody_else(stranger: Stranger, capfd: pytest.CaptureFixture[str]) -> None:
    """Among many who say nothing, garbage, half an answer, another one's answer, or the right one with another key."""
    lines = Lines(server := listen(ON_ONE_MACHINE, 0), 3, KEY)
    port, stop = server.getsockname()[1], threading.Event()
    ended: set[int] = set()

    def attend() -> None:
        while not stop.is_set():
            ended.update(lines.poll(0.05))

    with ThreadPoolExecutor(4) as pool:
        attending = pool.submit(attend)
        stranger.knock(port, 3 * MOST_CALLERS)
        recorded = socket.create_connection(("127.0.0.1", port), 5)
        nonce = recorded.recv(16)
        one = (1).to_bytes(4, "big")
        answers = [one + sign(b"another", nonce, one), one + sign(KEY, nonce, (2).to_bytes(4, "big")), one, one + nonce]
        for rank in (0, 3, 2**32 - 1):
            name = rank.to_bytes(4, "big")
            answers.append(name + sign(KEY, nonce, name))  # a right one for a rank that there is not, or another call's
        for answer in [*answers, one + sign(KEY, nonce, one)]:
            line = socket.create_connection(("127.0.0.1", port), 5)
            stranger.held.append(line)
            line.recv(16)
            line.sendall(answer)
            if len(answer) == 36:
                assert line.recv(1) == b""
        calls = [pool.submit(call, "127.0.0.1", port, rank, KEY, 60.0) for rank in (1, 2)]
        first, second = (made.result() for made in calls)
        # Everybody is there: nobody gets in any more, and who was about to has been dropped.
        wait_until(lambda: server.fileno() == -1)
        with pytest.raises(OSError):
            call("127.0.0.1", port, 1, KEY, 0.0)
        assert recorded.recv(1) == b""
        first.close()
        wait_until(lambda: ended == {1})
        stop.set()
        attending.result()
    lines.close()
    for line in (second, recorded):
        line.close()
    assert capfd.readouterr().err.count("icom: somebody who is no process of this run connected") == 1


OWN_ADDRESS = [
    pytest.param(own, together, own, id=f"own-{together}")
    for own in [i.ipv4[0] for i in machine.interfaces() if i.up and not i.loopback and i.ipv4][:1]
    for together in (False, True)
]
"""On a machine without a network there is no such case."""


@pytest.mark.parametrize(
    ("address", "together", "bound"),
    [
        ("127.0.0.1", True, "127.0.0.1"),
        ("localhost", True, "127.0.0.1"),
        ("127.0.1.1", True, "127.0.1.1"),
        ("localhost", False, "::"),  # as Debian's name of a machine: the others are told something else
        ("192.0.2.1", False, "::"),  # of a translation
        ("no-such-host.invalid", False, "::"),
        *OWN_ADDRESS,
    ],
)
def test_listens_on_the_network_in_use(address: str, together: bool, bound: str) -> None:
    with listen(Place(0, 2, 0, 2 if together else 1, master_address=address), 0) as server:
        found, port = server.getsockname()[:2]
        assert found in {bound, "0.0.0.0" if bound == "::" else bound}
        if bound == "::":
            socket.create_connection(("127.0.0.1", port), 5).close()
        with pytest.raises(OSError):
            listen(Place(0, 2, 0, 2 if together else 1, master_address=address), port)


def test_newcomers_are_refused_and_connections_stay() -> None:
    with listen(ON_ONE_MACHINE, 0) as server:
        before = socket.create_connection(server.getsockname(), 5)
        there, _ = server.accept()
        refuse_newcomers(server.fileno())
        with pytest.raises(OSError):
            socket.create_connection(server.getsockname(), 0.5)
        before.sendall(b"still here")
        assert there.recv(10) == b"still here"
        for line in (before, there):
            line.close()


# ---------------------------------------------------------------- real runs

CALLS_LATE = """
import sys, time
from pathlib import Path
from icom.parallel import liveness
from icom.cli import main

true = liveness.call

def call(*arguments):
    while not Path(sys.argv[1]).exists():
        time.sleep(0.02)
    return true(*arguments)

liveness.call = call
main(sys.argv[2:])
"""


@pytest.mark.long
def test_who_only_knocks_changes_nothing(
    ranks: StartRanks, stranger: Stranger, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """At the store's port before and during the run, and at the watch's while rank 0 waits there; bit for bit."""
    quiet = ranks(2, folder=tmp_path / "quiet", secret=new_secret(), max_train_steps=4)
    loud = ranks(2, folder=tmp_path / "loud", secret=new_secret(), max_train_steps=4, late=1)
    wait_for_the_store(loud)
    stranger.knock(loud.port, 150)
    store = stranger.store(loud.port)
    for name in ("hello", "left/7", "group/x"):  # where nobody looks
        store.set(name, SCREEN)
    go = tmp_path / "go"
    loud.start("-c", CALLS_LATE, str(go), *train_arguments(output_dir="out", max_train_steps=4))
    wait_until(lambda: len(listening(loud.processes[0])) == 2 or loud.processes[0].poll() is not None)
    (watch,) = listening(loud.processes[0]).keys() - {loud.port}
    stranger.knock(watch, 150)
    go.touch()
    results = loud.results()
    assert [result.code for result in results] == [0, 0], results
    assert [result.code for result in quiet.results()] == [0, 0]
    ours, theirs = (group.folders[0] / "out" for group in (loud, quiet))
    name = "learned_embeds.safetensors"
    assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    losses = [[(row["step"], row["loss"]) for row in read_metrics(out / "metrics.jsonl")] for out in (ours, theirs)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    told = "".join(result.err for result in results)
    assert len(re.findall("icom: ", told)) == 1 and f"connected to its port {watch}, and was dropped" in told, told
    assert not list(tmp_path.rglob("PWNED"))


@pytest.mark.long
def test_run_on_one_machine_listens_on_loopback_alone_and_to_nobody_new(ranks: StartRanks, stranger: Stranger) -> None:
    """Gloo's own ports stay open; knocking there changes nothing."""
    secret = new_secret()
    group = ranks(2, secret=secret, max_train_steps=10_000)
    group.wait_for_steps(1)
    found = [listening(process) for process in group.processes]
    assert group.port in found[0] and all(found)  # the store, gloo
    assert {address for addresses in found for address in addresses.values()} <= {"127.0.0.1", "::ffff:127.0.0.1"}
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", group.port), 0.5)
    for port in {*found[0], *found[1]} - {group.port}:
        stranger.knock(port, 30)
    group.wait_for_steps(len(read_metrics(group.folders[0] / "out" / "metrics.jsonl")) + 5)
    group.processes[0].terminate()
    results = group.results()
    assert [result.code for result in results] == [143, 143], results
    assert not any(secret in text for result in results for text in (result.out, result.err))
    written = [file for folder in group.folders for file in folder.rglob("*") if file.is_file()]
    assert len(written) > 3
    assert not any(secret.encode() in file.read_bytes() for file in written)


def _forgeries() -> dict[str, bytes]:
    message = {"message": f"PWNED {SCREEN}", "speaker": 0, "lost": []}
    return {
        "beat/1": b"99999999",
        "problem": json.dumps(message).encode(),
        "here/1": json.dumps({"host": f"PWNED {SCREEN}", "pid": 1, "size": 2, "nonce": ""}).encode(),
    }


@pytest.mark.parametrize("name", [long("problem"), long("beat/1"), "here/1"])
def test_what_a_stranger_writes_ends_the_run_unread(
    name: str, ranks: StartRanks, stranger: Stranger, tmp_path: Path
) -> None:
    """One who was there before the processes had met, and whom nobody can tell from one of them."""
    group = ranks(2, secret=new_secret(), max_train_steps=10_000, checkpointing_steps=1, late=1)
    wait_for_the_store(group)
    store = stranger.store(group.port)
    forged = _forgeries()[name]
    if name == "here/1":  # in the place of a process that has not come; a launcher ends those that come later
        store.set(name, forged)
    else:
        group.start(*group.arguments)
        group.wait_for_steps(2)
        with contextlib.suppress(RuntimeError):  # rank 0 has ended
            while all(process.poll() is None for process in group.processes):
                store.set(name, forged)  # again: a beat is overwritten by the next one
                time.sleep(0.01)
        assert list((group.folders[0] / "out").glob("checkpoint-*"))
    results = group.results()
    assert {result.code for result in results} == {1}, results
    told = "".join(result.err for result in results)
    assert f"store at 127.0.0.1:{group.port} under '{name}' is not signed with this process's ICOM_SECRET" in told, told
    assert "Traceback" not in told
    assert len(re.findall("icom: ", told)) == 1, told
    assert not any("PWNED" in result.out + result.err for result in results)
    for file in tmp_path.rglob("*"):
        assert "PWNED" not in file.name and not (file.is_file() and b"PWNED" in file.read_bytes()), file


@pytest.mark.long
def test_who_writes_all_the_time_can_end_a_run_and_never_change_it(
    ranks: StartRanks, stranger: Stranger, tmp_path: Path
) -> None:
    """Whatever he hits among what the processes tell each other: the result is the right one, or there is none."""
    quiet = ranks(2, folder=tmp_path / "quiet", secret=new_secret())
    assert [result.code for result in quiet.results()] == [0, 0]
    for round in range(3):
        group = ranks(2, folder=tmp_path / str(round), secret=new_secret(), late=1)
        wait_for_the_store(group)
        store = stranger.store(group.port)
        group.start(*group.arguments)
        names = (
            [f"broadcast/{n}" for n in range(1, 30)] + [f"arrived/{n}/1" for n in range(1, 30)] + ["group/0//cpu//0/0"]
        )
        with contextlib.suppress(RuntimeError):  # the store has ended
            while any(process.poll() is None for process in group.processes):
                for name in names[round::3]:
                    store.set(name, b"PWNED")
        results = group.results()
        told = "".join(result.err for result in results)
        assert "Traceback" not in told and "PWNED" not in told, told
        if {result.code for result in results} == {0}:
            name = "learned_embeds.safetensors"
            ours, theirs = (g.folders[0] / "out" / name for g in (group, quiet))
            assert ours.read_bytes() == theirs.read_bytes()
        else:
            assert "is not signed with this process's ICOM_SECRET" in told, told
            assert not (group.folders[0] / "out" / "learned_embeds.safetensors").exists()


@pytest.mark.parametrize("other", ["5e" * 32, long("")], ids=["another", "none"])
def test_process_with_another_secret_is_refused(other: str, ranks: StartRanks) -> None:
    secret = new_secret()
    group = ranks(2, secret=secret, of={1: {"ICOM_SECRET": other}})
    results = group.results()
    assert [result.code for result in results] == [1, 1], results
    told = "".join(result.err for result in results)
    assert "the processes were given different ICOM_SECRETs" in told
    assert "Traceback" not in told and secret not in told and (not other or other not in told)
    # Whichever reads first tells, and ends the other one.
    says_empty = re.search(r"an empty key \((this process|who wrote it) has no ICOM_SECRET\)", told)
    assert bool(says_empty) == (not other), told


RENDEZVOUS = """
import os, sys, time
from pathlib import Path
from torch import distributed
from icom.parallel import group
from icom.parallel.place import find_place
from icom.errors import IcomError

try:
    with group.joined(find_place(os.environ)) as met:
        if met.leads:
            Path("ready").touch()
            while not Path("go").exists():
                time.sleep(0.02)
        met.connect("gloo")
        print("CONNECTED")
except IcomError as error:
    print("ERROR", error)
"""


def test_torchs_own_rendezvous_is_signed_too(stranger: Stranger, tmp_path: Path) -> None:
    """A stranger who says where rank 0's gloo listens is found out before anybody connects to him."""
    group = Ranks(tmp_path, 2, "-c", RENDEZVOUS, secret=new_secret(), late=1)
    try:
        wait_for_the_store(group)
        store = stranger.store(group.port)
        group.start(*group.arguments)
        wait_until((group.folders[0] / "ready").exists)
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        name = "0//cpu//0/1"
        names = PrefixStore("group", store)
        wait_until(lambda: names.check([name]))  # where gloo of rank 1 says where it is
        names.set(name, b"\0" * len(names.get(name)))
        (group.folders[0] / "go").touch()
        results = group.results()
    finally:
        group.end()
    told = "".join(result.out + result.err for result in results)
    assert "CONNECTED" not in told
    assert f"under 'group/{name}' is not signed" in told, told


@pytest.mark.long
def test_torchrun_hands_the_secret_on(tmp_path: Path) -> None:
    """Its processes inherit the environment; the store is torchrun's own."""
    secret = new_secret()
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    words += ["-m", "icom", *train_arguments(output_dir=tmp_path / "out")]
    environment = os.environ | {"ICOM_SECRET": secret}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stdout
    assert secret not in done.stdout + done.stderr

"""How the processes of a run meet: in a store on rank 0, where each says that it is there.

All of them know the same secret (icom/parallel/secret.py), or none; from it and from what everybody said comes the key
with which everything else in the store is signed.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from icom.errors import IcomError, UsageError
from icom.names import plain
from icom.parallel.listening import listen
from icom.parallel.place import Place
from icom.parallel.secret import find_secret, sign
from icom.parallel.store import SignedStore

JOIN_SECONDS = 300
"""All processes have to be there within this time; cold disks take a minute to import PyTorch."""


@dataclass(frozen=True)
class Met:
    """What a process knows when all have met.

    Attributes:
        hosts: rank -> name of its machine.
        store: with the run's own signatures.
        listener: descriptor of the store's listening socket, which belongs to the store; None where it is not here.
    """

    hosts: list[str]
    store: SignedStore
    listener: int | None


def meet(place: Place) -> Met:
    """Connect to the store on rank 0 and learn who else is there.

    Raises:
        IcomError: somebody does not come, or is not who he should be.
        UsageError: processes that do not belong to each other.
        Forged: somebody else writes into the store, or with another secret.
    """
    store, listener = _store(place, find_secret(os.environ))
    me = _Presence(socket.gethostname(), os.getpid(), place.world_size, secrets.token_hex(16))
    first = _Presence.of(store, place.rank, store.compare_set(f"here/{place.rank}", "", json.dumps(vars(me))))
    if first != me:
        raise UsageError(
            f"Two processes are rank {place.rank}: {first.pid} on {first.host}, and {me.pid} on {me.host}. Is "
            f"another run using {place.master_address}:{place.master_port}? Give one of them another MASTER_PORT."
        )
    deadline = time.monotonic() + JOIN_SECONDS
    hosts, presences = [], []
    for rank in range(place.world_size):
        while not store.check([f"here/{rank}"]):
            if time.monotonic() > deadline:
                missing = [str(r) for r in range(place.world_size) if not store.check([f"here/{r}"])]
                raise IcomError(
                    f"After {JOIN_SECONDS} s rank {', '.join(missing)} of {place.world_size} did not come to "
                    f"{place.master_address}:{place.master_port}. Look at the output of that machine, and at firewalls."
                )
            time.sleep(0.05)
        presences.append(store.get(f"here/{rank}"))
        other = _Presence.of(store, rank, presences[-1])
        if other.size != place.world_size:
            raise UsageError(
                f"{me.host} was told of {place.world_size} processes, {other.host} of {other.size}. Is another run "
                f"using {place.master_address}:{place.master_port}? Give one of them another MASTER_PORT."
            )
        hosts.append(other.host)
    # A key of this run alone: what was signed in an earlier one with the same secret does not count.
    return Met(hosts, store.with_key(sign(store.key, *presences)), listener)


@dataclass(frozen=True)
class _Presence:
    """What a process says when it comes: its machine's name, process id, the world size, and random digits."""

    host: str
    pid: int
    size: int
    nonce: str

    @staticmethod
    def of(store: SignedStore, rank: int, text: bytes) -> _Presence:
        """Read one that stands in a store.

        Raises:
            Forged: it is none.
        """
        try:
            said = json.loads(text)
            return _Presence(plain(str(said["host"]), ""), int(said["pid"]), int(said["size"]), str(said["nonce"]))
        except (ValueError, KeyError, TypeError):  # without a secret, anybody can sign anything
            raise store.forged(f"here/{rank}") from None


def _wait_for_address(address: str) -> None:
    """Until rank 0's name leads somewhere: machines start apart, and a pod gets its name after it has started.

    Before anything listens or connects: rank 0 could not tell which of its addresses the name means, and would listen
    on all.

    Raises:
        IcomError: it does not come.
    """
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise IcomError(
                    f"The name of rank 0, {address} (MASTER_ADDR), leads nowhere: {error.strerror or error}, for "
                    f"{JOIN_SECONDS} s. Has rank 0 been started? Correct the name, or give its address."
                ) from None
        time.sleep(1)


def _store(place: Place, key: bytes) -> tuple[SignedStore, int | None]:
    """The store, and the descriptor of its listening socket where that is this process's."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    address = place.master_address
    assert address is not None
    _wait_for_address(address)
    # torchrun keeps a store of its own at that address, in which each restart needs names of its own.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    leads = place.rank == 0 and not agent
    listener: list[int] = []

    def connect() -> Any:
        if leads:
            listener.append(listen(place, place.master_port).detach())  # it is the store's from now on
        return TCPStore(
            address,
            place.master_port,
            is_master=leads,
            wait_for_workers=False,
            timeout=timedelta(seconds=JOIN_SECONDS),
            master_listen_fd=listener[0] if leads else None,
        )

    call = Call(connect)
    # Longer than its own timeout, which does not cover a port where something else listens and never answers.
    call.done.wait(JOIN_SECONDS + 1)
    where = f"{place.master_address}:{place.master_port}"
    if call.error and leads:
        raise IcomError(
            f"Rank 0 cannot listen on {where} ({str(call.error).splitlines()[0]}). Is another run using the port? Set "
            "MASTER_PORT (or main_process_port) to another one."
        ) from call.error
    if call.error or not call.done.is_set():
        raise IcomError(
            f"Rank {place.rank} on {socket.gethostname()} cannot reach rank 0 at {where} within {JOIN_SECONDS} s. Does "
            "rank 0 run there (the first line of the hosts file), and nothing else on that port? Is there a firewall?"
        ) from call.error
    store = PrefixStore(f"icom/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", call.result)
    return SignedStore(store, key, where), listener[0] if leads else None


class Call:
    """A call in a thread, so that this one can turn away from what may never return.

    Attributes:
        done: set when it has returned or failed.
        result: what it returned.
        error: what it raised.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.done = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None
        self._function = function
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self.result = self._function()
        except Exception as error:  # for whoever waits
            self.error = error
        finally:
            self.done.set()

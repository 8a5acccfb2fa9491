"""The processes of a run: how they meet, what they tell each other, and how they end together.

The process group exists before Accelerate is started, which adopts it and would make a gloo group of its own otherwise.
Small things (a seed, a checkpoint, digests) go through the store, as JSON or raw bytes; per optimizer step there is one
all-reduce. icom/parallel/liveness.py listens meanwhile whether all of them live.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from icom import machine
from icom.errors import IcomError, Stopped, UsageError
from icom.parallel.alike import differences
from icom.parallel.liveness import Launchers, Problem, Watch
from icom.parallel.place import CCL_ENVIRONMENT, SINGLE_PROCESS, Place, export
from icom.signals import end_process

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

JOIN_SECONDS = 300
"""All processes have to be there within this time; cold disks take a minute to import PyTorch."""
_COLLECTIVE_TIMEOUT = timedelta(days=1)  # the watch knows better who is gone
_LEAVE_SECONDS = 5.0
_BUCKET_BYTES = 25 * 2**20
"""As DistributedDataParallel's: from there on a message's size and not its number decides how long it takes."""


class Lost(IcomError):
    """Another process is gone, or failed and said so; one of the processes has told it."""

    def __init__(self, message: str, ranks: frozenset[int]) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.told = True


class Group:
    """One process and the others. A process on its own is a group of one, in which nothing has to be sent."""

    def __init__(self, place: Place, hosts: list[str], store: Store | None = None) -> None:
        self.place, self.hosts = place, hosts
        self._store = store
        self._watch: Watch | None = None
        if store:
            assert place.master_address
            own_store = store.clone()  # type: ignore[attr-defined]
            self._watch = Watch(own_store, place.rank, hosts, place.master_address, Launchers())
        self.collectives: str | None = None
        self._messages = 0
        self._lost: Lost | None = None

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.place.rank

    @property
    def size(self) -> int:
        """World size."""
        return self.place.world_size

    @property
    def leads(self) -> bool:
        """Whether this process writes files and talks."""
        return self.rank == 0

    def connect(self, collectives: str) -> None:
        """Make torch.distributed's process group.

        Args:
            collectives: gloo, ccl, nccl or mpi, as `choose_collectives` returned it.

        Raises:
            IcomError: it cannot be made.
        """
        from torch import distributed

        if self._store is None:
            return
        prepare_environment(collectives, self.place)
        store = distributed.PrefixStore("group", self._store.clone())  # type: ignore[attr-defined]

        def init() -> None:
            distributed.init_process_group(
                collectives, store=store, rank=self.rank, world_size=self.size, timeout=_COLLECTIVE_TIMEOUT
            )
            # gloo connects when it is first used: here, where it can be told what to do about it.
            distributed.all_reduce(torch.zeros(1, device="cuda" if collectives == "nccl" else "cpu"))

        assert self._watch is not None
        call, deadline = _Call(init), time.monotonic() + JOIN_SECONDS
        while not call.done.wait(0.05) and time.monotonic() < deadline:
            if self._watch.problem:
                raise self._ended(self._watch.problem)
        if call.error or not call.done.is_set():
            time.sleep(1)  # a process that died meanwhile is the better explanation
            if self._watch.problem:
                raise self._ended(self._watch.problem)
            atexit.register(end_process, IcomError.exit_code)
            why = str(call.error).splitlines()[0] if call.error else f"no connection within {JOIN_SECONDS} s"
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "that of the machine's name")
            raise IcomError(
                f"The processes cannot be connected with {collectives} ({why}). All ports have to be open between the "
                f"machines; the interface here is {interface} (GLOO_SOCKET_IFNAME)."
            ) from call.error
        self.collectives = collectives

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their sums over all processes; same shapes and order everywhere.

        They travel in buckets, so that a few KB are one message and gigabytes need no second copy of all.

        Raises:
            IcomError: a process is gone.
        """
        from torch import distributed

        if self.size > 1:
            for bucket in _buckets(tensors):
                together = torch.cat([tensor.detach().flatten() for tensor in bucket])
                self._run(partial(distributed.all_reduce, together))
                _deal_out(together, bucket)

    def broadcast_tensors(self, tensors: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """Rank 0's tensors, for everybody; the others give None. They come as they are on rank 0, on the CPU.

        Raises:
            IcomError: a process is gone.
        """
        from torch import distributed

        if self._store is None:
            assert tensors is not None
            return dict(tensors)
        kinds = {name: (str(tensor.dtype), list(tensor.shape)) for name, tensor in (tensors or {}).items()}
        kinds = json.loads(self.broadcast(json.dumps(kinds).encode() if self.leads else None))
        device = "cuda" if self.collectives == "nccl" else "cpu"
        received = {}
        for name, (dtype, shape) in kinds.items():
            mine = tensors[name] if tensors is not None else torch.empty(shape, dtype=_dtype(dtype))
            travelling = mine.detach().to(device).contiguous()
            if travelling.numel():
                self._run(partial(distributed.broadcast, travelling, 0))
            received[name] = travelling.cpu()
        return received

    def broadcast(self, content: bytes | None) -> bytes:
        """Rank 0's bytes, for everybody; the others give None. For small things."""
        if self._store is None:
            assert content is not None
            return content
        self._messages += 1
        key, store = f"broadcast/{self._messages}", self._store
        if self.leads:
            assert content is not None
            store.set(key, content)  # type: ignore[arg-type]  # annotated as str, takes bytes
        return self._wait_for(key)

    def wait_for_everyone(self) -> None:
        """Until all processes have come here."""
        if self._store is None:
            return
        self._messages += 1
        self._store.set(f"arrived/{self._messages}/{self.rank}", "1")
        for rank in range(self.size):
            self._wait_for(f"arrived/{self._messages}/{rank}")

    def agree(self, what: str, facts: Mapping[str, object]) -> None:
        """Refuse to go on where a process has other facts than rank 0.

        Args:
            what: names the facts: "the pictures".
            facts: name -> value that JSON can hold.

        Raises:
            IcomError: on the process that differs, naming its machine and what differs.
        """
        leading = json.loads(self.broadcast(json.dumps(facts).encode() if self.leads else None))
        mine = json.loads(json.dumps(facts))
        differing = sorted(differences({self.rank: mine}, leading), key=lambda difference: difference.name)
        if differing:
            listed = ", ".join(f"{one.name} ({_short(one.expected)} | {_short(one.found)})" for one in differing)
            raise IcomError(
                f"{what} of {self.hosts[self.rank]} (rank {self.rank}) are not those of {self.hosts[0]} (rank 0): "
                f"{listed}. All machines must train the same thing; make them equal and start again."
            )
        self.wait_for_everyone()

    def _wait_for(self, key: str) -> bytes:
        assert self._store is not None
        store = self._store
        return bytes(self._run(lambda: _get(store, key)))

    def _run(self, communicate: Callable[[], Any]) -> Any:
        """Communicate in a thread, so that this one can turn away when a peer is gone."""
        assert self._watch is not None
        call = _Call(communicate)
        while not call.done.wait(0.05):
            if self._watch.problem:
                raise self._ended(self._watch.problem)
        if isinstance(call.error, RuntimeError):  # torch's own errors are that
            raise self._ended(self._watch.why_broken(str(call.error))) from call.error
        if call.error:
            raise call.error
        return call.result

    def _ended(self, problem: Problem) -> Lost:
        assert self._watch is not None
        self._watch.handled.set()
        self._lost = Lost(problem.message, problem.lost)
        # Threads of gloo and of ours wait for the lost process; the interpreter must not wait for them when it ends.
        atexit.register(end_process, IcomError.exit_code)
        return self._lost

    def leave(self, error: BaseException | None = None) -> None:
        """End together: rank 0 writes what it has, and one process says what failed, before a launcher kills them all.

        Args:
            error: what ends this process; None when all is done.
        """
        if self._watch is None or self._store is None:
            return
        self._watch.handled.set()
        if isinstance(error, Stopped):  # all of them, at the same step
            if self.leads:
                print(f"icom: {error}", file=sys.stderr, flush=True)
            error.told = True
        elif isinstance(error, IcomError):
            # Of what fails in one or in all, the first to say so tells the user.
            if self._lost is None:
                self._watch.tell(Problem(f"{self.hosts[self.rank]} (rank {self.rank}): {error}", self.rank))
            error.told = True
        elif error is not None and self._lost is None:
            self._watch.tell(Problem(f"{self.hosts[self.rank]} (rank {self.rank}): {error!r}", self.rank))
        if self._lost is None or 0 not in self._lost.ranks:
            self._part(hurry=error is not None)
        self._watch.stop()
        self._store = self._watch = None
        if self._lost is None:
            from torch import distributed

            if distributed.is_initialized():
                distributed.destroy_process_group()

    def _part(self, *, hurry: bool) -> None:
        """Rank 0 goes when everybody has what it told, and the others when rank 0 is ready: it keeps the store.

        Raises:
            Lost: rank 0 is gone before it was ready.
        """
        assert self._store is not None
        assert self._watch is not None
        lost = self._lost.ranks if self._lost else frozenset()
        deadline = time.monotonic() + (_LEAVE_SECONDS if hurry else JOIN_SECONDS)
        try:
            if self.leads:
                if not hurry:
                    self._watch.expect_ends()
                self._store.set("left/0", "1")
                keys = [f"left/{rank}" for rank in range(1, self.size) if rank not in lost]
                while not self._store.check(keys) and time.monotonic() < deadline:
                    time.sleep(0.02)
                return
            while not self._store.check(["left/0"]) and not (hurry and time.monotonic() > deadline):
                if not hurry and self._watch.problem:
                    raise self._ended(self._watch.problem)
                time.sleep(0.02)
            self._watch.stop()  # before rank 0 can go: its end is no loss then
            self._store.set(f"left/{self.rank}", "1")
        except RuntimeError:
            return  # the store is gone already


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one dtype and device, of _BUCKET_BYTES together unless one alone is larger."""
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        alike = bucket and (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and not (alike and sum(t.nbytes for t in bucket) + tensor.nbytes <= _BUCKET_BYTES):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _deal_out(together: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the parts of a flat tensor to where they came from."""
    for tensor, part in zip(tensors, together.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.detach().copy_(part.view_as(tensor))


def _dtype(name: str) -> torch.dtype:
    """torch.float32, from "torch.float32"."""
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype


ALONE = Group(SINGLE_PROCESS, ["localhost"])
"""A process that nobody started together with others."""


@contextlib.contextmanager
def joined(place: Place) -> Iterator[Group]:
    """Meet the other processes; part from them at the end, whatever happened.

    An error in one process ends all of them, and one of them tells it.

    Raises:
        IcomError: they do not meet.
    """
    if place.world_size == 1:
        yield ALONE
        return
    export(place)
    try:
        group = _meet(place)
    except (RuntimeError, OSError) as error:  # torch's errors are RuntimeErrors
        raise IcomError(
            f"Rank {place.rank} on {socket.gethostname()} lost rank 0 at {place.master_address} while they met "
            f"({str(error).splitlines()[0]}). Look at rank 0's output. All ports have to be open between the machines."
        ) from error
    try:
        yield group
    except BaseException as error:
        group.leave(error)
        raise
    group.leave()


def prepare_environment(collectives: str, place: Place) -> None:
    """Set what gloo and oneCCL read from the environment, where the user has not."""
    assert place.master_address is not None
    interface = machine.interface_towards(place.master_address)
    if interface in {i.name for i in machine.interfaces() if i.loopback}:
        interface = machine.interface_towards()  # the master's own name leads to 127.0.1.1 on Debian
    if interface and place.world_size > place.local_size:
        # Else gloo takes the address that the machine's own name resolves to, on many 127.0.0.1 or 127.0.1.1.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if collectives == "ccl":
        own = {"CCL_LOCAL_RANK": str(place.local_rank), "CCL_LOCAL_SIZE": str(place.local_size)}
        if interface and place.world_size > place.local_size:
            own["FI_TCP_IFACE"] = interface
        for name, value in (CCL_ENVIRONMENT | own).items():
            os.environ.setdefault(name, value)


def _meet(place: Place) -> Group:
    """Connect to the store on rank 0 and learn who else is there."""
    store = _store(place)
    host = socket.gethostname()
    me = json.dumps({"host": host, "pid": os.getpid(), "size": place.world_size})
    first = json.loads(store.compare_set(f"here/{place.rank}", "", me))
    if (first["host"], first["pid"]) != (host, os.getpid()):
        raise UsageError(
            f"Two processes are rank {place.rank}: {first['pid']} on {first['host']}, and {os.getpid()} on {host}. Is "
            f"another run using {place.master_address}:{place.master_port}? Give one of them another MASTER_PORT."
        )
    deadline = time.monotonic() + JOIN_SECONDS
    hosts = []
    for rank in range(place.world_size):
        while not store.check([f"here/{rank}"]):
            if time.monotonic() > deadline:
                missing = [str(r) for r in range(place.world_size) if not store.check([f"here/{r}"])]
                raise IcomError(
                    f"After {JOIN_SECONDS} s rank {', '.join(missing)} of {place.world_size} did not come to "
                    f"{place.master_address}:{place.master_port}. Look at the output of that machine, and at firewalls."
                )
            time.sleep(0.05)
        other = json.loads(store.get(f"here/{rank}"))
        if other["size"] != place.world_size:
            raise UsageError(
                f"{host} was told of {place.world_size} processes, {other['host']} of {other['size']}. Is another run "
                f"using {place.master_address}:{place.master_port}? Give one of them another MASTER_PORT."
            )
        hosts.append(other["host"])
    return Group(place, hosts, store)


def _store(place: Place) -> Store:
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    address = place.master_address
    assert address is not None
    # torchrun keeps a store of its own at that address, in which each restart needs names of its own.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    call = _Call(
        lambda: TCPStore(
            address,
            place.master_port,
            is_master=place.rank == 0 and not agent,
            wait_for_workers=False,
            timeout=timedelta(seconds=JOIN_SECONDS),
        )
    )
    # Longer than its own timeout, which does not cover a port where something else listens and never answers.
    call.done.wait(JOIN_SECONDS + 1)
    where = f"{place.master_address}:{place.master_port}"
    if call.error and place.rank == 0 and not agent:
        raise IcomError(
            f"Rank 0 cannot listen on {where} ({str(call.error).splitlines()[0]}). Is another run using the port? Set "
            "MASTER_PORT (or main_process_port) to another one."
        ) from call.error
    if call.error or not call.done.is_set():
        raise IcomError(
            f"Rank {place.rank} on {socket.gethostname()} cannot reach rank 0 at {where} within {JOIN_SECONDS} s. Does "
            "rank 0 run there (the first line of the hosts file), and nothing else on that port? Is there a firewall?"
        ) from call.error
    return PrefixStore(f"icom/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", call.result)


class _Call:
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


def _get(store: Store, key: str) -> bytes:
    """The value as soon as it is there. Not by waiting in the store: its timeout would have to be for ever."""
    while not store.check([key]):
        time.sleep(0.002)
    return store.get(key)


def _short(value: object) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 40 else text[:12] + "…"

"""The processes of a run: how they meet, what they tell each other, and how they end together.

The process group exists before Accelerate is started, which adopts it and would make a gloo group of its own otherwise.
Small things (a seed, digests) go through the store (icom/parallel/store.py), signed, as JSON or raw bytes; per
optimizer step there is one all-reduce. icom/parallel/liveness.py listens meanwhile whether all of them live.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from icom.engine.memory import is_out_of_memory
from icom.errors import IcomError, Stopped, TemporaryFailure
from icom.parallel import environment, meeting
from icom.parallel.alike import differences
from icom.parallel.listening import refuse_newcomers
from icom.parallel.liveness import Launchers, RunProblem, Watch, exit_code_of
from icom.parallel.meeting import Call, Met
from icom.parallel.place import SINGLE_PROCESS, Place
from icom.parallel.store import Forged, SignedStore
from icom.signals import end_process

_COLLECTIVE_TIMEOUT = timedelta(days=1)  # the watch knows better who is gone
_LEAVE_SECONDS = 15.0
"""How long rank 0 stays for others to read why all end: one that was busy takes its going for a loss."""
_BUCKET_BYTES = 25 * 2**20
"""As DistributedDataParallel's: from there on a message's size and not its number decides how long it takes."""


class Lost(IcomError):
    """Another process is gone (exit code 75: worth another try), or failed and said so (1); one of them has told it."""

    def __init__(self, message: str, ranks: frozenset[int]) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.exit_code = exit_code_of(ranks)
        self.told = True


class Group:
    """One process and the others. A process on its own is a group of one, in which nothing has to be sent."""

    def __init__(self, place: Place, met: Met | None = None) -> None:
        """Args: of this process; what it knows of the others, if there are any."""
        self.place, self.hosts = place, met.hosts if met else ["localhost"]
        self._store: SignedStore | None = met.store if met else None
        self._listener: int | None = met.listener if met else None
        self._rendezvous: SignedStore | None = None
        self._watch = Watch(met.store.clone(), place, met.hosts, Launchers()) if met else None
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
        environment.for_collectives(collectives, self.place)
        # torch's libraries call it, and keep no Python object alive. NCCL's threads, which cannot be tried without a
        # GPU, get the plain one.
        self._rendezvous = self._store.clone()
        theirs = self._rendezvous.unsigned if collectives == "nccl" else self._rendezvous
        store = distributed.PrefixStore("group", theirs)  # type: ignore[attr-defined]

        def init() -> None:
            distributed.init_process_group(
                collectives, store=store, rank=self.rank, world_size=self.size, timeout=_COLLECTIVE_TIMEOUT
            )
            # gloo connects when it is first used: here, where it can be told what to do about it.
            distributed.all_reduce(torch.zeros(1, device="cuda" if collectives == "nccl" else "cpu"))

        assert self._watch is not None
        call, deadline = Call(init), time.monotonic() + meeting.JOIN_SECONDS
        while not call.done.wait(0.05) and time.monotonic() < deadline:
            if self._watch.problem:
                raise self._ended(self._watch.problem)
        if call.error or not call.done.is_set():
            time.sleep(1)  # a process that died meanwhile is the better explanation
            if self._watch.problem:
                raise self._ended(self._watch.problem)
            atexit.register(end_process, IcomError.exit_code)
            if isinstance(call.error, Forged):
                raise call.error
            why = str(call.error).splitlines()[0] if call.error else f"no connection within {meeting.JOIN_SECONDS} s"
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "that of the machine's name")
            raise IcomError(
                f"The processes cannot be connected with {collectives} ({why}). All ports have to be open between the "
                f"machines; the interface here is {interface} (GLOO_SOCKET_IFNAME)."
            ) from call.error
        self.collectives = collectives
        if self._listener is not None:  # all connections that anybody needs are there
            refuse_newcomers(self._listener)

    def attend(self, communicate: Callable[[], Any]) -> Any:
        """Call what communicates over the collectives by itself (a backward pass under DDP, say), as `sum` does.

        Raises:
            IcomError: a process is gone.
        """
        return communicate() if self.size == 1 else self._run(communicate)

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
            IcomError: a process is gone, or something else arrived than rank 0 sent.
        """
        from torch import distributed

        if self._store is None:
            assert tensors is not None
            return dict(tensors)
        # What is sent is said in the store, whose values are signed; the collectives' connections are not.
        sent = {name: (str(t.dtype), list(t.shape), _digest(t)) for name, t in (tensors or {}).items()}
        sent = json.loads(self.broadcast(json.dumps(sent).encode() if self.leads else None))
        device = "cuda" if self.collectives == "nccl" else "cpu"
        received = {}
        for name, (dtype, shape, digest) in sent.items():
            mine = tensors[name] if tensors is not None else torch.empty(shape, dtype=_dtype(dtype))
            travelling = mine.detach().to(device).contiguous()
            if travelling.numel():
                self._run(partial(distributed.broadcast, travelling, 0))
            received[name] = travelling.cpu()
            if _digest(received[name]) != digest:
                here = f"{self.hosts[self.rank]} (rank {self.rank})"
                raise IcomError(f"What arrived on {here} is not the {name} that rank 0 sent. Is the network sound?")
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
            store.set(key, content)
        return self._wait_for(key)

    def gather(self, content: bytes) -> list[bytes]:
        """Everybody's bytes by rank, for everybody. For small things."""
        if self._store is None:
            return [content]
        self._messages += 1
        self._store.set(f"gather/{self._messages}/{self.rank}", content)
        return [self._wait_for(f"gather/{self._messages}/{rank}") for rank in range(self.size)]

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
        call = Call(communicate)
        while not call.done.wait(0.05):
            if self._watch.problem:
                raise self._ended(self._watch.problem)
        if isinstance(call.error, RuntimeError) and not is_out_of_memory(call.error):  # torch's own errors are that
            raise self._ended(self._watch.why_broken(str(call.error))) from call.error
        if call.error:
            raise call.error
        return call.result

    def _ended(self, problem: RunProblem) -> Lost:
        assert self._watch is not None
        self._watch.handled.set()
        self._lost = Lost(problem.message, problem.lost)
        # Threads of gloo and of ours wait for the lost process; the interpreter must not wait for them when it ends.
        atexit.register(end_process, self._lost.exit_code)
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
                # Worth another try for the others, too; but rank 0 keeps the store, and is not gone while it speaks.
                again = isinstance(error, TemporaryFailure) and not self.leads
                lost = frozenset([self.rank] if again else [])
                self._watch.tell(RunProblem(f"{self.hosts[self.rank]} (rank {self.rank}): {error}", self.rank, lost))
            error.told = True
        elif error is not None and self._lost is None:
            self._watch.tell(RunProblem(f"{self.hosts[self.rank]} (rank {self.rank}): {error!r}", self.rank))
        if self._lost is None or 0 not in self._lost.ranks:
            self._part(hurry=error is not None)
        self._watch.stop()
        self._store = self._watch = None
        if self._lost is None:
            from torch import distributed

            if distributed.is_initialized():
                distributed.destroy_process_group()
            self._rendezvous = None

    def _part(self, *, hurry: bool) -> None:
        """Rank 0 goes when everybody has what it told, and the others when rank 0 is ready: it keeps the store.

        Raises:
            Lost: rank 0 is gone before it was ready.
            Forged: somebody else wrote into the store.
        """
        assert self._store is not None
        assert self._watch is not None
        lost = self._lost.ranks if self._lost else frozenset()
        deadline = time.monotonic() + (_LEAVE_SECONDS if hurry else meeting.JOIN_SECONDS)
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
        except Forged:
            if not hurry:
                raise


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


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _dtype(name: str) -> torch.dtype:
    """torch.float32, from "torch.float32"."""
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype


ALONE = Group(SINGLE_PROCESS)
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
    environment.export(place)
    try:
        group = Group(place, meeting.meet(place))
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


def _get(store: SignedStore, key: str) -> bytes:
    """The value as soon as it is there. Not by waiting in the store: its timeout would have to be for ever."""
    pause = 0.002
    while not store.check([key]):
        time.sleep(pause)
        pause = min(2 * pause, 0.05)  # who is waited for may need this core
    return store.get(key)


def _short(value: object) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 40 else text[:12] + "…"

"""The largest micro-batch that fits into the memory: found by computing with it before the run begins."""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from icom import machine
from icom.data.latent_set import LatentSource
from icom.data.records import Latents
from icom.engine.memory import is_out_of_memory, limits
from icom.errors import IcomError
from icom.methods.unet import Prepared
from icom.parallel import sharding

if TYPE_CHECKING:
    from icom.backends import Backend
    from icom.data.encode import Encoders
    from icom.data.records import Source
    from icom.methods.unet import Objective
    from icom.parallel.group import Group

SHARE_OF_FREE = 0.9
"""What a micro-batch may take of the memory that is free: threads that read the data, and other programs, need some."""
FOR_THREADS = 2**26
"""Bytes that are left of a process's own limit for threads that come later: a stack of 8 MB each, and a heap."""


@dataclass(frozen=True)
class Verdict:
    """A micro-batch, and why it is not larger."""

    size: int
    why: str


class Memory:
    """What this process takes of the memory that it computes in.

    Attributes:
        begin: bytes that it has when the trying begins.
        room: bytes that it may take beside them.
    """

    def __init__(self, device: torch.device, processes: int) -> None:
        """Args: where it computes; how many processes of this machine share the memory of its CPUs."""
        self._device = device
        limited = {} if self._on_gpu else limits()
        self.forget()
        self.begin = self._now()
        self._counted = {what: _status(what) for what in limited}
        left = [limit - self._counted[what] - FOR_THREADS for what, limit in limited.items()]
        free = self._free() if self._on_gpu else self._free() // processes
        self.room = int(SHARE_OF_FREE * max(0, min([free, *left])))

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def forget(self) -> None:
        """Give freed memory back, and begin anew to look for the peak."""
        gc.collect()  # an exception's traceback holds what was computed up to it
        if self._on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # glibc's
        with suppress(OSError):  # where the kernel cannot, the peak is one from before, and sizes come out too small
            Path("/proc/self/clear_refs").write_text("5")

    def taken(self) -> int:
        """Bytes at the peak since `forget`, beside those of the beginning.

        A limit counts all that malloc has of the kernel, used or not: what it has now, and gave back since the peak.
        """
        peak = torch.cuda.max_memory_allocated(self._device) if self._on_gpu else _status("VmHWM")
        given_back = max(0, peak - self._now())
        counted = [_status(what) - before + given_back for what, before in self._counted.items()]
        return max(0, peak - self.begin, *counted)

    def _now(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._on_gpu else _status("VmRSS")

    def _free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0] if self._on_gpu else machine.memory().available


def _status(name: str) -> int:
    """Bytes, from this process's /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def largest_that_fits(samples: int, attempt: Callable[[int], int | None], begin: int, room: int) -> Verdict:
    """The largest divisor of `samples` that fits.

    What a size takes is foretold from smaller ones, so that none is tried that would go far beyond the memory: the
    kernel ends a process that does, and tells it nothing.

    Args:
        samples: of a process in an optimizer step.
        attempt: computes with so many samples; returns the bytes that it took at most, None where it ran out of memory.
        begin: bytes that the process has before.
        room: bytes that it may take beside them.

    Raises:
        IcomError: not even one sample fits.
    """
    sizes = [size for size in range(1, samples + 1) if samples % size == 0]
    taken, refused, needed = {0: 0}, samples + 1, None
    size = 1
    while True:
        took = attempt(size)
        if took is not None and (took <= room or size == 1):
            taken[size] = took
        else:
            refused, needed = size, took
        largest = max(taken)
        if largest == 0:
            raise _not_even_one()
        likely = []
        for candidate in sizes:
            if largest < candidate < refused:
                foretold = _foretell(taken, candidate)
                if foretold > room:
                    refused, needed = candidate, foretold
                    break
                likely.append(candidate)
        if not likely:
            break
        # What is foretold from far below is not reliable.
        size = max((candidate for candidate in likely if candidate <= 2 * largest), default=likely[0])
    if largest == samples:
        return Verdict(samples, f"all samples that a process has in a step; {_gb(begin + taken[samples])} GB")
    takes = "runs out of memory" if needed is None else f"takes about {_gb(begin + needed)} GB"
    return Verdict(largest, f"{refused} does not fit: {takes}, of {_gb(begin + room)} GB that are there")


def _not_even_one() -> IcomError:
    return IcomError(
        "Out of memory: not even one sample fits beside weights, gradients and optimizer. Use "
        "--gradient_checkpointing, a smaller --resolution, or more processes with --parallel full_shard."
    )


def _foretell(taken: dict[int, int], size: int) -> int:
    """Bytes, on the line through the two largest sizes that were tried."""
    *_, before, last = sorted(taken)
    slope = max(0, taken[last] - taken[before]) / (last - before)
    return int(taken[last] + slope * (size - last))


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f}"


def find_micro_batch(
    samples: int,
    resolution: int,
    unet: Any,
    objective: Objective,
    encoders: Encoders | None,
    data: Source,
    backend: Backend,
    group: Group,
    *,
    copies: int,
    sharded: bool,
) -> Verdict:
    """Try micro-batches; the smallest that any process finds counts. Weights, random state and data stay as they are.

    All of an optimizer step is in the memory meanwhile: weights, gradients, and what stands for the optimizer's state.
    Each process tries for itself, with whole weights and gradients, which FSDP has, too, beside its own parts of them:
    until the last micro-batch of a step, its gradients are whole.

    Args:
        samples: of a process in an optimizer step.
        resolution: of pictures, in pixels.
        unet: float32, on its device; its gradients are gone afterwards.
        objective: that is trained.
        encoders: where the data are pictures.
        data: that is trained on.
        backend: that computes.
        group: the processes.
        copies: of all trained numbers that the training keeps beside weights and gradients.
        sharded: these are shared by the processes.

    Raises:
        IcomError: not even one sample fits.
    """
    sample = _sample(resolution, unet, data)
    empty = data.empty if isinstance(data, LatentSource) else None
    try:
        state = torch.ones(_beside(unet, copies, group.size if sharded else 1), device=backend.device)
        for parameter in unet.parameters():
            parameter.grad = torch.ones_like(parameter)
        group.wait_for_everyone()  # what the others on this machine take is no longer free
        memory = Memory(backend.device, max(1, group.place.local_size))
        group.wait_for_everyone()

        def compute(size: int) -> None:
            objective.loss(unet, [sample] * size, encoders, empty, backend).backward()

        def attempt(size: int) -> int | None:
            memory.forget()
            try:
                group.attend(partial(compute, size))  # as the training does: threads may have heaps of their own
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                return None
            return memory.taken()

        verdict = largest_that_fits(samples, attempt, memory.begin, memory.room)
        del state
        memory.forget()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise _not_even_one() from error
    finally:
        unet.zero_grad(set_to_none=True)
    verdicts = [Verdict(**json.loads(said)) for said in group.gather(json.dumps(vars(verdict)).encode())]
    return min(verdicts, key=lambda verdict: verdict.size)


def _beside(unet: Any, copies: int, processes: int) -> int:
    """Numbers that the training keeps beside whole weights and gradients; `processes` share what they need not."""
    numbers: int = sum(parameter.numel() for parameter in unet.parameters())
    if processes == 1:
        return copies * numbers
    return (copies + 2) * numbers // processes + sharding.IN_FLIGHT * sharding.largest_unit(unet)


def _sample(resolution: int, unet: Any, data: Source) -> Prepared:
    """One that costs what all cost."""
    if not isinstance(data, LatentSource):
        return Prepared("", False, 0, 0, torch.zeros(3, resolution, resolution), None)
    mean = torch.zeros(unet.config.in_channels, resolution // 8, resolution // 8)
    return Prepared("", False, 0, 0, None, Latents(mean, mean, data.empty))

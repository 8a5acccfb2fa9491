"""Bytes that a process sends to others in an optimizer step: by formula, and counted by the kernel."""

from __future__ import annotations

import math
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from icom.parallel.sharding import Parallel

_BUCKET = 25 * 2**20
"""Bytes of DistributedDataParallel's buckets."""
_TCP_INFO_BYTES, _SENT = 232, 200
"""Of the kernel's struct tcp_info (linux/tcp.h): its size, and where tcpi_bytes_sent and tcpi_bytes_retrans lie."""


def sent_by_formula(
    parallel: Parallel,
    shapes: Sequence[tuple[int, ...]],
    processes: int,
    itemsize: int,
    collectives: str = "gloo",
) -> float:
    """Bytes that each process sends in an optimizer step with one micro-batch.

    In rings of N processes (Thakur, Rabenseifner, Gropp 2005) each sends (N - 1) / N of what is gathered or scattered,
    and twice that of what is all-reduced. gloo's reduce-scatter is an all-reduce of which a part is kept.

    Args:
        parallel: DDP all-reduces float32 gradients; FSDP gathers weights before the forward pass, `full_shard` again
            before the backward pass, and reduce-scatters float32 gradients. It cuts each weight along its first
            dimension into equal parts, and fills the last one up.
        shapes: of all that is trained.
        processes: N.
        itemsize: bytes of a gathered number: FSDP gathers in the precision of the computation.
        collectives: gloo, nccl …
    """
    if parallel == "one" or processes == 1:
        return 0.0
    passed = (processes - 1) / processes
    if parallel == "ddp":
        return 2 * passed * 4 * sum(map(math.prod, shapes))
    padded = sum(processes * math.ceil(shape[0] / processes) * math.prod(shape[1:]) for shape in shapes)
    gathers = 2 if parallel == "full_shard" else 1
    reduces = 2 if collectives == "gloo" else 1
    return passed * padded * (gathers * itemsize + reduces * 4)


def messages_by_formula(parallel: Parallel, numbers: int, units: int, processes: int, collectives: str = "gloo") -> int:
    """Messages of a step that follow each other, each of which costs the network's latency.

    Args:
        parallel: see `sent_by_formula`.
        numbers: that are trained.
        units: blocks whose weights FSDP gathers together.
        processes: in the ring: N - 1 messages for each time around.
        collectives: gloo, nccl …
    """
    if parallel == "one" or processes == 1:
        return 0
    if parallel == "ddp":
        return 2 * math.ceil(4 * numbers / _BUCKET) * (processes - 1)
    rounds = (2 if parallel == "full_shard" else 1) + (2 if collectives == "gloo" else 1)
    return units * rounds * (processes - 1)


def bytes_sent() -> int:
    """What this process's open TCP connections have sent so far, without headers and what had to be sent again.

    As the Linux kernel counts it (4.19 and newer); 0 elsewhere.
    """
    total = 0
    try:
        descriptors = list(Path("/proc/self/fd").iterdir())
    except OSError:
        return 0
    for descriptor in descriptors:
        try:
            if not str(descriptor.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                    sent, again = struct.unpack_from("QQ", info, _SENT)
                    total += sent - again
        except (OSError, struct.error):  # closed meanwhile, or an older kernel
            continue
    return total

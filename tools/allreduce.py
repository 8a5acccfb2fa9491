"""Time real all-reduces between hosts made of network namespaces: `python -m tools.allreduce` (root on Linux).

It holds the cost that tools/scaling.py computes against gloo and the kernel's TCP. Every host is a namespace of its own
on a bridge, and the kernel's token bucket (tc-tbf) limits what it sends; all of it vanishes at the end. What the
machine cannot show: long cables (the latency is whatever the kernel takes) and more cores than it has.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from icom.errors import IcomError, UsageError
from icom.files import write_atomically
from tools.scaling import row_bytes, table_bytes

MTU = 9001
"""Of a VPC; larger frames leave less of the bandwidth to headers, which the model does not count."""
BURST, QUEUE = "256k", "1mb"
"""Of the token bucket: what may leave at once, and what may wait for its turn."""
PATIENCE = timedelta(minutes=10)


@dataclass(kw_only=True)
class AllreduceConfig:
    """Time all-reduces of one row and of a whole token table over shaped connections."""

    hosts: tuple[int, ...] = (2, 3, 4)
    """How many hosts, one process each."""
    rates: tuple[float, ...] = (0.5, 2.0)
    """Gbit/s that each host may send."""
    repeats: int = 5
    """All-reduces of the table that are timed; of the row, twenty times as many. Two of each warm up."""
    arch: str = "sd15"
    """Architecture whose row and token table are summed."""
    output: Path = Path("benchmarks/allreduce.json")
    """File for the result."""

    def __post_init__(self) -> None:
        """Raises: UsageError for impossible numbers."""
        if min(self.hosts, default=0) < 2 or min(self.rates, default=0) <= 0 or self.repeats < 1:
            raise UsageError("--hosts takes numbers from 2 up, --rates numbers above 0, --repeats a number from 1 up.")


def allreduce(config: AllreduceConfig) -> None:
    """Measure, print beside the model's figures, and write.

    Raises:
        UsageError: no right to make network namespaces.
        IcomError: a host failed.
    """
    from icom.bench.command import this_machine
    from tools.scaling import allreduce_table

    if os.geteuid() or not all(map(shutil.which, ("ip", "tc"))):
        raise UsageError("This needs root, and `ip` and `tc` (Debian: apt-get install iproute2): it makes networks.")
    rows = []
    for rate in config.rates:
        for hosts in config.hosts:
            payloads = [row_bytes(config.arch, hosts), table_bytes(config.arch)]
            measured = _measure(hosts, rate, payloads, [20 * config.repeats, config.repeats])
            for payload, seconds in zip(payloads, measured["seconds"], strict=True):
                rows.append(
                    {
                        "hosts": hosts,
                        "gbits": rate,
                        "latency_seconds": measured["latency"],
                        "bytes": payload,
                        "seconds": statistics.median(seconds),
                        "fastest": min(seconds),
                        "slowest": max(seconds),
                    }
                )
    repeats = f"{20 * config.repeats} all-reduces of the row, {config.repeats} of the table"
    result = {"machine": this_machine(), "mtu": MTU, "repeats": repeats, "rows": rows}
    print(allreduce_table(result))
    write_atomically(config.output, (json.dumps(result, indent=1) + "\n").encode(), "--output")


def _measure(hosts: int, rate: float, payloads: list[int], repeats: list[int]) -> dict[str, Any]:
    """What `_talk` printed on the first host."""
    processes: list[subprocess.Popen[str]] = []
    with _network(hosts, rate) as namespaces:
        try:
            for rank, namespace in enumerate(namespaces):
                environment = os.environ | {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(hosts),
                    "MASTER_ADDR": _address(0),
                    "MASTER_PORT": "29500",  # of the namespace, where nobody else is
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "OMP_NUM_THREADS": "1",
                    "TORCH_CPP_LOG_LEVEL": "ERROR",  # it would warn that the addresses have no names
                }
                talk = ["ip", "netns", "exec", namespace, sys.executable, "-m", "tools.allreduce", "talk"]
                command = [*talk, json.dumps([payloads, repeats])]
                processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
            printed, _ = processes[0].communicate()
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
                assert process.stdout
                process.stdout.close()
    if any(codes):
        raise IcomError(f"Processes on {hosts} hosts ended with the exit codes {codes}; what they said stands above.")
    measured: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return measured


def _address(host: int) -> str:
    return f"10.0.0.{host + 1}"


@contextmanager
def _network(hosts: int, rate: float) -> Iterator[list[str]]:
    """Names of namespaces that reach each other through `eth0`; the bridge has one of its own."""
    bridge, *names = (f"icom-{os.getpid()}-{number}" for number in range(hosts + 1))
    made: list[str] = []
    try:
        for name in (bridge, *names):
            _run("ip", "netns", "add", name)
            made.append(name)
        _run("ip", "-n", bridge, "link", "add", "br0", "mtu", str(MTU), "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "br0", "up")
        for host, name in enumerate(names):
            port = f"port{host}"
            peer = ("type", "veth", "peer", "name", "eth0", "mtu", str(MTU), "netns", name)
            _run("ip", "-n", bridge, "link", "add", port, "mtu", str(MTU), *peer)
            _run("ip", "-n", bridge, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", name, "address", "add", f"{_address(host)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", device, "up")
            shape = ("root", "tbf", "rate", f"{rate}gbit", "burst", BURST, "limit", QUEUE)
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape)
        yield names
    finally:
        for name in made:
            _run("ip", "netns", "delete", name)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise IcomError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


def _talk(payloads: list[int], repeats: list[int]) -> None:
    """On a host: print the latency, and the seconds of each all-reduce until its slowest host has the sum."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", timeout=PATIENCE)
    result: dict[str, Any] = {"latency": _latency(), "seconds": []}
    for size, count in zip(payloads, repeats, strict=True):
        gradient = torch.ones(size // 4)
        seconds = torch.tensor(_times(lambda: distributed.all_reduce(gradient), count))  # noqa: B023
        distributed.all_reduce(seconds, op=distributed.ReduceOp.MAX)
        result["seconds"].append(seconds.tolist())
    if distributed.get_rank() == 0:
        print(json.dumps(result))
    distributed.destroy_process_group()


def _times(work: Callable[[], object], count: int) -> list[float]:
    from torch import distributed

    seconds = []
    for _ in range(2 + count):
        distributed.barrier()
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return seconds[2:]


def _latency() -> float:
    """Seconds of a message of four bytes from one process to another: half of there and back, the median."""
    import torch
    from torch import distributed

    ball, rank = torch.zeros(1), distributed.get_rank()

    def there_and_back() -> None:
        if rank == 0:
            distributed.send(ball, 1)
            distributed.recv(ball, 1)
        elif rank == 1:
            distributed.recv(ball, 0)
            distributed.send(ball, 0)

    return statistics.median(_times(there_and_back, 100)) / 2


def main() -> None:
    """Measure, or be one of the hosts; exit codes as of `icom`."""
    if sys.argv[1:2] == ["talk"]:
        _talk(*json.loads(sys.argv[2]))
        return
    import tyro

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the networks have to go
    try:
        allreduce(tyro.cli(AllreduceConfig, prog="python -m tools.allreduce", use_underscores=True))
    except IcomError as error:
        print(f"icom: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

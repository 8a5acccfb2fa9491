"""`icom bench --ranks`: what a group of processes reaches on one machine, each with as many cores and as much work.

The single process has as few cores as each of the largest group's, so that nothing but sharing the machine and talking
to each other can make a group slower than that many single ones. As many processes that know nothing of each other tell
the two apart: they share the memory's bandwidth, and do not talk.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from icom import backends, machine
from icom.bench.job import Job, Measurement
from icom.config.bench import BenchConfig, parse_ranks
from icom.engine.memory import says_out_of_memory
from icom.errors import IcomError, UsageError
from icom.files import write_atomically
from icom.parallel.listening import listen
from icom.parallel.place import Place
from icom.parallel.secret import SECRET, new_secret
from icom.progress import progress

ALONE = "1 rank"

Rounds = list[list[Measurement]]
"""Of one contender: for each round, what each of its processes measured."""


def bench_ranks(config: BenchConfig, job: Job, here: dict[str, Any]) -> None:
    """Measure, print the table, and write --json.

    Args:
        config: what was asked for.
        job: what every process does.
        here: the machine, for the record.

    Raises:
        UsageError: --ranks asks for more than there are cores, or for what this machine computes on something else.
        IcomError: a process failed.
    """
    sizes = parse_ranks(config.ranks or "")
    if backends.is_gpu(config.backend):
        raise UsageError("--ranks shares out CPU cores: add --backend cpu.")
    cores = machine.cores_of_rank(0, 1)
    slots = slots_of(max(sizes), cores)
    # A group's name -> (processes, whether they form a group).
    contenders = {ALONE: (1, False)}
    for size in sizes[1:]:
        contenders |= {f"{size} ranks": (size, True), f"{size} alone": (size, False)}
    measured: dict[str, Rounds] = {name: [] for name in contenders}
    for name in progress([name for _ in range(config.rounds) for name in contenders], "measuring", "group"):
        size, joined = contenders[name]
        measured[name].append(run_side_by_side(name, job, slots[:size], joined=joined))
    result = summarise(config, here | {"cores_per_rank": len(slots[0])}, measured)
    _print_table(result)
    if config.json:
        write_atomically(Path(config.json), json.dumps(result, indent=1).encode(), "--json")


class OutOfMemory(IcomError):
    """A measuring process needed more memory than there is."""


def slots_of(most: int, cores: list[int]) -> list[list[int]]:
    """Cores for each of so many processes, as many for each.

    Raises:
        UsageError: there are fewer cores.
    """
    per_rank = len(cores) // most
    if not per_rank:
        raise UsageError(f"--ranks asks for {most} processes with a core each; {len(cores)} can be used here.")
    return [cores[rank * per_rank : (rank + 1) * per_rank] for rank in range(most)]


def run_side_by_side(name: str, job: Job, slots: list[list[int]], *, joined: bool) -> list[Measurement]:
    """Start a process on each slot's cores, let them time their steps at the same time, and wait for all.

    Args:
        name: of the contender, for the message when it fails.
        job: what each does.
        slots: CPU numbers for each process.
        joined: whether they form a group, as torchrun would start it, or do not know of each other.

    Raises:
        OutOfMemory: one had too little memory; the others were ended.
        IcomError: one failed otherwise; the same.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = listen(Place(world_size=len(slots), local_size=len(slots), master_address="127.0.0.1"), 0)
    port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    job = dataclasses.replace(job, side_by_side=len(slots), meeting=store.port)
    group = {"WORLD_SIZE": str(len(slots)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    group[SECRET] = new_secret()
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank, cores in enumerate(slots):
                variables = group | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(len(slots))}
                environment = {key: value for key, value in os.environ.items() if key not in variables}
                environment |= {"OMP_NUM_THREADS": str(len(cores)), "GLOO_SOCKET_IFNAME": "lo"}
                if joined:
                    environment |= variables
                processes.append(_start(job, cores, environment, Path(folder) / str(rank)))
            _wait(name, processes, Path(folder))
        finally:
            for process in processes:
                process.kill()
                process.wait()
        lines = [(Path(folder) / f"{rank}.out").read_text().splitlines()[-1] for rank in range(len(slots))]
    measured = [Measurement(**json.loads(line)) for line in lines]
    if any(m.group != (len(slots) if joined else 1) for m in measured):
        raise IcomError(f"Measuring {name}: the processes formed groups of {[m.group for m in measured]}.")
    return measured


def _start(job: Job, cores: list[int], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # inherited: it stands before the process loads an OpenMP runtime
    try:
        with log.with_suffix(".out").open("wb") as out, log.with_suffix(".err").open("wb") as err:
            command = [sys.executable, "-m", "icom.bench.measure", json.dumps(dataclasses.asdict(job))]
            return subprocess.Popen(command, env=environment, stdout=out, stderr=err)
    finally:
        os.sched_setaffinity(0, before)


def _wait(name: str, processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Until all are done, or one has failed: the others would wait for it."""
    while None in (codes := [process.poll() for process in processes]) and not any(codes):
        time.sleep(0.05)
    for rank, process in enumerate(processes):
        if process.returncode:
            text = (folder / f"{rank}.err").read_text(errors="replace").strip()
            kind = OutOfMemory if _lacked_memory(process.returncode, text) else IcomError
            raise kind(f"Measuring {name} failed in process {rank} (exit code {process.returncode}):\n{text}")


def _lacked_memory(code: int, said: str) -> bool:
    """Whether a process ended for want of memory: the kernel kills it, or an allocator says so."""
    return code == -signal.SIGKILL or says_out_of_memory(said)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def summarise(config: BenchConfig, here: dict[str, Any], measured: dict[str, Rounds]) -> dict[str, Any]:
    """Medians and ranges; ratios are formed within each round, between groups that ran one after the other.

    Returns:
        JSON-ready; seconds, 2^30 bytes. Of each contender `efficiency`: its images per second over those of as many
        single ranks; of a group also `of_alone`: over those of as many processes without a group (what talking
        leaves), `waiting_seconds`: per step between a rank's gradient and its optimizer's step, and
        `exchange_seconds`: the same of the rank that waited least, which is the last to come.
    """
    single = measured[ALONE]
    speed = {name: [_images_per_second(config, group) for group in rounds] for name, rounds in measured.items()}
    contenders: dict[str, dict[str, Any]] = {}
    for name, rounds in measured.items():
        size, joined = len(rounds[0]), name.endswith("ranks")
        seconds = [second for group in rounds for m in group for second in m.seconds]
        row: dict[str, Any] = {
            "processes": size,
            "group": rounds[0][0].group,
            "images_per_second": statistics.median(speed[name]),
            "seconds_per_step": statistics.median(seconds),
            "fastest": min(seconds),
            "slowest": max(seconds),
            "peak_gb": max(m.peak_gb for group in rounds for m in group),
            **_ratio("efficiency", speed[name], [size * one for one in speed[ALONE]]),
        }
        if joined:
            steps = [step for group in rounds for step in zip(*(m.exchange for m in group), strict=True)]
            row |= _ratio("of_alone", speed[name], speed[f"{size} alone"])
            row["waiting_seconds"] = statistics.median(statistics.mean(step) for step in steps)
            row["exchange_seconds"] = statistics.median(min(step) for step in steps)
            row["bytes_per_step"] = rounds[0][0].bytes_per_step
        contenders[name] = row
    return {
        "options": {key: value for key, value in dataclasses.asdict(config).items() if key != "json"},
        "machine": here,
        "backend": single[0][0].description,
        "contenders": contenders,
    }


def _images_per_second(config: BenchConfig, group: list[Measurement]) -> float:
    return sum(config.batch_size / statistics.median(m.seconds) for m in group)


def _ratio(name: str, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {name: statistics.median(ratios), f"{name}_range": [min(ratios), max(ratios)]}


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    options, here = result["options"], result["machine"]
    table = Table(
        title=f"Training step, {options['arch']} at {options['resolution']} px, batch {options['batch_size']} per "
        f"rank, {here['cores_per_rank']} core(s) per rank",
        caption=f"{here['cpu']}, PyTorch {here['torch']}; median (range) of {options['rounds']} rounds x "
        f"{options['steps']} steps",
    )
    table.add_column("")
    for name in ("s/step", "images/s", "efficiency", "of as many alone"):
        table.add_column(name, justify="right")
    rows = result["contenders"].items()
    for name, row in rows:
        step = f"{row['seconds_per_step']:.3g} ({row['fastest']:.3g}–{row['slowest']:.3g})"
        shares = [_percent(row, key) for key in ("efficiency", "of_alone") if key in row and name != ALONE]
        table.add_row(name, step, f"{row['images_per_second']:.3g}", *shares)
    console = Console()
    console.print(table)
    lines = [
        f"{name}: a rank waits {1e3 * row['waiting_seconds']:.1f} ms of a step for the others and the all-reduce of "
        f"{row['bytes_per_step']} bytes; the last to come {1e3 * row['exchange_seconds']:.1f} ms"
        for name, row in rows
        if "of_alone" in row
    ]
    console.print("\n  ".join([result["backend"], *lines]), highlight=False, markup=False)


def _percent(row: dict[str, Any], key: str) -> str:
    low, high = row[f"{key}_range"]
    return f"{row[key]:.1%} ({low:.0%}–{high:.0%})"

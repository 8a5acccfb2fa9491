"""`icom bench`: seconds per training step, against the field's usual step, each in its own fresh process."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from icom import backends
from icom.bench.cards import peak_of
from icom.bench.job import Job, Measurement
from icom.bench.measure import count_flops
from icom.bench.ranks import bench_ranks
from icom.config.bench import BenchConfig
from icom.errors import IcomError, UsageError
from icom.files import cache_folder, write_atomically
from icom.machine import cpu_model
from icom.models.architectures import ARCHITECTURES
from icom.progress import progress

OURS, STOCK, SAME_ALLOCATOR = "icom", "reference, stock allocator", "reference, icom's allocator"


def bench(config: BenchConfig) -> None:
    """Measure, print the table, and write --json, or the files of --sweep.

    Raises:
        UsageError: --ranks asks for more than this machine has.
        IcomError: a measuring process failed.
    """
    arch = config.architecture
    config = dataclasses.replace(config, arch=arch, resolution=config.resolution or ARCHITECTURES[arch].resolution)
    if config.enable_cuda_graph and not backends.is_gpu(config.backend):
        raise UsageError("--enable_cuda_graph is for --backend cuda: on CPUs nothing waits between kernels. Drop it.")
    if config.method == "unet":
        from icom.bench.unet_command import bench_unet

        bench_unet(config, _job(config), this_machine())
        return
    if config.ranks is not None:
        bench_ranks(config, _job(config), this_machine())
        return
    if config.sweep:
        _sweep(config)
        return
    measured = _take_turns(_contenders(config), config.rounds)
    result = summarise(config, measured)
    _print_table(result)
    if config.json:
        write_atomically(Path(config.json), json.dumps(result, indent=1).encode(), "--json")


def _job(config: BenchConfig) -> Job:
    assert config.resolution is not None
    return Job(
        config.architecture,
        config.resolution,
        config.batch_size,
        config.mixed_precision,
        config.steps,
        str(cache_folder(None)),  # attention is computed as `icom train` does here
        config.backend,
        config.engine,
        enable_cuda_graph=config.enable_cuda_graph,
    )


def _contenders(config: BenchConfig) -> dict[str, Job]:
    ours = _job(config)
    usual = dataclasses.replace(ours, backend=None)
    if config.profile:
        ours = dataclasses.replace(ours, profile=str(Path(config.profile).absolute()))
    if config.compare == "none":
        return {OURS: ours}
    if backends.is_gpu(config.backend):  # where the CPU's allocator makes no difference
        return {STOCK: dataclasses.replace(usual, our_allocator=False, reference_backend="cuda"), OURS: ours}
    return {STOCK: dataclasses.replace(usual, our_allocator=False), SAME_ALLOCATOR: usual, OURS: ours}


def _take_turns(jobs: dict[str, Job], rounds: int) -> dict[str, list[Measurement]]:
    measured: dict[str, list[Measurement]] = {name: [] for name in jobs}
    for name in progress([name for _ in range(rounds) for name in jobs], "measuring", "process"):
        job = json.dumps(dataclasses.asdict(jobs[name]))
        done = subprocess.run(
            [sys.executable, "-m", "icom.bench.measure", job], capture_output=True, check=False, text=True
        )
        if done.returncode:
            raise IcomError(f"Measuring {name} failed:\n{done.stderr.strip()}")
        measured[name].append(Measurement(**json.loads(done.stdout.splitlines()[-1])))
    return measured


def summarise(config: BenchConfig, measured: dict[str, list[Measurement]]) -> dict[str, Any]:
    """Medians and spreads. A ratio is formed within each round, from the medians of processes that ran side by side.

    Args:
        config: what was asked for.
        measured: contender -> one measurement per round; icom's among them.

    Returns:
        JSON-ready; times in seconds, memory in 2^30 bytes, operations in 10^9.
    """
    contenders = {name: _row(rounds) for name, rounds in measured.items()}
    result: dict[str, Any] = {
        "options": {k: v for k, v in dataclasses.asdict(config).items() if k != "json"},
        "machine": this_machine(),
        "contenders": contenders,
        "seconds_per_step": contenders[OURS]["seconds_per_step"],
        "peak_memory_gb": contenders[OURS]["peak_gb"],
        **_details(config, measured[OURS]),
    }
    for key, name in (("ratio_stock", STOCK), ("ratio_same_allocator", SAME_ALLOCATOR)):
        if name in measured:
            pairs = zip(measured[name], measured[OURS], strict=True)
            ratios = [statistics.median(theirs.seconds) / statistics.median(ours.seconds) for theirs, ours in pairs]
            result[key] = statistics.median(ratios)
            result[f"{key}_range"] = [min(ratios), max(ratios)]
    if STOCK in measured:
        result["reference_seconds_per_step"] = contenders[STOCK]["seconds_per_step"]
    return result


def _row(rounds: list[Measurement]) -> dict[str, float]:
    seconds = [s for m in rounds for s in m.seconds]
    return {
        "seconds_per_step": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "peak_gb": max(m.peak_gb for m in rounds),
    }


def _details(config: BenchConfig, rounds: list[Measurement]) -> dict[str, Any]:
    """What only our own steps tell.

    The share of the peak is the time that counted operations would take at the measured peaks, over the time taken,
    within each round: both were measured in one process.
    """
    assert config.resolution is not None
    matmul, convolution = count_flops(config.architecture, config.resolution, config.batch_size)
    shares = [
        (matmul / m.matmul_tflops + convolution / m.convolution_tflops) / 1e3 / statistics.median(m.seconds)
        for m in rounds
    ]
    seconds = statistics.median(second for m in rounds for second in m.seconds)
    card = config.peak_tflops or (peak_of(rounds[0].card) if config.mixed_precision == "bf16" else None)
    return {
        "backend": rounds[0].description,
        "images_per_second": config.batch_size / seconds,
        **_parts(rounds),
        "bytes_per_step": rounds[0].bytes_per_step,
        "gflop_per_step": {"matmul": matmul, "convolution": convolution},
        "peak_tflops": {
            "matmul": statistics.median(m.matmul_tflops for m in rounds),
            "convolution": statistics.median(m.convolution_tflops for m in rounds),
        },
        "share_of_peak": statistics.median(shares),
        "card_peak_tflops": card,
        "share_of_card_peak": (matmul + convolution) / 1e3 / seconds / card if card else None,
    }


def _parts(rounds: list[Measurement]) -> dict[str, float | None]:
    """Seconds of the step's parts; None where they cannot be told apart."""
    if not rounds[0].forward:
        return dict.fromkeys(("forward_seconds", "backward_seconds", "other_seconds"))
    steps = [step for m in rounds for step in zip(m.seconds, m.forward, m.backward, strict=True)]
    return {
        "forward_seconds": statistics.median(forward for _, forward, _ in steps),
        "backward_seconds": statistics.median(backward for _, _, backward in steps),
        "other_seconds": statistics.median(whole - forward - backward for whole, forward, backward in steps),
    }


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    options, here = result["options"], result["machine"]
    table = Table(
        title=f"Training step, {options['arch']} at {options['resolution']} px, batch "
        f"{options['batch_size']}, {_precision(options)}",
        caption=f"{here['cpu']}, {here['threads']} threads, PyTorch {here['torch']}; median (range) of "
        f"{options['rounds']} processes x {options['steps']} steps",
    )
    table.add_column("")
    for name in ("s/step", "range", "peak GB", "icom is faster by"):
        table.add_column(name, justify="right")
    keys = {STOCK: "ratio_stock", SAME_ALLOCATOR: "ratio_same_allocator"}
    for name, row in result["contenders"].items():
        key = keys.get(name)
        ratio = "{:.2f} x ({:.2f}–{:.2f})".format(result[key], *result[f"{key}_range"]) if key else ""
        span = f"{_seconds(row['fastest'])}–{_seconds(row['slowest'])}"
        table.add_row(name, _seconds(row["seconds_per_step"]), span, f"{row['peak_gb']:.1f}", ratio)
    flop, peak = result["gflop_per_step"], result["peak_tflops"]
    console = Console()
    console.print(table)
    times = {part: result[f"{part}_seconds"] for part in ("forward", "backward", "other")}
    told = ", ".join(f"{part} {_seconds(time)} s" for part, time in times.items() if time is not None)
    card = result["card_peak_tflops"]
    of_card = f"; {result['share_of_card_peak']:.0%} of {card:g} TFLOP/s, the GPU's peak on paper" if card else ""
    console.print(
        f"{result['backend']}\n"
        f"  {result['images_per_second']:.3g} images/s; {told or 'passes played from CUDA graphs'}; "
        f"{result['bytes_per_step']} bytes all-reduced per step where there are several processes\n"
        f"  {flop['matmul']:.0f} GFLOP in matrix products at a peak of {peak['matmul']:.2f} TFLOP/s, "
        f"{flop['convolution']:.0f} in convolutions at {peak['convolution']:.2f}: "
        f"{result['share_of_peak']:.0%} of the peak{of_card}",
        highlight=False,
        markup=False,
    )


def _sweep(config: BenchConfig) -> None:
    """Batch sizes x backends x engines: a table, PREFIX.csv, PREFIX.png; and for `auto`, which backend is faster."""
    assert config.sweep
    plain = _job(config)
    jobs = {
        f"batch {size}, {backend}, engine {engine}": dataclasses.replace(
            plain, batch_size=size, backend=backend, engine=engine
        )
        for size in config.sweep_batch_sizes
        for backend in backends.NAMES
        if backends.why_not(backend) is None
        for engine in (("auto",) if backend == "cuda" else ("off", "on"))
    }
    measured = _take_turns(jobs, config.rounds)
    rows: list[dict[str, Any]] = []
    for name, job in jobs.items():
        row = _row(measured[name])
        rows.append(
            {
                "micro_batch": job.batch_size,
                "backend": job.backend,
                "engine": job.engine,
                **row,
                "images_per_second": job.batch_size / row["seconds_per_step"],
            }
        )
    for row in rows:
        row["ratio"] = row["images_per_second"] / rows[0]["images_per_second"]
    _print_sweep(config, rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys())
    writer.writeheader()
    writer.writerows(rows)
    prefix = Path(config.sweep)
    write_atomically(prefix.with_name(f"{prefix.name}.csv"), text.getvalue().encode(), "--sweep")
    write_atomically(prefix.with_name(f"{prefix.name}.png"), _plot(config, rows), "--sweep")
    smallest = min(config.sweep_batch_sizes)
    seconds = {
        row["backend"]: row["seconds_per_step"]
        for row in rows
        if row["engine"] != "off" and row["micro_batch"] == smallest
    }
    backends.remember(seconds, cache_folder(None))


def _print_sweep(config: BenchConfig, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    here = this_machine()
    table = Table(
        title=f"Training step, {config.arch} at {config.resolution} px, {_precision(dataclasses.asdict(config))}",
        caption=f"{here['cpu']}, {here['threads']} threads, PyTorch {here['torch']}; medians of {config.rounds} "
        f"processes x {config.steps} steps; ratio to the first row's throughput",
    )
    table.add_column("micro-batch", justify="right")
    table.add_column("backend")
    table.add_column("engine")
    for name in ("s/step", "images/s", "ratio", "peak GB"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["micro_batch"]),
            row["backend"],
            row["engine"],
            f"{row['seconds_per_step']:.3g}",
            f"{row['images_per_second']:.3g}",
            f"{row['ratio']:.2f}",
            f"{row['peak_gb']:.1f}",
        )
    Console().print(table)


def _plot(config: BenchConfig, rows: list[dict[str, Any]]) -> bytes:
    """PNG: images per second over the batch size, a line for each backend and engine."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for backend, engine in dict.fromkeys((row["backend"], row["engine"]) for row in rows):
        line = [row for row in rows if (row["backend"], row["engine"]) == (backend, engine)]
        axes.plot(
            [row["micro_batch"] for row in line],
            [row["images_per_second"] for row in line],
            marker="o",
            label=f"{backend}, engine {engine}",
        )
    axes.set(xlabel="micro-batch", ylabel="images/s", title=f"{config.arch} at {config.resolution} px")
    axes.set_xticks(sorted(set(config.sweep_batch_sizes)))
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.legend()
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()


def _seconds(value: float) -> str:
    """Hundredths, and of a GPU's steps what there is to see."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3g}"


def _precision(options: dict[str, Any]) -> str:
    return "bf16" if options["mixed_precision"] == "bf16" else "fp32"


def this_machine() -> dict[str, Any]:
    """CPU, cores, threads and versions, for the record of a measurement."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }

"""`icom bench --method unet`: what a step of `icom finetune` takes, in a table, and against diffusers' own script."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from icom import backends, machine
from icom.bench import unet_report
from icom.bench.job import Job, Measurement
from icom.bench.ranks import OutOfMemory, run_side_by_side, slots_of
from icom.config.bench import BenchConfig, parse_ranks
from icom.errors import IcomError, UsageError
from icom.files import write_atomically
from icom.progress import progress

PICTURES = 16
"""So many are made up, or precomputed; the run goes around them."""
OUT_OF_MEMORY = "out of memory"
REFERENCE, OURS, FROM_LATENTS = "diffusers' script", "icom", "icom, latents precomputed"

Rounds = list[list[Measurement]]
"""For each round, what each of the processes measured."""


def bench_unet(config: BenchConfig, job: Job, here: dict[str, Any]) -> None:
    """Measure, print the tables, and write --json and the files of --sweep.

    Args:
        config: what was asked for, architecture and resolution settled.
        job: what is the same in all measurements.
        here: the machine, for the record.

    Raises:
        UsageError: --ranks asks for more than this machine has.
        IcomError: a measuring process failed otherwise than for memory, or the pictures cannot be precomputed.
    """
    data = config.train_data_dir or f"synthetic:{PICTURES}"
    with tempfile.TemporaryDirectory(prefix="icom-bench-") as folder:
        job = dataclasses.replace(job, method="unet", data=data)
        if config.compare == "reference":
            latents = _precompute(job, Path(folder) / "latents")
            result = compare(config, here, _measure(config, _contenders(job, latents)))
            unet_report.print_comparison(result)
        else:
            if config.precomputed:
                job = dataclasses.replace(job, data=_precompute(job, Path(folder) / "latents"))
            result = tabulate(config, here, _measure(config, _table(config, job)))
            unet_report.print_table(result)
    if config.sweep:
        prefix = Path(config.sweep)
        for suffix, content in unet_report.files(result).items():
            write_atomically(prefix.with_name(f"{prefix.name}.{suffix}"), content, "--sweep")
    if config.json:
        write_atomically(Path(config.json), json.dumps(result, indent=1).encode(), "--json")


def _precompute(job: Job, folder: Path) -> str:
    """Latents of the job's pictures, by icom's own command, in a process that leaves no memory behind."""
    words = ["--train_data_dir", job.data, "--pretrained_model_name_or_path", f"random:{job.arch}"]
    words += ["--resolution", str(job.resolution), "--max_train_samples", str(PICTURES), "--output_dir", str(folder)]
    words += ["--backend", job.backend or "cpu", "--mixed_precision", "auto", "--format", "tar"]
    command = [sys.executable, "-m", "icom", "data", "precompute", *words]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    if done.returncode:
        raise IcomError(f"Precomputing latents failed:\n{done.stderr.strip()}")
    return str(folder)


def _table(config: BenchConfig, job: Job) -> dict[int, tuple[Job, int]]:
    """Row -> (what each of its processes does, how many those are)."""
    sizes = parse_ranks(config.ranks) if config.ranks is not None else [1]
    shared = [(1, "auto"), *((size, parallel) for size in sizes if size > 1 for parallel in config.parallel)]
    options = itertools.product(
        dict.fromkeys(shared),
        config.sweep_batch_sizes,
        config.gradient_checkpointing,
        config.ema,
        config.workers,
    )
    return {
        row: (
            dataclasses.replace(
                job,
                batch_size=batch,
                gradient_checkpointing=checkpointing == "on",
                ema=ema == "on",
                workers=workers,
                parallel=parallel,
            ),
            size,
        )
        for row, ((size, parallel), batch, checkpointing, ema, workers) in enumerate(options)
    }


def _contenders(job: Job, latents: str) -> dict[str, tuple[Job, int]]:
    usual = dataclasses.replace(job, backend=None, our_allocator=False)
    return {REFERENCE: (usual, 1), OURS: (job, 1), FROM_LATENTS: (dataclasses.replace(job, data=latents), 1)}


def _measure(config: BenchConfig, jobs: Mapping[Any, tuple[Job, int]]) -> list[tuple[Any, Job, int, Rounds | None]]:
    """What was measured of each; None where memory did not suffice. They take turns, so that a slow minute hits all.

    Raises:
        UsageError: more processes than cores, or what is not measured on GPUs.
        IcomError: a process failed otherwise.
    """
    most = max(size for _, size in jobs.values())
    slots = slots_of(most, machine.cores_of_rank(0, 1))
    on_gpu = backends.is_gpu(config.backend)
    if on_gpu and (most > 1 or config.compare == "reference"):
        raise UsageError("--ranks and --compare reference measure CPUs: add --backend cpu.")
    measured: dict[Any, Rounds | None] = {name: [] for name in jobs}
    for name in progress([name for _ in range(config.rounds) for name in jobs], "measuring", "row"):
        job, size = jobs[name]
        rounds = measured[name]
        if rounds is None:
            continue
        try:
            rounds.append(run_side_by_side(_name(name, job, size), job, slots[:size], joined=size > 1))
        except OutOfMemory:
            measured[name] = None
    return [(name, *jobs[name], measured[name]) for name in jobs]


def _name(name: Any, job: Job, size: int) -> str:
    return name if isinstance(name, str) else f"{size} process(es) with a micro-batch of {job.batch_size}"


def tabulate(
    config: BenchConfig, here: dict[str, Any], measured: list[tuple[Any, Job, int, Rounds | None]]
) -> dict[str, Any]:
    """The table's rows, and how attention was computed.

    Returns:
        JSON-ready. Of each row: times in seconds, medians over all steps, rounds and processes; `images_per_second` is
        micro-batch x processes over the median step; `waiting` the share of a step that passed waiting for data;
        `peak_gb` in 2^30 bytes; `bytes_sent` by a process in a step, counted by the kernel, and `bytes_by_formula`;
        `efficiency`: images per second over as many times those of one process. None where memory did not suffice:
        `status` says so.
    """
    rows = []
    for _, job, size, rounds in measured:
        row: dict[str, Any] = {
            "processes": size,
            "parallel": job.parallel if size > 1 else "one",
            "micro_batch": job.batch_size,
            "gradient_checkpointing": "on" if job.gradient_checkpointing else "off",
            "ema": "on" if job.ema else "off",
            "workers": job.workers,
            **_figures(job, size, rounds),
            "status": "measured" if rounds else OUT_OF_MEMORY,
        }
        rows.append(row)
    for row in rows:
        (one,) = (r for r in rows if r["processes"] == 1 and all(r[key] == row[key] for key in _SAME_WORK))
        known = row["images_per_second"] and one["images_per_second"]
        row["efficiency"] = (
            _rounded(row["images_per_second"] / row["processes"] / one["images_per_second"]) if known else None
        )
    return _record(config, here, measured) | {"rows": rows}


_SAME_WORK = ("micro_batch", "gradient_checkpointing", "ema", "workers")


def compare(
    config: BenchConfig, here: dict[str, Any], measured: list[tuple[Any, Job, int, Rounds | None]]
) -> dict[str, Any]:
    """icom's step beside diffusers'. Ratios are formed within each round, of processes that ran one after the other.

    Returns:
        JSON-ready; as `tabulate`, by contender, and `faster_by`: the reference's median step over this one's, the
        median over the rounds, with its range.
    """
    contenders: dict[str, dict[str, Any]] = {}
    reference = measured[0][3]
    for name, job, size, rounds in measured:
        row: dict[str, Any] = {**_figures(job, size, rounds), "status": "measured" if rounds else OUT_OF_MEMORY}
        if name != REFERENCE and rounds and reference:
            ratios = [_median_step(theirs) / _median_step(ours) for theirs, ours in zip(reference, rounds, strict=True)]
            row["faster_by"] = _rounded(statistics.median(ratios))
            row["faster_by_range"] = [_rounded(min(ratios)), _rounded(max(ratios))]
        contenders[name] = row
    return _record(config, here, measured) | {"contenders": contenders}


def _median_step(group: list[Measurement]) -> float:
    return statistics.median(second for m in group for second in m.seconds)


def _figures(job: Job, size: int, rounds: Rounds | None) -> dict[str, float | None]:
    """Numbers of a row, rounded once: all that show them show the same. None where nothing was measured."""

    def median(values: Iterable[float]) -> float | None:
        found = list(values)
        return _rounded(statistics.median(found)) if found else None

    each = [m for group in rounds or [] for m in group]
    seconds = [second for m in each for second in m.seconds]
    step = median(seconds)
    return {
        "seconds_per_step": step,
        "fastest": _rounded(min(seconds)) if seconds else None,
        "slowest": _rounded(max(seconds)) if seconds else None,
        "images_per_second": _rounded(size * job.batch_size / step) if step else None,
        "images_per_second_per_device": _rounded(job.batch_size / step) if step else None,
        "waiting": median(share for m in each for share in m.waiting),
        "forward_seconds": median(second for m in each for second in m.forward),
        "backward_seconds": median(second for m in each for second in m.backward),
        "peak_gb": _rounded(max(m.peak_gb for m in each)) if each else None,
        "bytes_sent": median(count for m in each for count in m.sent),
        "bytes_by_formula": each[0].bytes_per_step if each and size > 1 else None,
    }


def _cores(most: int) -> int:
    """Of each process."""
    return len(slots_of(most, machine.cores_of_rank(0, 1))[0])


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _record(
    config: BenchConfig, here: dict[str, Any], measured: list[tuple[Any, Job, int, Rounds | None]]
) -> dict[str, Any]:
    """What holds for all rows: options, machine, backend, and each attention's shape with what was measured of it."""
    each = [m for _, job, _, rounds in measured if job.backend is not None for group in rounds or [] for m in group]
    ways = {shape: by_way for m in each for shape, by_way in m.ways.items()}
    return {
        "options": {name: value for name, value in dataclasses.asdict(config).items() if name != "json"},
        "machine": here | {"cores_per_process": _cores(max(size for _, _, size, _ in measured))},
        "backend": each[0].description if each else "",
        "attention": {
            shape: {"chosen": way, "milliseconds": ways.get(shape, {})}
            for shape, way in sorted({item for m in each for item in m.attention.items()})
        },
    }

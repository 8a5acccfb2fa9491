"""`icom bench`: seconds per training step, against the field's usual step, each in its own fresh process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from icom import backends, models
from icom.architectures import ARCHITECTURES
from icom.captions import TEMPLATES
from icom.config import BenchConfig, TrainConfig, check_resolution
from icom.embedding import captions_to_ids, placeholder_tokens
from icom.engine.memory import keep_freed_memory
from icom.errors import IcomError, UsageError
from icom.files import write_atomically
from icom.images import Transform, list_pictures, pixels, read_picture
from icom.reference import ReferenceTrainer
from icom.sampling import SampleStream, gaussian_noise

OURS, STOCK, SAME_ALLOCATOR = "icom", "reference, stock allocator", "reference, icom's allocator"


@dataclass(frozen=True)
class Measurement:
    """What one process measured.

    Attributes:
        seconds: of each timed step.
        peak_gb: highest resident memory, in 2^30 bytes.
    """

    seconds: list[float]
    peak_gb: float


def bench(config: BenchConfig) -> None:
    """Measure, print the table, and write --json.

    Raises:
        UsageError: an impossible option.
        IcomError: a measuring process failed.
    """
    for name in ("steps", "rounds", "train_batch_size"):
        if getattr(config, name) < 1:
            raise UsageError(f"--{name} has to be at least 1.")
    resolution = config.resolution or ARCHITECTURES[config.arch].resolution
    check_resolution(resolution)
    config = dataclasses.replace(config, resolution=resolution)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # so that Ctrl-C removes the temporary folder
    contenders = [OURS] if config.compare == "none" else [STOCK, SAME_ALLOCATOR, OURS]
    measured: dict[str, list[Measurement]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as cache:
        turns = [name for _ in range(config.rounds) for name in contenders]
        for name in tqdm(turns, "measuring", unit="process"):
            measured[name].append(_in_fresh_process(config, name, cache))
    result = summarise(config, measured)
    _print_table(result)
    if config.json:
        write_atomically(Path(config.json), json.dumps(result, indent=1).encode())


def summarise(config: BenchConfig, measured: dict[str, list[Measurement]]) -> dict[str, Any]:
    """Medians and spreads. A ratio is formed within each round, from the medians of processes that ran side by side.

    Args:
        config: what was asked for.
        measured: contender -> one measurement per round.

    Returns:
        JSON-ready; times in seconds, memory in 2^30 bytes.
    """
    contenders = {
        name: {
            "seconds_per_step": statistics.median(s for m in rounds for s in m.seconds),
            "fastest": min(s for m in rounds for s in m.seconds),
            "slowest": max(s for m in rounds for s in m.seconds),
            "peak_gb": max(m.peak_gb for m in rounds),
        }
        for name, rounds in measured.items()
    }
    result: dict[str, Any] = {
        "options": {k: v for k, v in dataclasses.asdict(config).items() if k != "json"},
        "machine": machine(),
        "contenders": contenders,
        "seconds_per_step": contenders[OURS]["seconds_per_step"],
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


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    options, machine = result["options"], result["machine"]
    table = Table(
        title=f"Training step, {options['arch']} at {options['resolution']} px, batch "
        f"{options['train_batch_size']}, {'bf16' if options['mixed_precision'] == 'bf16' else 'fp32'}",
        caption=f"{machine['cpu']}, {machine['threads']} threads, PyTorch {machine['torch']}; median (range) of "
        f"{options['rounds']} processes x {options['steps']} steps",
    )
    table.add_column("")
    table.add_column("s/step", justify="right")
    table.add_column("range", justify="right")
    table.add_column("peak GB", justify="right")
    table.add_column("icom is faster by", justify="right")
    keys = {STOCK: "ratio_stock", SAME_ALLOCATOR: "ratio_same_allocator"}
    for name, row in result["contenders"].items():
        key = keys.get(name)
        ratio = "{:.2f} x ({:.2f}–{:.2f})".format(result[key], *result[f"{key}_range"]) if key else ""
        span = f"{row['fastest']:.2f}–{row['slowest']:.2f}"
        table.add_row(name, f"{row['seconds_per_step']:.2f}", span, f"{row['peak_gb']:.1f}", ratio)
    Console().print(table)


def machine() -> dict[str, Any]:
    """CPU, cores, threads and versions, for the record of a measurement."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _in_fresh_process(config: BenchConfig, contender: str, cache: str) -> Measurement:
    job = json.dumps({"config": dataclasses.asdict(config), "contender": contender, "cache": cache})
    done = subprocess.run([sys.executable, "-m", "icom.bench", job], capture_output=True, check=False, text=True)
    if done.returncode:
        raise IcomError(f"Measuring {contender} failed:\n{done.stderr.strip()}")
    return Measurement(**json.loads(done.stdout.splitlines()[-1]))


def _measure(config: BenchConfig, contender: str, cache: str) -> Measurement:
    """The child's part: build the model, warm up, time the steps."""
    if contender != STOCK:
        keep_freed_memory()
    models.quiet_libraries()
    resolution = config.resolution
    assert resolution is not None
    options = TrainConfig(
        train_data_dir="bundled",
        placeholder_token="<bench>",
        initializer_token="toy",
        resolution=resolution,
        train_batch_size=config.train_batch_size,
        learning_rate=1e-3,
        max_train_steps=config.steps + 1,
        seed=0,
        mixed_precision=config.mixed_precision,
        report_to="none",
        cache_dir=cache,
    )
    step = _our_step(options, config) if contender == OURS else _reference_step(options, config)
    seconds = []
    for index in range(config.steps + 1):
        began = time.perf_counter()
        step(index)
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return Measurement(seconds[1:], peak)


def _our_step(options: TrainConfig, config: BenchConfig) -> Callable[[int], object]:
    from accelerate import Accelerator

    from icom.run import prepare
    from icom.train import optimizer_step

    backend, _ = backends.resolve("cpu", config.mixed_precision, config.engine)
    model = models.load(models.find(f"random:{config.arch}"), backend.dtype)
    accelerator = Accelerator(cpu=True, mixed_precision=config.mixed_precision)
    run = prepare(options, backend, accelerator, model, list_pictures("bundled"))
    return lambda index: optimizer_step(run, index * run.samples_per_step)


def _reference_step(options: TrainConfig, config: BenchConfig) -> Callable[[int], object]:
    backend, _ = backends.resolve("cpu", config.mixed_precision)
    model = models.load(models.find(f"random:{config.arch}"), backend.dtype)
    trainer = ReferenceTrainer(model, options, backend.autocast())
    templates = TEMPLATES["object"]
    tokens = placeholder_tokens(options.placeholder_token, options.num_vectors)
    length = model.text_encoder.config.max_position_embeddings
    captions = captions_to_ids(trainer.tokenizer, templates, tokens, length)
    transform = Transform(options.resolution, center_crop=False)
    images = [read_picture(picture.path) for picture in list_pictures("bundled")]
    timesteps = model.noise_scheduler.config["num_train_timesteps"]
    stream = SampleStream(0, len(images), options.repeats, len(templates), timesteps)
    factor = 2 ** (len(model.vae.config["block_out_channels"]) - 1)
    shape = (model.vae.config["latent_channels"], *(options.resolution // factor,) * 2)

    def step(index: int) -> float:
        first = index * config.train_batch_size
        samples = [stream[i] for i in range(first, first + config.train_batch_size)]
        noises = [gaussian_noise(sample, shape) for sample in samples]
        batch = torch.stack([pixels(images[s.picture], transform, flip=s.flip) for s in samples])
        latents = trainer.encode(batch, torch.stack([vae_noise for vae_noise, _ in noises]))
        return trainer.train_batch(
            latents,
            torch.stack([noise for _, noise in noises]),
            torch.tensor([sample.timestep for sample in samples]),
            captions[[sample.template for sample in samples]],
        )

    return step


if __name__ == "__main__":
    work = json.loads(sys.argv[1])
    measurement = _measure(BenchConfig(**work["config"]), work["contender"], work["cache"])
    print(json.dumps(dataclasses.asdict(measurement)))

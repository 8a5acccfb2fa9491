"""Time the UNet's training with encoders in its process, before it and beside it: `python -m tools.online`.

One command for the three, each in a process of its own, with the same samples and the same number of threads; it prints
the rows of docs/precompute.md. Steps before the first that is counted warm up.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icom.errors import IcomError


@dataclass(kw_only=True)
class OnlineConfig:
    """Seconds per step with encoders in the training process, before it, and beside it."""

    pretrained_model_name_or_path: str = "random:sd15"
    """As in `icom finetune`; random weights take as long as others."""
    train_data_dir: str = "synthetic:64"
    """Pictures, as in `icom finetune`."""
    resolution: int = 512
    """Side of the squares in pixels."""
    train_batch_size: int = 1
    """Pictures per step."""
    mixed_precision: str = "auto"
    """As in `icom finetune`."""
    encoder_workers: int = 1
    """Workers of Ray."""
    encoder_cpus: int = 1
    """Cores of each. They share this machine's with the training."""
    encoder_gpus: float = 0.0
    """GPUs of each."""
    ray_address: str | None = None
    """Where they are; default: here."""
    steps: int = 8
    """That are counted."""
    warm_up: int = 2
    """That are not."""
    options: str = "--gradient_checkpointing"
    """More options of `icom finetune`."""


def online(config: OnlineConfig) -> None:
    """Measure and print.

    Raises:
        IcomError: one of the commands failed.
    """
    with tempfile.TemporaryDirectory(prefix="icom-online-") as name:
        folder = Path(name)
        model = ["--pretrained_model_name_or_path", config.pretrained_model_name_or_path]
        model += ["--resolution", str(config.resolution), "--mixed_precision", config.mixed_precision]
        workers = ["--encoder_workers", str(config.encoder_workers), "--encoder_cpus", str(config.encoder_cpus)]
        workers += ["--encoder_gpus", str(config.encoder_gpus)]
        workers += ["--ray_address", config.ray_address] if config.ray_address else []
        latents = str(folder / "latents")
        began = time.monotonic()
        _icom("data", "precompute", "--train_data_dir", config.train_data_dir, "--output_dir", latents, *model)
        precomputing = time.monotonic() - began
        ways = {
            "in the training process": ["--train_data_dir", config.train_data_dir],
            "precomputed": ["--train_data_dir", latents],
            f"online, {config.encoder_workers} workers": ["--train_data_dir", config.train_data_dir, *workers],
        }
        print("| encoders | seconds per step (median) | waiting for data |\n|---|---|---|")
        for number, (way, words) in enumerate(ways.items()):
            output = folder / str(number)
            batch = ["--train_batch_size", str(config.train_batch_size), "--seed", "1", "--report_to", "none"]
            steps = ["--max_train_steps", str(config.warm_up + config.steps), "--checkpointing_steps", "1000000"]
            _icom("finetune", *model, *batch, *steps, *config.options.split(), *words, "--output_dir", str(output))
            rows: list[dict[str, Any]] = [
                json.loads(row) for row in (output / "metrics.jsonl").read_text().splitlines()
            ]
            counted = rows[config.warm_up :]
            seconds = statistics.median(row["seconds"] for row in counted)
            waiting = statistics.mean(row["waiting"] for row in counted)
            shutil.rmtree(output)  # gigabytes
            print(f"| {way} | {seconds:.2f} | {waiting:.0%} |", flush=True)
        print(f"\nPrecomputing {config.train_data_dir}: {precomputing:.0f} s.")


def _icom(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "icom", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise IcomError(f"icom {' '.join(words)} failed: {done.stderr.strip()[-2000:]}")


if __name__ == "__main__":
    import tyro

    try:
        online(tyro.cli(OnlineConfig, prog="python -m tools.online", use_underscores=True))
    except IcomError as error:
        sys.exit(f"online: {error}")

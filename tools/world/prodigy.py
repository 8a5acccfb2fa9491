"""Prodigy on the whole token table and on the rows alone: `python -m tools.world.prodigy` prints its estimates.

Trainers that put the other rows back after each step give Prodigy the whole table. Its estimate d of the distance to
the solution is a quotient: the way from the start along the gradient, over the gradients' weighted sum. Other words of
the captions have gradients and never move, so they stand below the line and not above it.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from prodigyopt import Prodigy

from icom import backends
from icom.bench.reference import ReferenceTrainer
from icom.config.demo import ConceptName
from icom.config.train import TrainConfig, load_train_config
from icom.data.sampling import gaussian_noise
from icom.models import loading
from icom.training.material import open_material
from icom.training.run import Run, prepare
from icom.training.step import optimizer_step


@dataclass(kw_only=True)
class ProdigyConfig:
    """Watch Prodigy's estimate."""

    concept: ConceptName = "red-moon"
    """Bundled concept to learn."""
    max_train_steps: int = 300
    """Steps."""
    every: int = 25
    """Print every so many steps."""
    seed: int = 0
    """Of the samples."""


def settings(config: ProdigyConfig, output: str) -> TrainConfig:
    """The bundled model's defaults, with Prodigy."""
    return load_train_config(
        {
            **{"train_data_dir": f"bundled:{config.concept}", "placeholder_token": "<concept>"},
            **{"initializer_token": "object", "optimizer": "prodigy", "output_dir": output, "seed": config.seed},
            **{"max_train_steps": config.max_train_steps, "mixed_precision": "no", "adam_weight_decay": 0.01},
        }
    )


def rows_alone(options: TrainConfig) -> tuple[Run, Callable[[int], tuple[Any, torch.Tensor]]]:
    """icom's own: the run, and its step, which returns the optimizer and the rows."""
    backend, _ = backends.resolve("cpu", "no")
    model = loading.load(loading.find("bundled"), torch.float32)
    run = prepare(options, backend, Accelerator(cpu=True), model, open_material(options))

    def step(index: int) -> tuple[Any, torch.Tensor]:
        optimizer_step(run, index * run.samples_per_step)
        return run.optimizer, run.method.parameters["rows"]

    return run, step


def whole_table(options: TrainConfig, run: Run) -> Callable[[int], tuple[Any, torch.Tensor]]:
    """A plain loop over the same samples, as the field has it."""
    model = loading.load(loading.find("bundled"), torch.float32)
    trainer = ReferenceTrainer(model, options, run.backend.autocast())
    with contextlib.redirect_stdout(io.StringIO()):
        optimizer = Prodigy(
            trainer.table.parameters(),
            lr=options.learning_rate,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_epsilon,
            weight_decay=options.adam_weight_decay,
            safeguard_warmup=True,
            use_bias_correction=True,
        )
    trainer.optimizer = optimizer
    shape = run.moments.shape(0)

    def step(index: int) -> tuple[Any, torch.Tensor]:
        first = index * run.samples_per_step
        samples = [run.stream[i] for i in range(first, first + run.samples_per_step)]
        noises = [gaussian_noise(sample, shape) for sample in samples]
        latents = [run.moments.sample(sample, of_vae) for sample, (of_vae, _) in zip(samples, noises, strict=True)]
        trainer.train_batch(
            torch.stack(latents) * model.vae.config["scaling_factor"],
            torch.stack([noise for _, noise in noises]),
            torch.tensor([sample.timestep for sample in samples]),
            run.method.ids(run.model.tokenizer, samples),
        )
        return optimizer, trainer.rows

    return step


def main(config: ProdigyConfig) -> None:
    """Print JSON lines: d, and how far the rows have come."""
    with tempfile.TemporaryDirectory() as output:
        options = settings(config, output)
        run, alone = rows_alone(options)
        for name, step in (("rows alone", alone), ("whole table", whole_table(options, run))):
            start = run.method.concept.table.weight[run.model.tokenizer.encode("object")[1]].detach()
            for index in range(config.max_train_steps):
                optimizer, rows = step(index)
                if (index + 1) % config.every == 0 or index + 1 in (1, 2, 5, 10):
                    d, way = optimizer.param_groups[0]["d"], float((rows.detach() - start).norm())
                    print(json.dumps({"what": name, "step": index + 1, "d": d, "way": round(way, 6)}), flush=True)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(ProdigyConfig, prog="python -m tools.world.prodigy", use_underscores=True))

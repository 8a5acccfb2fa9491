"""What a run shows while it trains and leaves at its end."""

from __future__ import annotations

import io
import resource
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from icom.commands.generate import draw
from icom.data.images import names_of
from icom.errors import IcomError
from icom.files import make_writable_folder, write_atomically
from icom.methods.embedding import filled
from icom.methods.embedding_file import OPENS_IN, named_by_file
from icom.models import hub, loading, pipelines
from icom.progress import progress
from icom.report.page import PAGE, write_page
from icom.training import tracking
from icom.training.checkpoint import State
from icom.training.checkpoint_folders import VALIDATION
from icom.training.outcome import DONE
from icom.training.pictures import say_pictures
from icom.training.report import LOSS_CURVE, grid, loss_curve, model_card, save_png
from icom.training.samples import SHEET, Samples
from icom.training.stopping import chosen, verdict
from icom.training.train_validation import Validation, take_best

if TYPE_CHECKING:
    from diffusers import DDPMScheduler
    from PIL import Image

    from icom.methods.textual_inversion import TextualInversion
    from icom.training.material import Material
    from icom.training.run import Run

EMBEDDING = "learned_embeds.safetensors"
SHARE_FOR_PICTURES, CHEAP_PICTURES = 0.25, 10.0
"""Comparison pictures that nobody asked for may take this share of the training's time, or so many seconds."""
SAMPLES_PER_PICTURE = 27
"""A picture costs about as much as so many samples of a training step: 25 steps with guidance are 50 forward passes, a
sample is a forward and a backward pass; decoding is the rest."""


def say_start(
    run: Run, material: Material, reason: str, learned: str, state: State, repository: str | None = None
) -> None:
    """One line: what computes, what is trained, what came from the cache. Others: captions, what is slow, uploads.

    Args:
        run: as it begins.
        material: its pictures and captions.
        reason: why this backend computes.
        learned: what is trained, for people.
        state: where it begins.
        repository: for the upload.
    """
    config, moments = run.config, run.moments
    over = f" over {run.group.collectives}" if run.group.collectives else ""
    resumed = f" · resumed after step {state.step}" if state.step else ""
    print(
        f"icom: {run.backend.describe()} ({reason}) · {learned} · "
        f"latent cache {moments.hits}/{moments.variants} hits · "
        f"total batch {run.samples_per_step} ({config.train_batch_size} x {run.group.size} processes{over} x "
        f"{config.gradient_accumulation_steps} accumulated) · seed {config.seed}{resumed}",
        flush=True,
    )
    if run.method.captions.source:
        said = filled(run.method.captions.of(run.stream[0]), *([word.placeholder_token] for word in config.words))
        print(f"icom: captions: {run.method.captions.source}; the first sample's: {said}", flush=True)
    if run.method.cut:
        print(
            f"icom: the text encoder does not read the ends of captions ({names_of(run.method.cut)}).", file=sys.stderr
        )
    if advice := run.backend.advice():
        print(f"icom: {advice}", file=sys.stderr)
    if repository:
        what = "the embedding, the whole pipeline" if config.save_as_full_pipeline else "the embedding"
        without = "" if config.save_as_full_pipeline else " The whole pipeline: with --save_as_full_pipeline."
        print(f"icom: at the end {what} and the model card go to {repository} on the Hub.{without}", flush=True)
    say_pictures(material.pictures, moments, config)


def validate(run: Run, step: int) -> None:
    """Draw --validation_prompt with the modules that are in memory; all validations of a run use the same noise."""
    config = run.config
    assert config.validation_prompt is not None
    assert config.seed is not None
    seeds = range(config.seed, config.seed + config.num_validation_images)
    images = _draw(run, config.validation_prompt, list(seeds), "validation")
    folder = run.output / VALIDATION
    make_writable_folder(folder)
    save_png(grid(images, columns=min(4, len(images))), folder / f"step-{step}.png")
    tracking.log_pictures(run.accelerator, "validation", images, step)


@dataclass(frozen=True)
class Learned:
    """A run at its end.

    Attributes:
        run: the run.
        initial: what its parameters started from.
        rows: its metrics.
        last: the step that it ended after.
        after_step: this process began there.
        validation: of the run, where it had one.
        samples: that it drew.
    """

    run: Run
    initial: dict[str, torch.Tensor]
    rows: list[dict[str, Any]]
    last: int
    after_step: int
    validation: Validation | None
    samples: Samples | None


def write_results(learned: Learned) -> list[str]:
    """Write what people take from a run: the embedding, pictures, curves, the model card, the page.

    Returns:
        Names of the pictures, which lie in --output_dir.

    Raises:
        IcomError: the disk is full.
    """
    run, rows, validation = learned.run, learned.rows, learned.validation
    config, output = run.config, run.output
    learned_at = _put_learned(run, validation, learned.last)
    run.method.save(output / EMBEDDING)
    run.method.save_one_by_one(output)
    if config.no_safe_serialization:
        buffer = io.BytesIO()
        torch.save(load_file(output / EMBEDDING), buffer)
        write_atomically(output / "learned_embeds.bin", buffer.getvalue())
    loss_curve(rows, output / LOSS_CURVE, validation.curve if validation else ())
    pictures = [LOSS_CURVE]
    if learned.samples:
        learned.samples.draw(learned_at)  # where it ended elsewhere than at the step that is kept
        pictures.insert(0, SHEET)
    if count := _comparison_images(run, rows):
        save_png(_comparison(run, learned.initial, count), output / "comparison.png")
        pictures.insert(0, "comparison.png")
    card = model_card(
        token=config.label,
        base_model=config.pretrained_model_name_or_path,
        learnable_property=config.learnable_property,
        steps=learned_at,
        pictures=pictures,
    )
    write_atomically(output / "README.md", card.encode())
    write_page(output, DONE)
    return pictures


def finish(learned: Learned, repository: str | None, began: float) -> None:
    """Write the results, then say where they are and how to use them.

    Args:
        learned: the run.
        repository: for the upload.
        began: time.monotonic() of the start.

    Raises:
        IcomError: the disk is full, or the Hub cannot be reached.
    """
    pictures = write_results(learned)
    run, last = learned.run, learned.last
    config, output = run.config, run.output
    token = config.label
    if config.save_as_full_pipeline:
        source, noise_scheduler = run.model.source, run.model.noise_scheduler
        run.prior = None
        del run.model  # frees the training copy before the full-precision one is loaded
        _save_full_pipeline(source, output, run.method, noise_scheduler)
    where = None
    if repository:
        files = [*hub.RESULTS, *run.method.own_files.values(), *(hub.PIPELINE if config.save_as_full_pipeline else ())]
        where = hub.upload({output: files}, repository, config.hub_token, "Textual inversion with icom")

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    model = config.pretrained_model_name_or_path
    arguments = ["--embedding", str(output / EMBEDDING), "--prompt", f"a photo of {token}"]
    arguments += ["--pretrained_model_name_or_path", model, "--resolution", str(config.resolution)]
    if config.mixed_precision != "no":
        arguments += ["--mixed_precision", str(config.mixed_precision)]
    done = f"Learned {token}" if last > learned.after_step else f"Step {last} was done already: wrote {token} again"
    print(f"\n{done} in {time.monotonic() - began:.0f} s, peak memory {peak:.1f} GB. In {output}:")
    if several := run.method.own_files:
        print(f"  {', '.join(several.values())}  each {OPENS_IN}; {EMBEDDING}: all of them, for icom")
    else:
        print(f"  {EMBEDDING}  {OPENS_IN}")
        print(f"    {named_by_file(token)}")
    print(f"  {PAGE}  all about this run on one page, for a browser")
    print(f"  {', '.join(pictures)}, metrics.jsonl, config.yaml (runs this again: icom train --config)")
    if config.save_as_full_pipeline:
        print("  the whole pipeline (StableDiffusionPipeline.from_pretrained)")
    if where:
        print(f"  on the Hub: {where}")
    print(f"Draw with it:\n  icom generate {shlex.join(arguments)}")
    if model == "bundled":
        print(
            "The bundled model is a toy. With a real one and your pictures:\n"
            "  icom train --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5 "
            '--train_data_dir FOLDER --placeholder_token "<mine>" --initializer_token toy '
            "--train_batch_size 1 --learning_rate 2e-3 --max_train_steps 1000 --mixed_precision auto"
        )


def _put_learned(run: Run, validation: Validation | None, last: int) -> int:
    """Put the rows that people get into the parameters, and say how they were chosen; the step that they are of."""
    if validation:
        took = f"; {len(validation.curve)} times it took {validation.seconds:.1f} s" if validation.seconds else ""
        print(f"icom: {verdict(validation.curve, stopped=validation.learned)}{took}.", flush=True)
        if run.config.stop:
            take_best(run, validation)
            return chosen(validation.curve)[0]
    run.rows.put_shown()
    return last


def _comparison_images(run: Run, rows: list[dict[str, Any]]) -> int:
    """How many pairs of pictures to draw; says what they cost before that, or why there are none.

    Args:
        run: the run.
        rows: of its metrics.
    """
    config = run.config
    asked = config.num_comparison_images
    if asked == 0:
        return 0
    seconds = [row["seconds"] for row in rows]
    samples = config.train_batch_size * config.gradient_accumulation_steps
    count = 1 if asked is None else asked
    cost = 2 * count * SAMPLES_PER_PICTURE * statistics.median(seconds or [0.0]) / samples
    if asked is None and cost > max(SHARE_FOR_PICTURES * sum(seconds), CHEAP_PICTURES):
        print(
            f"icom: no comparison pictures: they would take about {_duration(cost)} after {_duration(sum(seconds))} of "
            "training; --num_comparison_images 1 draws them.",
            flush=True,
        )
        return 0
    print(
        f"icom: drawing {2 * count} pictures for comparison.png, about {_duration(cost)} "
        "(--num_comparison_images 0: none)",
        flush=True,
    )
    return count


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _comparison(run: Run, initial: dict[str, torch.Tensor], count: int) -> Image.Image:
    """Two rows of pictures from the same noise: with the parameters before training, and after."""
    config = run.config
    assert config.seed is not None
    kind = "painting in the style of" if config.learnable_property == "style" else "photo of"
    seeds = list(range(config.seed, config.seed + count))
    parameters = run.method.parameters
    learned = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    images = []
    for values, when in ((initial, "before"), (learned, "after")):
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(values[name])
        images += _draw(run, f"a {kind} {config.label}", seeds, f"pictures {when}")
    return grid(images, columns=len(seeds))


def _draw(run: Run, prompt: str, seeds: list[int], what: str) -> list[Image.Image]:
    run.method.activate(run.model)
    pipeline = pipelines.pipeline_of(run.model)
    resolution = run.config.resolution
    with run.backend.autocast():
        return [
            draw(pipeline, prompt, seed, resolution=resolution)
            for seed in progress(seeds, what, "picture", leave=False)
        ]


def _save_full_pipeline(
    source: loading.ModelSource, output: Path, method: TextualInversion, noise_scheduler: DDPMScheduler
) -> None:
    """The model as it was, in float32, plus what was learned: loads with StableDiffusionPipeline.from_pretrained."""
    model = loading.load(source, torch.float32)
    pipeline = pipelines.pipeline_of(model, sampler="model")
    pipeline.scheduler = pipelines.with_schedule_of(pipeline.scheduler, noise_scheduler)
    method.add_to(pipeline)
    try:
        pipeline.save_pretrained(output, safe_serialization=True)
    except (OSError, SafetensorError) as error:
        raise IcomError(
            f"Cannot write the whole pipeline to {output}: {error}. The new word itself is saved there ({EMBEDDING})."
        ) from error

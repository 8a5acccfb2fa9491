"""`icom generate`: draw pictures with learned words."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from icom import backends
from icom.config.common import flat
from icom.config.generate import GUIDANCE, STEPS, DrawingOptions, GenerateConfig
from icom.config.loading import read_yaml
from icom.config.words import placeholder_tokens
from icom.engine.memory import keep_freed_memory
from icom.errors import IcomError, UsageError
from icom.files import make_writable_folder
from icom.methods.embedding import known_tokens, suggestion
from icom.methods.embedding_file import Word, find_words
from icom.methods.prompts import as_taught, check_prompts
from icom.models import loading, pipelines
from icom.parallel.place import SINGLE_PROCESS, Place
from icom.progress import progress
from icom.training.report import A1111_SAMPLERS, drawn_with, grid, save_png

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline
    from PIL import Image


@dataclass(frozen=True)
class Studio:
    """A model that is ready to draw what the options say.

    Attributes:
        pipeline: with the learned words and the sampler.
        prompts: as the tokenizer knows the learned words.
        negative_prompt: likewise.
        backend: what computes, and why it was chosen.
        model: its name for other people: no place of this machine.
        weights: SHA-256 of the model's, with the learned words in it; empty where nobody asked for it.
    """

    pipeline: StableDiffusionPipeline
    prompts: list[str]
    negative_prompt: str | None
    backend: backends.Backend
    reason: str
    model: str
    weights: str


def prepare(
    config: DrawingOptions,
    prompts: Sequence[str],
    output: Path,
    *,
    guided: bool,
    place: Place = SINGLE_PROCESS,
    digest: bool = False,
    words: Sequence[Word] | None = None,
) -> Studio:
    """Load the model, teach it the learned words, and look through the prompts.

    Args:
        config: checked.
        prompts: as the user wrote them.
        output: folder for the pictures, made once words and model are found.
        guided: whether any picture is drawn with guidance, so that the negative prompt counts.
        place: of this process among those that draw.
        digest: whether to compute the weights' digest.
        words: learned ones. Default: those of --embedding.

    Raises:
        IcomError: bad embedding file, model, or output folder.
        UsageError: a word or a sampler's steps that cannot be.
    """
    backend, reason = backends.resolve(config.backend, config.mixed_precision, config.engine, place=place)
    if words is None:
        words = [word for name in flat(config.embedding) for word in find_words(name)]
    trained_on = _trained_on(words[0]) if words else {}
    name = config.pretrained_model_name_or_path or trained_on.get(_MODEL) or "bundled"
    if name != trained_on.get(_MODEL):
        trained_on = {}  # the others belong to that model
    source = loading.find(
        name,
        tokenizer_name=config.tokenizer_name or trained_on.get("tokenizer_name"),
        revision=config.revision or trained_on.get("revision"),
        variant=config.variant or trained_on.get("variant"),
    )
    make_writable_folder(output)
    model = loading.load(source, backend.dtype)
    _teach(model, words)
    prompts = [as_taught(prompt, words) for prompt in prompts]
    negative_prompt = as_taught(config.negative_prompt, words) if config.negative_prompt else None
    warnings = check_prompts(model.tokenizer, prompts, negative_prompt if guided else None, words)
    if place.rank == 0:
        for warning in warnings:
            print(f"icom: {warning}", file=sys.stderr)
    weights = loading.weights_digest(*model.parts.values()) if digest else ""
    backend.prepare(model)
    pipeline = pipelines.pipeline_of(model, config.scheduler)
    try:
        pipeline.scheduler.set_timesteps(config.num_inference_steps)
    except (ValueError, IndexError) as error:
        raise UsageError(
            f"--scheduler {config.scheduler} cannot do --num_inference_steps {config.num_inference_steps} ({error}). "
            "Try 25."
        ) from error
    shown = Path(source.name).name if Path(source.name).is_dir() else source.name
    return Studio(pipeline, prompts, negative_prompt, backend, reason, shown, weights)


def generate(config: GenerateConfig) -> None:
    """Write one PNG per prompt and seed, and optionally a grid.

    Raises:
        IcomError: bad embedding file, model, or output folder.
        UsageError: no prompt, unreadable prompts file.
    """
    keep_freed_memory()
    prompts = all_prompts(config)
    output = Path(config.output_dir)
    studio = prepare(config, prompts, output, guided=config.guidance_scale > 1)
    print(f"icom: {studio.backend.describe()} ({studio.reason})", flush=True)
    seeds = [seed + offset for seed in flat(config.seed) or [0] for offset in range(config.num_images_per_prompt)]
    images = []
    jobs = [(number, prompt, seed) for number, prompt in enumerate(studio.prompts) for seed in seeds]
    for number, prompt, seed in progress(jobs, "pictures", "picture"):
        with studio.backend.autocast():
            image = draw(
                studio.pipeline,
                prompt,
                seed,
                steps=config.num_inference_steps,
                guidance=config.guidance_scale,
                negative_prompt=studio.negative_prompt,
                resolution=config.resolution,
            )
        parameters = parameters_of(config, studio, prompt, seed, config.guidance_scale, image.size)
        save_png(image, output / f"{number:03d}-{_slug(prompt)}-seed{seed}.png", parameters)
        images.append(image)
    if config.grid:
        save_png(grid(images, columns=len(seeds)), output / "grid.png")
    print(f"{len(images)} pictures in {output}" + (f", all in {output / 'grid.png'}" if config.grid else ""))


def parameters_of(
    config: DrawingOptions, studio: Studio, prompt: str, seed: int, guidance: float, size: tuple[int, int]
) -> str:
    """What a picture was drawn with, for its PNG."""
    return drawn_with(
        prompt,
        studio.negative_prompt,
        steps=config.num_inference_steps,
        sampler=A1111_SAMPLERS.get(config.scheduler, type(studio.pipeline.scheduler).__name__),
        guidance=guidance,
        seed=seed,
        size=size,
        model=studio.model,
    )


def _teach(model: loading.Model, words: Sequence[Word]) -> None:
    """Put learned words into tokenizer and text encoder."""
    source = model.source
    width = model.text_encoder.config.hidden_size
    for word in words:
        if word.rows.shape[1] != width:
            raise IcomError(
                f"{word.path} holds rows of width {word.rows.shape[1]} and {source.name} has {width}: it was trained "
                "for another kind of model. Name that with --pretrained_model_name_or_path."
            )
        if known := known_tokens(model.tokenizer, placeholder_tokens(word.token, len(word.rows))):
            raise IcomError(
                f"{word.path} holds {known[0]}, which is known already: from another --embedding, or from "
                f"{source.name} (a word of its own, or made with --save_as_full_pipeline?). Leave one of them out, or "
                f"name the word anew: --embedding FILE={suggestion(word.token)}."
            )
        pipelines.pipeline_of(model).load_textual_inversion({word.token: word.rows}, token=word.token)


def draw(
    pipeline: StableDiffusionPipeline,
    prompt: str,
    seed: int,
    *,
    steps: int = STEPS,
    guidance: float = GUIDANCE,
    negative_prompt: str | None = None,
    resolution: int | tuple[int, int] | None = None,
) -> Image.Image:
    """Draw one picture. It depends on these arguments and the pipeline alone: not on a batch, nor on earlier calls.

    Args:
        pipeline: with the learned words in it.
        prompt: text; learned words of several rows are expanded.
        seed: of the initial noise (and the sampler's, where it is stochastic).
        steps: denoising steps.
        guidance: classifier-free guidance scale (Ho & Salimans 2022).
        negative_prompt: what to steer away from.
        resolution: pixels of both sides, or (width, height); None for the model's own.
    """
    width, height = resolution if isinstance(resolution, tuple) else (resolution, resolution)
    with torch.no_grad():
        image: Image.Image = pipeline(
            prompt,
            negative_prompt=negative_prompt,
            num_inference_steps=steps,
            guidance_scale=guidance,
            height=height,
            width=width,
            generator=torch.Generator("cpu").manual_seed(seed),
        ).images[0]
    return image


def draw_together(
    pipeline: StableDiffusionPipeline,
    prompts: Sequence[str],
    seeds: Sequence[int],
    guidance: float = GUIDANCE,
    *,
    steps: int = STEPS,
    negative_prompt: str | None = None,
    resolution: int | None = None,
) -> list[Image.Image]:
    """Draw a picture per prompt and seed in one batch: for small models, where a batch costs little more than one.

    The noise is that of `draw`; the pictures differ from its by rounding only.
    """
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    with torch.no_grad():
        images: list[Image.Image] = pipeline(
            list(prompts),
            negative_prompt=None if negative_prompt is None else [negative_prompt] * len(prompts),
            num_inference_steps=steps,
            guidance_scale=guidance,
            height=resolution,
            width=resolution,
            generator=generators,
        ).images
    return images


def all_prompts(config: DrawingOptions) -> list[str]:
    """Prompts from --prompt and --prompts_file, in that order.

    Raises:
        UsageError: there are none, or the file cannot be read.
    """
    prompts = flat(config.prompt)
    if config.prompts_file:
        try:
            lines = Path(config.prompts_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"Cannot read --prompts_file {config.prompts_file}: {error}") from error
        prompts += [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not prompts:
        raise UsageError('No prompt. Give one with --prompt "a photo of <dicoo>" or --prompts_file FILE.')
    return prompts


_MODEL = "pretrained_model_name_or_path"


def _trained_on(word: Word) -> dict[str, str]:
    """The model options of the run that made a word, where its config.yaml lies beside it, or in a folder there."""
    folder = word.path.parent
    path = folder / "config.yaml"
    if not path.is_file():  # with --concepts_list each word has a folder of its own, and they share the model
        below = (place / "config.yaml" for place in sorted(folder.iterdir()) if (place / word.path.name).is_file())
        path = next((place for place in below if place.is_file()), path)
    if not path.is_file():
        return {}
    try:
        values = read_yaml(str(path))
    except UsageError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        print(f"icom: {reason}. Beside an embedding it names the model; going on without.", file=sys.stderr)
        return {}
    names = (_MODEL, "tokenizer_name", "revision", "variant")
    return {name: values[name] for name in names if isinstance(values.get(name), str)}


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:48] or "prompt"

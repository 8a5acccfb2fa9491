"""`current_pipeline`: the pipeline with the UNet as it is now, whole at every moment."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from icom.errors import IcomError
from icom.files import put_in_place, write_error, write_tensors_in_turn
from icom.methods.text_encoder import split
from icom.models import loading, pipelines
from icom.models.parts import TEXT_ENCODER, UNET, VAE
from icom.training.checkpoint_folders import PIPELINE

if TYPE_CHECKING:
    from diffusers import DDPMScheduler


def write_pipeline(
    output: Path,
    source: loading.ModelSource,
    unet: Any,
    text_encoder: Any | None,
    weights: Iterable[tuple[str, torch.Tensor]],
    scheduler: DDPMScheduler,
) -> Path:
    """Write the pipeline in diffusers' layout; it replaces the one before when all of it is there.

    What does not change is linked to the one before, so that only what is trained costs time and space.

    Args:
        output: --output_dir.
        source: the model that the other parts are of.
        unet: for its configuration.
        text_encoder: the same, where it is trained.
        weights: (name, float32 tensor) of all the UNet's parameters, in their order, then of the text encoder's.
        scheduler: with what the UNet was trained to predict.

    Returns:
        The folder.

    Raises:
        IcomError: the disk is full or the folder not writable; the pipeline before is intact.
    """
    target = output / PIPELINE
    new = target.with_name(f".{PIPELINE}.tmp")
    changed = (UNET.name, TEXT_ENCODER.name) if text_encoder else (UNET.name,)
    try:
        shutil.rmtree(new, ignore_errors=True)
        if target.is_dir():
            shutil.copytree(target, new, copy_function=_link, ignore=shutil.ignore_patterns(*changed))
        else:
            _write_others(new, source, unet, scheduler)
        folder = new / UNET.name
        folder.mkdir()
        unet.save_config(folder)
        like = dict(unet.named_parameters())
        weights = iter(weights)
        of_unet = itertools.islice(weights, len(like))
        write_tensors_in_turn(folder / f"{UNET.weights}.safetensors", like, of_unet, {"format": "pt"})
        if text_encoder:
            _, of_text_encoder = split(dict(weights))
            _save(text_encoder, new / TEXT_ENCODER.name, state_dict=of_text_encoder)
        put_in_place(new, target)
    except OSError as error:
        raise write_error(target, error) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)  # what the target was before
    return target


def _write_others(folder: Path, source: loading.ModelSource, unet: Any, scheduler: DDPMScheduler) -> None:
    tokenizer = loading.load_tokenizer(source)
    parts = loading.load_parts(source, torch.float32, (TEXT_ENCODER, VAE), tokenizer)
    model = loading.Model(source, tokenizer, noise_scheduler=scheduler, unet=unet, **parts)
    pipeline = pipelines.pipeline_of(model, sampler="model")
    pipeline.scheduler = pipelines.with_schedule_of(pipeline.scheduler, scheduler)
    pipeline.save_config(folder)  # model_index.json
    for name in ("vae", "text_encoder", "tokenizer", "scheduler"):
        _save(getattr(pipeline, name), folder / name)


def _save(part: Any, folder: Path, **options: Any) -> None:
    try:
        part.save_pretrained(folder, **options)
    except OSError:
        raise
    except Exception as error:  # safetensors' own, for a full disk
        raise IcomError(f"Cannot write {folder}: {error}. Choose another --output_dir.") from error


def _link(old: str, new: str) -> None:
    """The same file under a second name, where the disk can."""
    try:
        os.link(old, new)
    except OSError:
        shutil.copy2(old, new)

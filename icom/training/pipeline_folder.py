"""`current_pipeline`: the pipeline with the UNet as it is now, whole at every moment."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from icom.errors import IcomError
from icom.files import put_in_place, write_error, write_tensors
from icom.models import loading, pipelines
from icom.models.parts import TEXT_ENCODER, UNET, VAE

if TYPE_CHECKING:
    from diffusers import DDPMScheduler

NAME = "current_pipeline"


def write_pipeline(
    output: Path, source: loading.ModelSource, unet: Any, weights: Mapping[str, torch.Tensor], scheduler: DDPMScheduler
) -> Path:
    """Write the pipeline in diffusers' layout; it replaces the one before when all of it is there.

    What does not change is linked to the one before, so that only the UNet costs time and space.

    Args:
        output: --output_dir.
        source: the model that the other parts are of.
        unet: for its configuration.
        weights: all of its, on the CPU.
        scheduler: with what the UNet was trained to predict.

    Returns:
        The folder.

    Raises:
        IcomError: the disk is full or the folder not writable; the pipeline before is intact.
    """
    target = output / NAME
    new = target.with_name(f".{NAME}.tmp")
    try:
        shutil.rmtree(new, ignore_errors=True)
        if target.is_dir():
            shutil.copytree(target, new, copy_function=_link, ignore=shutil.ignore_patterns(UNET.name))
        else:
            _write_others(new, source, unet, scheduler)
        folder = new / UNET.name
        folder.mkdir()
        unet.save_config(folder)
        write_tensors(folder / f"{UNET.weights}.safetensors", weights, {"format": "pt"})
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
    own = pipeline.scheduler
    changed = ("prediction_type", "rescale_betas_zero_snr", "timestep_spacing")
    if any(name in own.config and own.config[name] != scheduler.config.get(name) for name in changed[:2]):
        values = {name: scheduler.config[name] for name in changed if name in scheduler.config and name in own.config}
        pipeline.scheduler = type(own).from_config(own.config, **values)
    pipeline.save_config(folder)  # model_index.json
    for name in ("vae", "text_encoder", "tokenizer", "scheduler"):
        try:
            getattr(pipeline, name).save_pretrained(folder / name)
        except OSError:
            raise
        except Exception as error:  # safetensors' own, for a full disk
            raise IcomError(f"Cannot write {folder / name}: {error}. Choose another --output_dir.") from error


def _link(old: str, new: str) -> None:
    """The same file under a second name, where the disk can."""
    try:
        os.link(old, new)
    except OSError:
        shutil.copy2(old, new)

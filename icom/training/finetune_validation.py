"""What a training of the UNet shows on its way: the loss on samples held back, and pictures."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

from icom.commands.generate import draw
from icom.data.encode import load_encoders
from icom.data.records import DamagedRecord
from icom.errors import IcomError
from icom.files import make_writable_folder
from icom.models import loading, pipelines
from icom.training import tracking
from icom.training.checkpoint_folders import VALIDATION
from icom.training.report import Metrics, grid, save_png
from icom.training.validation import mean_loss, report

if TYPE_CHECKING:
    from icom.methods.unet import Prepared, Sampler
    from icom.training.finetune_run import FinetuneRun


def show(run: FinetuneRun, metrics: Metrics | None, step: int) -> None:
    """Validation loss and pictures, where they are due. All processes: the UNet may be in parts.

    Args:
        run: after the step.
        metrics: rank 0's, of the validation loss.
        step: done so far.

    Raises:
        IcomError: none of the samples held back can be read, a process is gone, or the disk is full.
    """
    config = run.config
    if step % config.validation_steps or not (run.held_back or config.validation_prompts):
        return
    run.trained.eval()
    with run.shown_weights():
        if run.held_back:
            report(run, metrics, step, _validation_loss(run))
        if config.validation_prompts and (run.group.leads or run.parallel not in ("one", "ddp")):
            images = run.group.attend(partial(_draw, run))
            if run.group.leads:
                folder = run.output / VALIDATION
                make_writable_folder(folder)
                save_png(grid(images, columns=min(4, len(images))), folder / f"step-{step}.png")
                tracking.log_pictures(run.accelerator, "validation", images, step)
    run.trained.train()


def _validation_loss(run: FinetuneRun) -> float:
    """The mean loss over the samples held back."""
    sampler = dataclasses.replace(run.sampler, validation=True)
    encoders = run.encoders
    if encoders is None and run.data.kind == "pictures":  # workers have them, and are ahead
        encoders = load_encoders(run.model, run.backend)

    def loss_of(number: int) -> float:
        prepared = _read(run, sampler, number)
        return run.objective.loss(run.trained, [prepared], encoders, run.empty, run.backend).item()

    return mean_loss(run.group, len(run.held_back), loss_of, run.backend.device)


def _read(run: FinetuneRun, sampler: Sampler, number: int) -> Prepared:
    """A sample that is held back; in place of a damaged one the next that is none, which is the same everywhere."""
    for ahead in range(len(run.held_back)):
        record = run.held_back[(number + ahead) % len(run.held_back)]
        try:
            return sampler(record, run.data.read(record))
        except DamagedRecord as error:
            reason = str(error)
    raise IcomError(
        f"None of the {len(run.held_back)} samples that are held back can be read. The last of them: {reason}. Mend "
        "or remove them, or hold other ones back (--num_validation_samples)."
    )


def _draw(run: FinetuneRun) -> list[Any]:
    assert run.config.seed is not None
    encoders = run.encoders or load_encoders(run.model, run.backend)
    model = loading.Model(
        run.model, encoders.tokenizer, encoders.text_encoder, encoders.vae, run.unet, run.objective.noise_scheduler
    )
    pipeline = pipelines.pipeline_of(model)
    with run.backend.autocast():
        return [
            draw(pipeline, prompt, run.config.seed, resolution=run.config.resolution)
            for prompt in run.config.validation_prompts
        ]

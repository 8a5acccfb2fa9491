"""`icom finetune`: the UNet's training, top to bottom."""

from __future__ import annotations

import itertools
import math
import os
import resource
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from icom.config.finetune import FinetuneConfig
from icom.config.training import settings, to_yaml
from icom.data.encode import encoder_digests
from icom.data.feed import Feed
from icom.data.latent_set import LatentSource
from icom.data.sources import open_source
from icom.engine.memory import keep_freed_memory
from icom.errors import IcomError
from icom.files import write_atomically
from icom.methods.unet import Prepared
from icom.models import loading
from icom.parallel import sharding
from icom.parallel.group import Group, joined
from icom.parallel.place import find_place
from icom.training import tracking
from icom.training.begin import (
    Start,
    begin,
    check_resumed,
    start_accelerate,
)
from icom.training.checkpoint import (
    State,
    save_checkpoint,
    set_aside,
)
from icom.training.finetune_run import FinetuneRun, prepare, settle
from icom.training.finetune_state import gather, read_checkpoint, restore
from icom.training.finetune_validation import show
from icom.training.loop import Advance, Steps, diverged, loop
from icom.training.pipeline_folder import write_pipeline
from icom.training.report import LOSS_CURVE, Metrics, loss_curve

if TYPE_CHECKING:
    pass

AHEAD = 2
"""Batches that are read and prepared while a step computes."""


def finetune(config: FinetuneConfig) -> None:
    """Train the UNet and write the pipeline to --output_dir.

    Raises:
        UsageError: options that do not fit together or with the model.
        IcomError: data, model, checkpoint or disk are no good, the loss diverged, another process is gone, or another
            run writes to --output_dir.
        Stopped: a signal came; a checkpoint was saved.
    """
    keep_freed_memory()
    began = time.monotonic()
    with ExitStack() as until_all_is_written:
        with joined(find_place(os.environ)) as group:
            finish = _finetune(config, group, until_all_is_written)
        if finish:
            finish(began)


def _finetune(config: FinetuneConfig, group: Group, until_end: ExitStack) -> Callable[[float], None] | None:
    """All that the processes do together; returns what is left to rank 0, to be called with the time of the start."""
    data = open_source(config)
    if isinstance(data, LatentSource):
        data = data.at(config.resolution, center_crop=config.center_crop, random_flip=config.random_flip)
    start = begin(config, group, {"The data": {"digest": data.digest}}, until_end)
    saved = read_checkpoint(config, start.output, group)
    model = loading.find(
        config.pretrained_model_name_or_path,
        tokenizer_name=config.tokenizer_name,
        revision=config.revision,
        variant=config.variant,
    )
    if isinstance(data, LatentSource):
        data.made_with.check_encoders(encoder_digests(model), data.folder, model.name)
    accelerator = start_accelerate(config, start.backend, group, start.precision, start.reporters)
    config = settle(config, group, model.name, start, saved, len(data))
    run = prepare(config, start, accelerator, group, model, data, saved[0] if saved else None)
    state = State(0, 0)
    if saved:
        assert config.max_train_steps is not None
        check_resumed(saved[0], saved[1], run.identity, config.max_train_steps)
        state = saved[0]
        restore(run, state)
    if group.leads:
        set_aside(start.output, state.step)
        write_atomically(start.output / "config.yaml", to_yaml(config).encode())
        tracking.start(accelerator, config, "text2image-fine-tune")
        _say_start(run, start, state)
        if state.step == config.max_train_steps:  # nothing is left to do, but the run may have ended before this was
            write_pipeline(
                run.output, run.model, run.unet, state.mean or state.parameters, run.objective.noise_scheduler
            )
    saved, state = None, State(state.step, state.next_sample)  # gigabytes that are in the run now
    metrics = Metrics(start.output / "metrics.jsonl", after_step=state.step) if group.leads else None
    held = Metrics(start.output / "validation.jsonl", after_step=state.step) if group.leads and run.held_back else None
    if held:
        until_end.callback(held.close)
    with _feed(run, state.next_sample) as feed:
        steps = Steps(
            partial(_advance, run, feed),
            partial(_save, run),
            partial(_save, run) if group.leads and run.parallel in ("one", "ddp") else None,
            partial(show, run, held),
            partial(_diverged, run),
        )
        if _was_not_shown(run, held, state.step):
            steps.show(state.step)
        loop(run, steps, state, metrics)
    return partial(_finish, run, metrics) if metrics else None


def _was_not_shown(run: FinetuneRun, held: Metrics | None, step: int) -> bool:
    """Whether the run ended between the checkpoint of this step and what is shown after it; the same on all ranks."""
    if not step or not run.held_back:
        return False
    shown = held is not None and any(row["step"] == step for row in held.rows)
    return run.group.broadcast(b"%d" % shown if run.group.leads else None) == b"0"


def _feed(run: FinetuneRun, next_sample: int) -> Feed[Prepared]:
    config, group = run.config, run.group
    batch = config.train_batch_size
    # In the order of the micro-batches: every process takes its turn.
    batches = (
        range(first, first + batch) for first in itertools.count(next_sample + group.rank * batch, group.size * batch)
    )
    return Feed(
        run.data,
        run.order,
        batches,
        run.sampler,
        workers=max(1, config.dataloader_num_workers),
        ahead=AHEAD,
        max_damaged_share=config.max_damaged_share,
    )


def _advance(run: FinetuneRun, feed: Feed[Prepared], next_sample: int, stop_signal: int) -> Advance:
    """One optimizer step; `next_sample` is where the feed stands."""
    began, waited = time.monotonic(), feed.waited
    parameters = list(run.unet.parameters())
    loss, norm = run.group.attend(partial(_gradients, run, feed, parameters))
    numbers = torch.tensor([loss, *(stop_signal if r == run.group.rank else 0 for r in range(run.group.size))])
    if run.group.size > 1:
        run.group.sum([numbers])
        loss, stop_signal = float(numbers[0]) / run.group.size, int(numbers[1:].max())
    if not math.isfinite(norm):
        loss = math.nan
    if math.isfinite(loss):
        run.optimizer.step()
        run.lr_scheduler.step()
        if run.ema:
            run.ema.update(sharding.local(run.parameters))
    run.optimizer.zero_grad(set_to_none=True)
    seconds = time.monotonic() - began
    rate, waiting = run.samples_per_step / seconds, (feed.waited - waited) / seconds
    figures = {
        "grad_norm": norm,
        "images_per_second": round(rate, 4),
        "waiting": round(waiting, 4),
        "damaged": feed.damage.damaged,
    }
    shown = f", {rate:.2f} images/s" + (f", {waiting:.0%} of it waiting for data" if waiting >= 0.01 else "")
    return Advance(loss, stop_signal, figures, shown)


def _gradients(run: FinetuneRun, feed: Feed[Prepared], parameters: list[torch.nn.Parameter]) -> tuple[float, float]:
    """Loss of this process's samples of a step, and the norm of all processes' gradient, before it was clipped."""
    accumulated = run.config.gradient_accumulation_steps
    loss = 0.0
    for micro in range(accumulated):
        sharding.synchronise(run.network, run.parallel, now=micro == accumulated - 1)
        of_batch = run.objective.loss(run.network, next(feed), run.encoders, run.empty, run.backend)
        (of_batch / accumulated).backward()
        loss += of_batch.item() / accumulated
    norm: Any = torch.nn.utils.clip_grad_norm_(parameters, run.config.max_grad_norm or math.inf)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return loss, float(norm)


def _save(run: FinetuneRun, step: int, next_sample: int) -> None:
    """Checkpoint and pipeline; under FSDP all processes bring their parts."""
    if not run.group.leads and run.parallel in ("one", "ddp"):
        return
    parameters = run.parameters
    state = State(step, next_sample, choices=dict(run.backend.choices), mean_updates=run.ema.updates if run.ema else 0)
    run.group.attend(partial(gather, run, parameters, state))
    if run.group.leads:
        save_checkpoint(run.output, state, run.identity, settings(run.config))
        weights = state.mean or state.parameters
        write_pipeline(run.output, run.model, run.unet, weights, run.objective.noise_scheduler)


def _diverged(run: FinetuneRun, step: int, loss: float) -> IcomError:
    return diverged(run.output, step, loss, run.config.learning_rate / 10)


def _say_start(run: FinetuneRun, start: Start, state: State) -> None:
    config = run.config
    numbers = sum(parameter.numel() for parameter in run.unet.parameters())
    resumed = f" · resumed after step {state.step}" if state.step else ""
    over = f" over {run.group.collectives}" if run.group.collectives else ""
    mean = " and their mean" if run.ema else ""
    print(
        f"icom: {run.backend.describe()} ({start.reason}) · {numbers / 1e6:,.1f} M trainable numbers{mean} · "
        f"{run.data.describe()} · total batch {run.samples_per_step} ({config.train_batch_size} x "
        f"{run.group.size} processes{over} x {config.gradient_accumulation_steps} accumulated) · seed "
        f"{config.seed}{resumed}",
        *(f"icom: {note}" for note in start.notes),
        sep="\n",
        flush=True,
    )


def _finish(run: FinetuneRun, metrics: Metrics, began: float) -> None:
    """Say where everything is and how to use it."""
    loss_curve(metrics.rows, run.output / LOSS_CURVE)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\nTrained in {time.monotonic() - began:.0f} s, peak memory {peak:.1f} GB. In {run.output}:")
    print("  current_pipeline (StableDiffusionPipeline.from_pretrained)")
    print("  loss.png, metrics.jsonl, config.yaml (runs this again: icom finetune --config)")
    print(
        "Draw with it:\n  icom generate --pretrained_model_name_or_path "
        f'{run.output / "current_pipeline"} --resolution {run.config.resolution} --prompt "…"'
    )

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
from pathlib import Path

import torch

from icom.config.finetune import FinetuneConfig
from icom.config.training import to_yaml
from icom.data.encode import encoder_digests
from icom.data.feed import Batches, Feed
from icom.data.latent_set import LatentSource
from icom.data.ray_workers import need_ray_extra
from icom.data.sources import open_source
from icom.engine.memory import keep_freed_memory
from icom.errors import IcomError, UsageError
from icom.files import write_atomically
from icom.methods.unet import Prepared
from icom.models import hub, loading
from icom.parallel import sharding
from icom.parallel.group import Group, joined
from icom.parallel.place import find_place
from icom.report.facts import note_facts
from icom.report.page import PAGE, write_page
from icom.training import tracking
from icom.training.begin import Start, begin, check_resumed, read_checkpoint, start_accelerate
from icom.training.checkpoint import Saved, State
from icom.training.checkpoint_folders import PIPELINE, VALIDATION, set_aside
from icom.training.clipping import clip
from icom.training.finetune_online import OnlineFeed
from icom.training.finetune_run import FinetuneRun, prepare, settle
from icom.training.finetune_state import restore, save, save_pipeline
from icom.training.finetune_validation import show
from icom.training.loop import Advance, Steps, at_once, diverged, loop
from icom.training.outcome import DONE
from icom.training.report import LOSS_CURVE, Metrics, finetuned_card, loss_curve
from icom.training.validation import FILE as VALIDATION_LOSSES

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
    repository = None
    if config.push_to_hub and group.leads:  # before any time is spent
        name = config.hub_model_id or Path(config.output_dir).resolve().name
        repository = hub.create_repository(name, config.hub_token)
    run, start, saved = set_up(config, group, until_end)
    config = run.config
    state = State(0, 0)
    if saved:
        assert config.max_train_steps is not None
        check_resumed(saved.state, saved.identity, run.identity, config.max_train_steps)
        state = saved.state
        restore(run, saved)
    if group.leads:
        set_aside(start.output, state.step)
        write_atomically(start.output / "config.yaml", to_yaml(config).encode())
        tracking.start(run.accelerator, config, config.tracker_project_name)
        _say_start(run, start, state)
        note_facts(run, run.backend)
        if repository:
            print(f"icom: at the end the pipeline and a model card go to {repository} on the Hub.", flush=True)
    if state.step == config.max_train_steps:  # nothing is left to do, but the run may have ended before this was
        save_pipeline(run)
    saved, state = None, State(state.step, state.next_sample)  # gigabytes that are in the run now
    metrics = Metrics(start.output / "metrics.jsonl", after_step=state.step) if group.leads else None
    held = Metrics(start.output / VALIDATION_LOSSES, after_step=state.step) if group.leads and run.held_back else None
    if held:
        until_end.callback(held.close)
    with batches_of(run, state.next_sample) as feed:
        steps = Steps(
            at_once(partial(advance, run, feed)),
            partial(save, run),
            partial(save, run) if group.leads and run.parallel in ("one", "ddp") else None,
            lambda step, _: show(run, held, step),
            partial(_diverged, run),
        )
        if _was_not_shown(run, held, state.step):
            show(run, held, state.step)
        loop(run, steps, state, metrics)
    losses = [(row["step"], row["loss"]) for row in held.rows] if held else []
    return partial(_finish, run, metrics, losses, state.step, repository) if metrics else None


def set_up(config: FinetuneConfig, group: Group, until_end: ExitStack) -> tuple[FinetuneRun, Start, Saved | None]:
    """Open data and model, agree with the other processes, and make the run.

    Args:
        config: checked.
        group: the processes, not yet connected.
        until_end: rank 0 holds the lock of --output_dir by it.

    Returns:
        (the run, with the weights it begins with; what was decided before; the checkpoint that it goes on from, of
        which nothing but the choices has been put in place).

    Raises:
        UsageError, IcomError: as `finetune`.
    """
    data = open_source(config)
    if isinstance(data, LatentSource):
        if config.train_text_encoder:
            raise UsageError(
                f"--train_text_encoder: {data.folder} holds states of the frozen text encoder. Give the pictures with "
                "their captions, or drop it."
            )
        if config.encoder_workers:
            raise UsageError(
                f"{config.train_data_dir} holds latents: there is nothing to encode. Drop --encoder_workers."
            )
        data = data.at(config.resolution, center_crop=config.center_crop, random_flip=config.random_flip)
    elif config.encoder_workers:
        need_ray_extra()
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
    return prepare(config, start, accelerator, group, model, data, saved.state if saved else None), start, saved


def _was_not_shown(run: FinetuneRun, held: Metrics | None, step: int) -> bool:
    """Whether the run ended between the checkpoint of this step and what is shown after it; the same on all ranks."""
    if not step or not run.held_back:
        return False
    shown = held is not None and any(row["step"] == step for row in held.rows)
    return run.group.broadcast(b"%d" % shown if run.group.leads else None) == b"0"


def batches_of(run: FinetuneRun, next_sample: int) -> Batches[Prepared]:
    """This process's micro-batches from a sample of the run on; leaving its `with` ends what prepares them."""
    config, group = run.config, run.group
    if run.job:
        return OnlineFeed(run, next_sample)
    batch = config.micro_batch
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


def advance(run: FinetuneRun, feed: Batches[Prepared], next_sample: int, stop_signal: int) -> Advance:
    """One optimizer step; `next_sample` is where the feed stands."""
    began, waited = time.monotonic(), feed.waited
    loss = run.group.attend(partial(_gradients, run, feed))
    if run.group.size > 1:
        signals = [stop_signal if rank == run.group.rank else 0 for rank in range(run.group.size)]
        numbers = torch.tensor([loss, *signals], device=run.backend.device)
        run.group.sum([numbers])
        loss, stop_signal = float(numbers[0]) / run.group.size, int(numbers[1:].max())
    sharding.hand_over(run.parameters, run.parts)
    sharded = run.parallel not in ("one", "ddp")
    norm = clip(list(run.parts.values()), run.config.max_grad_norm, run.group if sharded else None)
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


def _gradients(run: FinetuneRun, feed: Batches[Prepared]) -> float:
    """Sum the gradient of a step over the processes; gives the loss of this one's samples."""
    accumulated = run.accumulated
    loss = 0.0
    for micro in range(accumulated):
        sharding.synchronise(run.network, run.parallel, now=micro == accumulated - 1)
        of_batch = run.objective.loss(run.network, next(feed), run.encoders, run.empty, run.backend)
        (of_batch / accumulated).backward()
        loss += of_batch.item() / accumulated
    return loss


def _diverged(run: FinetuneRun, step: int, loss: float) -> IcomError:
    return diverged(run.output, step, loss, run.config.learning_rate / 10)


def _say_start(run: FinetuneRun, start: Start, state: State) -> None:
    config = run.config
    numbers = sum(parameter.numel() for parameter in run.parameters.values())
    resumed = f" · resumed after step {state.step}" if state.step else ""
    over = f" over {run.group.collectives}" if run.group.collectives else ""
    mean = " and their mean" if run.ema else ""
    where = config.ray_address or "here"
    online = f" · encoded by {config.encoder_workers} workers of Ray per process ({where})" if run.job else ""
    print(
        f"icom: {run.backend.describe()} ({start.reason}) · {numbers / 1e6:,.1f} M trainable numbers{mean} · "
        f"{run.data.describe()}{online} · total batch {run.samples_per_step} ({config.micro_batch} x "
        f"{run.group.size} processes{over} x {run.accumulated} accumulated) · seed {config.seed}{resumed}",
        flush=True,
    )
    if run.group.size > 1:
        print(f"icom: {run.parallel}: {run.why_so} · {run.checkpoint_format} checkpoints: {run.why_format}", flush=True)
    if run.why_batch:
        share = config.samples_per_process(run.group.size)
        print(f"icom: micro-batch {config.micro_batch} of {share}: {run.why_batch}", flush=True)


def _finish(
    run: FinetuneRun,
    metrics: Metrics,
    validation: list[tuple[int, float]],
    after_step: int,
    repository: str | None,
    began: float,
) -> None:
    """Upload, and say where everything is and how to use it.

    Args:
        run: at its end.
        metrics: its own.
        validation: (step, loss) on what is held back.
        after_step: this process began there.
        repository: for the upload.
        began: time.monotonic() of the start.
    """
    config, output = run.config, run.output
    last = config.max_train_steps or 0
    loss_curve(metrics.rows, output / LOSS_CURVE, validation)
    write_page(output, DONE)
    where = _upload(run, repository) if repository else None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    steps = last - after_step
    done = f"Trained {steps} steps" if steps else f"Step {last} was done already: wrote all again"
    print(f"\n{done} in {time.monotonic() - began:.0f} s, peak memory {peak:.1f} GB. In {output}:")
    print(f"  {PIPELINE} (StableDiffusionPipeline.from_pretrained)")
    print(f"  {PAGE}, loss.png, metrics.jsonl, config.yaml (runs this again: icom finetune --config)")
    if where:
        print(f"  on the Hub: {where}")
    print(
        "Draw with it:\n  icom generate --pretrained_model_name_or_path "
        f'{output / PIPELINE} --resolution {config.resolution} --prompt "…"'
    )


def _upload(run: FinetuneRun, repository: str) -> str:
    """The pipeline to the top of a repository, and what describes it; returns the address."""
    config, output = run.config, run.output
    drawn = sorted((output / VALIDATION).glob("step-*.png"), key=lambda path: int(path.stem.partition("-")[2]))
    pictures = [str(path.relative_to(output)) for path in drawn[-1:]] + [LOSS_CURVE]
    card = finetuned_card(
        base_model=config.pretrained_model_name_or_path,
        resolution=config.resolution,
        steps=config.max_train_steps or 0,
        batch=run.samples_per_step,
        mean=config.use_ema,
        pictures=pictures,
    )
    write_atomically(output / "README.md", card.encode())
    folders = {output / PIPELINE: hub.PIPELINE, output: ("README.md", "config.yaml", *pictures)}
    return hub.upload(folders, repository, config.hub_token, "Fine-tuned with icom")

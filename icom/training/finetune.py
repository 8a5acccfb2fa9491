"""`icom finetune`: the UNet's training, top to bottom."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import resource
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from icom.commands.generate import draw
from icom.config.finetune import FinetuneConfig
from icom.config.training import settings, to_yaml
from icom.data.encode import Encoders, encoder_digests, load_encoders
from icom.data.feed import Feed
from icom.data.latent_set import LatentSource
from icom.data.order import Order
from icom.data.records import Source
from icom.data.sources import open_source
from icom.engine.memory import keep_freed_memory
from icom.errors import IcomError, UsageError
from icom.files import make_writable_folder, write_atomically
from icom.methods.unet import Objective, Prepared, Sampler, objective_of
from icom.models import loading, pipelines
from icom.parallel import sharding
from icom.parallel.group import Group, joined
from icom.parallel.place import find_place
from icom.training import tracking
from icom.training.begin import (
    Start,
    begin,
    check_resumed,
    enable_xformers,
    make_optimizer,
    make_schedule,
    start_accelerate,
)
from icom.training.checkpoint import (
    VALIDATION,
    Identity,
    State,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    set_aside,
    to_document,
)
from icom.training.ema import Decay, Ema, limit_of_half_life
from icom.training.first_weights import first_unet, weights_in
from icom.training.loop import Advance, Steps, diverged, loop
from icom.training.pipeline_folder import write_pipeline
from icom.training.report import LOSS_CURVE, Metrics, grid, loss_curve, save_png

if TYPE_CHECKING:
    from accelerate import Accelerator

    from icom.backends import Backend

AHEAD = 2
"""Batches that are read and prepared while a step computes."""


@dataclass
class FinetuneRun:
    """Everything a step needs; built once, then parameters, optimizer, schedule and mean change.

    Attributes:
        config: with every open choice settled.
        model: where it comes from.
        unet: what is trained, float32.
        network: `unet`, or what wraps it in several processes.
        parallel: how they share it.
        encoders: where the data are pictures.
        data: what is trained on.
        held_back: records of the validation loss.
        ema: the mean of the weights, where one is kept.
    """

    config: FinetuneConfig
    backend: Backend
    group: Group
    accelerator: Accelerator
    model: loading.ModelSource
    unet: Any
    network: torch.nn.Module
    parallel: sharding.Parallel
    encoders: Encoders | None
    objective: Objective
    data: Source
    held_back: Sequence[int]
    order: Order
    sampler: Sampler
    optimizer: torch.optim.AdamW
    lr_scheduler: torch.optim.lr_scheduler.LambdaLR
    ema: Ema | None
    identity: Identity

    @property
    def output(self) -> Path:
        """--output_dir."""
        return Path(self.config.output_dir)

    @property
    def samples_per_step(self) -> int:
        """Total batch: samples of all processes in one optimizer step."""
        config = self.config
        return config.train_batch_size * config.gradient_accumulation_steps * self.group.size

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Name -> what is trained; this process's part of it under FSDP."""
        return dict(self.unet.named_parameters())

    @cached_property
    def empty(self) -> torch.Tensor | None:
        """The empty caption's states, where the data are latents."""
        return self.data.empty if isinstance(self.data, LatentSource) else None

    def shown_weights(self) -> Any:
        """Context in which the UNet has the weights that people want: the mean, where there is one."""
        if self.ema is None:
            return nullcontext()
        return self.ema.in_place_of(sharding.local(self.parameters))


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
    saved = _read_checkpoint(config, start.output, group)
    model = loading.find(
        config.pretrained_model_name_or_path,
        tokenizer_name=config.tokenizer_name,
        revision=config.revision,
        variant=config.variant,
    )
    if isinstance(data, LatentSource):
        data.made_with.check_encoders(encoder_digests(model), data.folder, model.name)
    accelerator = start_accelerate(config, start.backend, group, start.precision, start.reporters)
    config = _settle(config, group, model.name, start, saved, len(data))
    run = _prepare(config, start, accelerator, group, model, data, saved[0] if saved else None)
    state = State(0, 0)
    if saved:
        assert config.max_train_steps is not None
        check_resumed(saved[0], saved[1], run.identity, config.max_train_steps)
        state = saved[0]
        _restore(run, state)
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
    with _feed(run, state.next_sample) as feed:
        steps = Steps(
            partial(_advance, run, feed),
            partial(_save, run),
            partial(_save, run) if group.leads and run.parallel in ("one", "ddp") else None,
            partial(_show, run),
            partial(_diverged, run),
        )
        loop(run, steps, state, metrics)
    return partial(_finish, run, metrics) if metrics else None


def _read_checkpoint(config: FinetuneConfig, output: Path, group: Group) -> tuple[State, Identity] | None:
    """Rank 0's checkpoint; the others get what is small of it, and the tensors one by one in `_restore`."""
    if config.resume_from_checkpoint is None:
        return None
    state, document = None, {}
    if group.leads:
        folder = find_checkpoint(output, config.resume_from_checkpoint)
        if folder is None:
            print(f"icom: no checkpoint in {output} yet: starting anew.", file=sys.stderr)
        else:
            state, identity = load_checkpoint(folder)
            document = to_document(state, identity)
    document = json.loads(group.broadcast(json.dumps(document).encode()))
    if not document:
        return None
    small = State(document["step"], document["next_sample"], choices=document["choices"])
    state = state or dataclasses.replace(small, mean_updates=document.get("mean_updates", 0))
    return state, Identity(**document["identity"])


def _settle(
    config: FinetuneConfig,
    group: Group,
    model_name: str,
    start: Start,
    saved: tuple[State, Identity] | None,
    records: int,
) -> FinetuneConfig:
    """Replace every open choice (seed, precision, steps …) by its value: what config.yaml then says."""
    seed = config.seed
    if seed is None:
        seed = saved[1].seed if saved else int(group.broadcast(b"%d" % secrets.randbits(31)))
    if config.num_validation_samples >= records:
        raise UsageError(
            f"--num_validation_samples {config.num_validation_samples} would leave nothing of {records} samples to "
            "train on. Hold fewer back."
        )
    per_step = config.train_batch_size * config.gradient_accumulation_steps * group.size
    epoch = math.ceil((records - config.num_validation_samples) / per_step)
    steps = config.max_train_steps or config.steps_of_examples(group.size)
    every = config.validation_steps
    if config.validation_epochs is not None:
        every = config.validation_epochs * epoch
    limit = 1 if config.save_only_most_recent else config.checkpoints_total_limit
    return dataclasses.replace(
        config,
        pretrained_model_name_or_path=model_name,
        seed=seed,
        max_train_steps=steps or config.num_train_epochs * epoch,
        num_examples_to_see=None,
        mixed_precision=start.precision,
        validation_steps=every,
        validation_epochs=None,
        checkpoints_total_limit=limit,
    )


def _prepare(
    config: FinetuneConfig,
    start: Start,
    accelerator: Accelerator,
    group: Group,
    model: loading.ModelSource,
    data: Source,
    saved: State | None,
) -> FinetuneRun:
    assert config.seed is not None
    backend = start.backend
    objective = objective_of(config, model, loading.load_scheduler(model))
    encoders, digests = None, {}
    if data.kind == "pictures":
        encoders = load_encoders(model, backend)
        digests = {"VAE": loading.weights_digest(encoders.vae), "text": loading.weights_digest(encoders.text_encoder)}
    unet = first_unet(config, model)
    group.agree("The model", digests | {"UNet": loading.weights_digest(unet)})
    unet.requires_grad_(True)
    unet.train()
    if config.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    if config.enable_xformers_memory_efficient_attention:
        enable_xformers(unet)
    unet.to(backend.device)
    backend.prepare_training(unet)
    backend.choices.update(saved.choices if saved else {})
    _agree_on_choices(config, backend, group, unet)
    numbers = sum(parameter.numel() for parameter in unet.parameters())
    parallel, why = sharding.choose(
        config.parallel, group, numbers, backend.device, ema=config.use_ema and not config.offload_ema
    )
    if group.size > 1:
        start.notes.append(f"{parallel}: {why}")
    network = sharding.wrap(unet, parallel, backend.dtype, backend.device)
    optimizer = make_optimizer(config, unet.parameters(), group, fused=True)
    held_back = range(len(data) - config.num_validation_samples, len(data))
    timesteps = int(objective.noise_scheduler.config["num_train_timesteps"])
    sampler = Sampler(
        config.seed,
        timesteps,
        config.resolution,
        config.center_crop,
        config.random_flip,
        config.image_interpolation_mode,
        config.caption_dropout_rate,
    )
    decides = (
        *("resolution", "center_crop", "random_flip", "image_interpolation_mode", "caption_dropout_rate"),
        *("prediction_type", "rescale_betas_zero_snr", "snr_gamma", "noise_offset", "num_validation_samples"),
        *("use_ema", "ema_decay", "ema_half_life", "ema_warmup", "max_grad_norm", "from_scratch"),
    )
    identity = Identity(
        config.seed,
        " ".join(digests.values()),
        {"of the source": data.digest},
        {name: getattr(config, name) for name in decides},
    )
    return FinetuneRun(
        config,
        backend,
        group,
        accelerator,
        model,
        unet,
        network,
        parallel,
        encoders,
        objective,
        data,
        held_back,
        Order(list(_without(data.runs, len(held_back))), config.seed),
        sampler,
        optimizer,
        make_schedule(config, optimizer, saved.step if saved else 0),
        _make_ema(config, unet, backend.device),
        identity,
    )


def _without(runs: Sequence[range], last: int) -> Iterator[range]:
    """Runs of records without the last ones."""
    end = sum(map(len, runs)) - last
    for run in runs:
        if run.start < end:
            yield range(run.start, min(run.stop, end))


def _agree_on_choices(config: FinetuneConfig, backend: Backend, group: Group, unet: Any) -> None:
    """Let all processes compute alike: the first one chooses in a forward pass that is thrown away."""
    if group.leads:
        side, batch = config.resolution // 8, config.train_batch_size
        noisy = torch.zeros(batch, unet.config.in_channels, side, side, device=backend.device)
        states = torch.zeros(batch, 77, unet.config.cross_attention_dim, device=backend.device, dtype=backend.dtype)
        with backend.autocast():
            unet(noisy, torch.zeros(batch, dtype=torch.int64, device=backend.device), states)
    backend.choices.update(json.loads(group.broadcast(json.dumps(backend.choices).encode() if group.leads else None)))


def _make_ema(config: FinetuneConfig, unet: Any, device: torch.device) -> Ema | None:
    if not config.use_ema:
        return None
    limit = limit_of_half_life(config.ema_half_life) if config.ema_half_life else config.ema_decay
    kept = torch.device("cpu") if config.offload_ema else device
    parameters = dict(unet.named_parameters())
    weights = {name: tensor.to(kept, copy=True) for name, tensor in sharding.local(parameters).items()}
    if config.ema_from:
        for name, value in weights_in(Path(config.ema_from), unet, mean=True).items():
            sharding.put(weights[name], value, parameters[name])
    return Ema(Decay(limit, config.ema_warmup), weights)


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
    gather = partial(run.group.attend, partial(_gather, run, parameters, state))
    gather()
    if run.group.leads:
        save_checkpoint(run.output, state, run.identity, settings(run.config))
        weights = state.mean or state.parameters
        write_pipeline(run.output, run.model, run.unet, weights, run.objective.noise_scheduler)


def _gather(run: FinetuneRun, parameters: dict[str, torch.nn.Parameter], state: State) -> None:
    for name, parameter in parameters.items():
        whole = {"parameter": sharding.whole(parameter, parameter)}
        whole |= {what: sharding.whole(tensor, parameter) for what, tensor in run.optimizer.state[parameter].items()}
        if run.ema:
            whole["mean"] = sharding.whole(run.ema.weights[name], parameter)
        if not run.group.leads:
            continue
        state.parameters[name] = whole.pop("parameter")
        if run.ema:
            state.mean[name] = whole.pop("mean")
        state.optimizer[name] = whole


def _restore(run: FinetuneRun, state: State) -> None:
    """Put a checkpoint's numbers where `_gather` took them from: tensor by tensor, so that nobody needs them twice."""
    group = run.group
    for name, parameter in run.parameters.items():
        mine = None
        if group.leads:
            mine = {"parameter": state.parameters[name], **state.optimizer[name]}
            mine |= {"mean": state.mean[name]} if run.ema else {}
        values = group.broadcast_tensors(mine)
        sharding.put(parameter, values.pop("parameter"), parameter)
        if run.ema:
            sharding.put(run.ema.weights[name], values.pop("mean"), parameter)
        kept = run.optimizer.state[parameter]
        for what, value in values.items():
            kept[what] = torch.zeros_like(parameter) if value.dim() else torch.zeros_like(value)
            sharding.put(kept[what], value, parameter)
    if run.ema:
        run.ema.updates = state.mean_updates


def _show(run: FinetuneRun, step: int) -> None:
    """Validation loss and pictures, where they are due. All processes: the UNet may be in parts."""
    config = run.config
    if step % config.validation_steps or not (run.held_back or config.validation_prompts):
        return
    run.unet.eval()
    with run.shown_weights():
        if run.held_back:
            loss = run.group.attend(partial(_validation_loss, run))
            numbers = torch.tensor([loss])
            run.group.sum([numbers])
            run.accelerator.log({"validation_loss": float(numbers[0])}, step=step)
            if run.group.leads:
                with (run.output / "validation.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": step, "loss": float(numbers[0])}) + "\n")
        if config.validation_prompts and (run.group.leads or run.parallel not in ("one", "ddp")):
            images = run.group.attend(partial(_draw, run))
            if run.group.leads:
                folder = run.output / VALIDATION
                make_writable_folder(folder)
                save_png(grid(images, columns=min(4, len(images))), folder / f"step-{step}.png")
                tracking.log_pictures(run.accelerator, "validation", images, step)
    run.unet.train()


@torch.no_grad()
def _validation_loss(run: FinetuneRun) -> float:
    """This process's share of the mean loss over the samples held back."""
    size, rank = run.group.size, run.group.rank
    sampler = dataclasses.replace(run.sampler, validation=True)
    total = 0.0
    for first in range(0, len(run.held_back), size):
        number = first + rank
        record = run.held_back[min(number, len(run.held_back) - 1)]  # all have to compute: the UNet may be in parts
        prepared = sampler(record, run.data.read(record))
        loss = run.objective.loss(run.unet, [prepared], run.encoders, run.empty, run.backend)
        total += loss.item() if number < len(run.held_back) else 0.0
    return total / len(run.held_back)


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

"""`icom train`: the training run, top to bottom."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import resource
import secrets
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from safetensors import SafetensorError
from tqdm import tqdm

from icom import backends, hub, models, tracking
from icom.captions import TEMPLATES
from icom.checkpoint import (
    Identity,
    State,
    delete_old_checkpoints,
    differences,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    set_aside_checkpoints,
)
from icom.config import Precision, TrainConfig, to_yaml
from icom.embedding import (
    PlaceholderEmbedding,
    add_placeholder,
    captions_to_ids,
    check_words,
    placeholder_tokens,
    save_embedding,
)
from icom.engine.memory import keep_freed_memory
from icom.errors import IcomError, Stopped, UsageError
from icom.files import make_writable_folder, write_atomically
from icom.generate import draw
from icom.images import Picture, Transform, list_pictures
from icom.latents import Moments, cache_folder, load_moments
from icom.objective import diffusion_loss
from icom.report import Metrics, grid, loss_curve, model_card, running_mean, save_png
from icom.sampling import SampleStream, gaussian_noise
from icom.signals import StopRequest

if TYPE_CHECKING:
    from accelerate import Accelerator
    from PIL import Image

    from icom.backends import Backend
    from icom.models import Model

EMBEDDING = "learned_embeds.safetensors"


@dataclass
class Run:
    """Everything a step needs; built once, then only rows, optimizer and scheduler change."""

    config: TrainConfig
    backend: Backend
    accelerator: Accelerator
    model: Model
    concept: PlaceholderEmbedding
    captions: torch.Tensor  # int64 (templates, context length)
    moments: Moments
    stream: SampleStream
    optimizer: torch.optim.AdamW
    lr_scheduler: torch.optim.lr_scheduler.LambdaLR
    identity: Identity

    @property
    def output(self) -> Path:
        """--output_dir."""
        return Path(self.config.output_dir)

    @property
    def leads(self) -> bool:
        """Whether this process writes files and talks."""
        return bool(self.accelerator.is_main_process)

    @property
    def samples_per_step(self) -> int:
        """Total batch: samples of all processes in one optimizer step."""
        config = self.config
        batch = config.train_batch_size * config.gradient_accumulation_steps
        return batch * int(self.accelerator.num_processes)


def train(config: TrainConfig) -> None:
    """Learn the rows and write everything to --output_dir.

    Raises:
        UsageError: options that do not fit together or with the model.
        IcomError: pictures, model, checkpoint or disk are no good, or the loss diverged.
        Stopped: a signal came; a checkpoint was saved.
    """
    keep_freed_memory()
    began = time.monotonic()
    precision = _precision(config)
    backend, reason = backends.resolve(config.backend, precision, config.engine)
    # What is quick to check comes first: nothing is loaded for a run that cannot work.
    pictures = list_pictures(config.train_data_dir)
    reporters = tracking.choose(config.report_to)
    output = Path(config.output_dir)
    make_writable_folder(output)
    resumed = _read_checkpoint(config, output)
    source = models.find(
        config.pretrained_model_name_or_path,
        tokenizer_name=config.tokenizer_name,
        revision=config.revision,
        variant=config.variant,
    )
    check_words(models.load_tokenizer(source), config.placeholder_token, config.initializer_token, config.num_vectors)
    accelerator = _start_accelerate(config, backend, precision, reporters)
    config = _settle(config, accelerator, source.name, precision, resumed, len(pictures))
    repository = None
    if config.push_to_hub and accelerator.is_main_process:
        repository = hub.create_repository(config.hub_model_id or output.resolve().name, config.hub_token)

    run = prepare(config, backend, accelerator, models.load(source, backend.dtype), pictures)
    initial_rows = run.concept.rows.detach().clone()
    state = State(0, 0, initial_rows, torch.zeros_like(initial_rows), torch.zeros_like(initial_rows))
    if resumed:
        changed = differences(resumed[1], run.identity)
        if changed:
            raise IcomError(
                f"This is not the run of the checkpoint; different: {'; '.join(changed)}. "
                "Restore that, or start a new run without --resume_from_checkpoint."
            )
        state = resumed[0]
        _restore(run, state)
    elif run.leads:
        set_aside_checkpoints(output)
    if run.leads:
        write_atomically(output / "config.yaml", to_yaml(config).encode())
        tracking.start(accelerator, config)
        _say_start(run, reason, state)
    metrics = Metrics(output / "metrics.jsonl", after_step=state.step) if run.leads else None

    try:
        with StopRequest() as stop:
            _loop(run, state, metrics, stop)
    finally:
        if metrics:
            metrics.close()
        accelerator.end_training()
    if run.leads:
        _finish(run, initial_rows, metrics.rows if metrics else [], repository, began)


def _precision(config: TrainConfig) -> Precision:
    """--mixed_precision, else what `accelerate launch` was configured with."""
    if config.mixed_precision:
        return config.mixed_precision
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in get_args(Precision):
        raise UsageError(f"Accelerate is configured for {launched}; set --mixed_precision to bf16, fp16 or no.")
    return cast(Precision, launched)


def _read_checkpoint(config: TrainConfig, output: Path) -> tuple[State, Identity] | None:
    if config.resume_from_checkpoint is None:
        return None
    folder = find_checkpoint(output, config.resume_from_checkpoint)
    if folder is None:
        print(f"icom: no checkpoint in {output} yet: starting anew.", file=sys.stderr)
        return None
    return load_checkpoint(folder)


def _start_accelerate(config: TrainConfig, backend: Backend, precision: Precision, reporters: list[str]) -> Accelerator:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(
        project_dir=config.output_dir, logging_dir=str(Path(config.output_dir) / config.logging_dir)
    )
    return Accelerator(
        cpu=backend.device.type == "cpu",
        mixed_precision=precision,
        log_with=reporters or None,
        project_config=project,
    )


def _settle(
    config: TrainConfig,
    accelerator: Accelerator,
    model_name: str,
    precision: Precision,
    resumed: tuple[State, Identity] | None,
    pictures: int,
) -> TrainConfig:
    """Replace every open choice (seed, precision, steps …) by its value: what config.yaml then says."""
    from accelerate.utils import broadcast_object_list

    seed = config.seed
    if seed is None:
        seed = resumed[1].seed if resumed else broadcast_object_list([secrets.randbits(31)])[0]
    epoch = pictures * config.repeats
    batches = math.ceil(epoch / (config.train_batch_size * accelerator.num_processes))
    steps = config.max_train_steps
    if steps is None:
        steps = config.num_train_epochs * math.ceil(batches / config.gradient_accumulation_steps)
    validation_steps = config.validation_steps
    if config.validation_epochs is not None:
        # Samples per epoch, not steps: diffusers' script counts so.
        validation_steps = config.validation_epochs * epoch
        print(
            f"icom: --validation_epochs is deprecated; taking --validation_steps {validation_steps}.",
            file=sys.stderr,
        )
    return dataclasses.replace(
        config,
        pretrained_model_name_or_path=model_name,
        seed=seed,
        max_train_steps=steps,
        mixed_precision=precision,
        validation_steps=validation_steps,
        validation_epochs=None,
    )


def prepare(
    config: TrainConfig, backend: Backend, accelerator: Accelerator, model: Model, pictures: list[Picture]
) -> Run:
    """Splice the rows in, freeze and convert the rest, fill the latent cache, make optimizer and sample stream.

    Args:
        config: with `seed` and `max_train_steps` settled.
        backend: where it will run.
        accelerator: knows the other processes.
        model: freshly loaded; is changed.
        pictures: checked.

    Raises:
        UsageError: placeholder, initializer or xFormers do not fit the model or the machine.
    """
    from diffusers.optimization import get_scheduler

    assert config.seed is not None
    assert config.max_train_steps is not None
    digests = {"vae": models.weights_digest(model.vae)}
    model_digest = models.weights_digest(model.text_encoder, model.unet) + digests["vae"]
    concept = add_placeholder(
        model.tokenizer,
        model.text_encoder,
        config.placeholder_token,
        config.initializer_token,
        config.num_vectors,
    )
    templates = TEMPLATES[config.learnable_property]
    captions = captions_to_ids(
        model.tokenizer,
        templates,
        placeholder_tokens(config.placeholder_token, config.num_vectors),
        model.text_encoder.config.max_position_embeddings,
    )
    if config.allow_tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
    if config.enable_xformers_memory_efficient_attention:
        _enable_xformers(model)
    if config.gradient_checkpointing:
        model.unet.train()  # diffusers checkpoints in training mode only; there is no dropout
        model.unet.enable_gradient_checkpointing()
    backend.prepare(model)
    moments = load_moments(
        pictures,
        Transform(config.resolution, config.center_crop),
        model.vae,
        digests["vae"],
        cache_folder(config.cache_dir),
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        wait_for_everyone=accelerator.wait_for_everyone,
        decode_threads=config.dataloader_num_workers,
    )
    learning_rate = config.learning_rate
    if config.scale_lr:
        learning_rate *= config.train_batch_size * config.gradient_accumulation_steps * accelerator.num_processes
    optimizer = torch.optim.AdamW(
        [concept.rows],
        lr=learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.adam_weight_decay,
        eps=config.adam_epsilon,
    )
    lr_scheduler = get_scheduler(
        config.lr_scheduler,
        optimizer,
        num_warmup_steps=config.lr_warmup_steps,
        num_training_steps=config.max_train_steps,
        num_cycles=config.lr_num_cycles,
    )
    stream = SampleStream(
        config.seed,
        len(pictures),
        config.repeats,
        len(templates),
        model.noise_scheduler.config["num_train_timesteps"],
    )
    options = (
        "placeholder_token",
        "num_vectors",
        "learnable_property",
        "resolution",
        "center_crop",
        "repeats",
    )
    identity = Identity(
        config.seed,
        model_digest,
        {picture.path.name: picture.digest for picture in pictures},
        {name: getattr(config, name) for name in options},
    )
    return Run(
        config,
        backend,
        accelerator,
        model,
        concept,
        captions,
        moments,
        stream,
        optimizer,
        lr_scheduler,
        identity,
    )


def _enable_xformers(model: Model) -> None:
    try:
        model.unet.enable_xformers_memory_efficient_attention()
    except Exception as error:
        # ModuleNotFoundError without xFormers, ValueError without a GPU.
        raise UsageError(
            f"xFormers cannot be used here ({error}). Drop --enable_xformers_memory_efficient_attention."
        ) from error


def _loop(run: Run, state: State, metrics: Metrics | None, stop: StopRequest) -> None:
    """Optimizer steps until --max_train_steps, a signal, or a loss that is no number."""
    config = run.config
    assert config.max_train_steps is not None
    step, next_sample = state.step, state.next_sample
    saved_at = None  # the step of a checkpoint that no finite loss has followed yet
    losses = [row["loss"] for row in metrics.rows] if metrics else []
    bar = tqdm(
        total=config.max_train_steps,
        initial=step,
        desc="training",
        unit="step",
        dynamic_ncols=True,
        disable=not run.leads,
        bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
    )
    with bar:
        while step < config.max_train_steps:
            began = time.monotonic()
            learning_rate = run.lr_scheduler.get_last_lr()[0]
            loss, stop_signal = optimizer_step(run, next_sample, stop.signal_number or 0)
            if not math.isfinite(loss):
                raise _diverged(run, step, loss)
            if saved_at is not None and run.leads and config.checkpoints_total_limit:
                # Not when it was saved: its rows might have been the ones that go astray, and the older good.
                delete_old_checkpoints(run.output, config.checkpoints_total_limit, saved_at)
            saved_at = None
            step += 1
            next_sample += run.samples_per_step
            seconds = time.monotonic() - began
            accelerator_log = {"loss": loss, "lr": learning_rate}
            run.accelerator.log(accelerator_log, step=step)
            if metrics:
                metrics.add(step=step, **accelerator_log, seconds=round(seconds, 4))
            losses.append(loss)
            mean = running_mean(losses[-100:])[-1]
            bar.set_postfix_str(f"loss {mean:.4f}, lr {learning_rate:.2e}, {seconds:.2f} s/step", refresh=False)
            bar.update()
            done = step == config.max_train_steps
            if run.leads:
                if (step % config.checkpointing_steps == 0 or stop_signal) and not done:
                    _save(run, step, next_sample)
                    saved_at = step
                if step % config.save_steps == 0:
                    save_embedding(
                        run.output / f"learned_embeds-steps-{step}.safetensors",
                        config.placeholder_token,
                        run.concept.rows,
                    )
                if config.validation_prompt and step % config.validation_steps == 0:
                    _validate(run, step)
            if stop_signal and not done:
                bar.close()
                raise Stopped(
                    f"stopped after step {step}; saved {run.output / f'checkpoint-{step}'}. Continue with the same "
                    "command and --resume_from_checkpoint latest.",
                    stop_signal,
                )
        if run.leads and state.step < step:
            _save(run, step, next_sample)
            if config.checkpoints_total_limit:
                delete_old_checkpoints(run.output, config.checkpoints_total_limit, step)


def optimizer_step(run: Run, next_sample: int, stop_signal: int = 0) -> tuple[float, int]:
    """One optimizer step.

    Args:
        run: rows, optimizer and scheduler advance.
        next_sample: index of the step's first sample.
        stop_signal: number of the signal that this process got, or 0.

    Returns:
        (mean loss over all processes, highest signal that any process got). With a loss or gradient that is not
        finite the optimizer did not step; the loss is then not finite either, nor when the rows have become so.
    """
    config, world = run.config, run.accelerator.num_processes
    rows = run.concept.rows
    total = 0.0
    for micro in range(config.gradient_accumulation_steps):
        offset = (micro * world + run.accelerator.process_index) * config.train_batch_size
        loss = _loss(run, range(next_sample + offset, next_sample + offset + config.train_batch_size))
        (loss / config.gradient_accumulation_steps).backward()
        total += loss.item() / config.gradient_accumulation_steps
    assert rows.grad is not None
    if world > 1:
        # Everything that processes have to agree on goes in one message of a few KB.
        signals = torch.zeros(world)
        signals[run.accelerator.process_index] = stop_signal
        message = torch.cat([rows.grad.flatten().cpu(), torch.tensor([total]), signals]).to(rows.device)
        message = run.accelerator.reduce(message, "sum").cpu()
        rows.grad.copy_((message[: rows.numel()] / world).view_as(rows))
        total = float(message[rows.numel()]) / world
        stop_signal = int(message[rows.numel() + 1 :].max())
    if not bool(torch.isfinite(rows.grad).all()):
        total = math.nan
    if math.isfinite(total):
        run.optimizer.step()
        run.lr_scheduler.step()
        if not bool(torch.isfinite(rows).all()):
            total = math.nan
    run.optimizer.zero_grad(set_to_none=True)
    return total, stop_signal


def _loss(run: Run, indices: range) -> torch.Tensor:
    """The loss of a batch of the stream's samples."""
    backend, model = run.backend, run.model
    samples = [run.stream[index] for index in indices]
    latents, noises = [], []
    for sample in samples:
        vae_noise, noise = gaussian_noise(sample, tuple(run.moments.mean.shape[2:]))
        latents.append(run.moments.sample(sample.picture, flip=sample.flip, noise=vae_noise))
        noises.append(noise)
    vae_config: dict[str, Any] = dict(model.vae.config)
    scaled = (torch.stack(latents) - (vae_config.get("shift_factor") or 0.0)) * vae_config["scaling_factor"]
    ids = run.captions[[sample.template for sample in samples]].to(backend.device)
    with backend.autocast():
        text = model.text_encoder(ids)[0]
    return diffusion_loss(
        model.unet,
        model.noise_scheduler,
        scaled.to(backend.device, backend.dtype),
        torch.stack(noises).to(backend.device, backend.dtype),
        torch.tensor([sample.timestep for sample in samples], device=backend.device),
        text.to(backend.dtype),
    )


def _save(run: Run, step: int, next_sample: int) -> None:
    moments = run.optimizer.state[run.concept.rows]
    state = State(
        step,
        next_sample,
        run.concept.rows.detach().cpu(),
        moments["exp_avg"].cpu(),
        moments["exp_avg_sq"].cpu(),
    )
    save_checkpoint(run.output, state, run.identity)


def _restore(run: Run, state: State) -> None:
    """Put a checkpoint's numbers back where `_save` took them from."""
    rows = run.concept.rows
    with torch.no_grad():
        rows.copy_(state.rows)
    run.optimizer.state[rows] = {
        "step": torch.tensor(float(state.step)),
        "exp_avg": state.exp_avg.to(rows.device),
        "exp_avg_sq": state.exp_avg_sq.to(rows.device),
    }
    # The rate is a function of the step alone (LambdaLR.get_lr), so that nothing of the scheduler has to be kept.
    schedule = run.lr_scheduler
    rates = [base * f(state.step) for base, f in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule.last_epoch, schedule._last_lr = state.step, rates


def _diverged(run: Run, step: int, loss: float) -> IcomError:
    """What to do about a loss that is not finite, after `step` good steps."""
    happened = f"The loss became {loss} at step {step + 1}; stopped before anything of it was saved."
    parts = {"text_encoder": run.model.text_encoder, "vae": run.model.vae, "unet": run.model.unet}
    broken = [
        name
        for name, part in parts.items()
        if not all(
            bool(torch.isfinite(weights).all()) for weights in part.parameters() if weights is not run.concept.rows
        )
    ]
    if broken:
        return IcomError(
            f"{happened} The weights of {' and '.join(broken)} in {run.model.source.name} hold numbers that are not "
            "finite: the model is damaged. Fetch it again."
        )
    # The rows of checkpoint-<step> led here; those of an earlier one are known to have given a finite loss.
    good = [path for path in list_checkpoints(run.output) if int(path.name.removeprefix("checkpoint-")) < step]
    lower = f"--learning_rate {min(run.config.learning_rate / 10, 1e-3):g}"
    start = (
        f"The last good checkpoint is {good[-1]}: continue from it with --resume_from_checkpoint {good[-1].name} and"
        if good
        else "There is no good checkpoint yet: start anew with"
    )
    return IcomError(
        f"{happened} {start} a lower learning rate ({lower}). If that does not help, start anew with "
        "--mixed_precision no or --adam_epsilon 1e-6."
    )


def _validate(run: Run, step: int) -> None:
    """Draw --validation_prompt with the modules that are in memory; all validations of a run use the same noise."""
    config = run.config
    assert config.validation_prompt is not None
    assert config.seed is not None
    seeds = range(config.seed, config.seed + config.num_validation_images)
    images = _draw(run, config.validation_prompt, list(seeds), "validation")
    folder = run.output / "validation"
    make_writable_folder(folder)
    save_png(grid(images, columns=min(4, len(images))), folder / f"step-{step}.png")
    tracking.log_pictures(run.accelerator, "validation", images, step)


def _draw(run: Run, prompt: str, seeds: list[int], what: str) -> list[Image.Image]:
    pipeline = models.pipeline_of(run.model)
    resolution = run.config.resolution
    with run.backend.autocast():
        return [
            draw(pipeline, prompt, seed, resolution=resolution)
            for seed in tqdm(seeds, what, unit="picture", leave=False)
        ]


def _say_start(run: Run, reason: str, state: State) -> None:
    config, moments = run.config, run.moments
    rows = run.concept.rows
    variants = moments.mean.shape[0] * moments.mean.shape[1]
    resumed = f" · resumed after step {state.step}" if state.step else ""
    print(
        f"icom: {run.backend.describe()} ({reason}) · {rows.numel()} trainable numbers ({rows.shape[0]} x "
        f"{rows.shape[1]}) · latent cache {moments.hits}/{variants} hits · total batch {run.samples_per_step} "
        f"({config.train_batch_size} x {run.accelerator.num_processes} processes x "
        f"{config.gradient_accumulation_steps} accumulated) · seed {config.seed}{resumed}",
        flush=True,
    )


def _finish(
    run: Run, initial_rows: torch.Tensor, rows: list[dict[str, Any]], repository: str | None, began: float
) -> None:
    """Write the results, then say where they are and how to use them."""
    config, output = run.config, run.output
    token, learned = config.placeholder_token, run.concept.rows
    save_embedding(output / EMBEDDING, token, learned)
    if config.no_safe_serialization:
        buffer = io.BytesIO()
        torch.save({token: learned.detach().cpu()}, buffer)
        write_atomically(output / "learned_embeds.bin", buffer.getvalue())
    loss_curve(rows, output / "loss.png")
    pictures = ["loss.png"]
    if config.num_comparison_images:
        save_png(_comparison(run, initial_rows), output / "comparison.png")
        pictures.insert(0, "comparison.png")
    card = model_card(
        token=token,
        base_model=config.pretrained_model_name_or_path,
        learnable_property=config.learnable_property,
        steps=config.max_train_steps or 0,
        pictures=pictures,
    )
    write_atomically(output / "README.md", card.encode())
    trained = learned.detach().clone()
    source = run.model.source
    if config.save_as_full_pipeline:
        del run.model, run.concept  # frees the training copy before the full-precision one is loaded
        _save_full_pipeline(source, output, token, trained)
    where = None
    if repository:
        where = hub.upload(output, repository, config.hub_token, pipeline=config.save_as_full_pipeline)

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    model = config.pretrained_model_name_or_path
    arguments = ["--embedding", str(output / EMBEDDING), "--prompt", f"a photo of {token}"]
    arguments += ["--pretrained_model_name_or_path", model, "--resolution", str(config.resolution)]
    print(f"\nLearned {token} in {time.monotonic() - began:.0f} s, peak memory {peak:.1f} GB. In {output}:")
    print(f"  {EMBEDDING}  opens in diffusers, A1111 and ComfyUI")
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
            "--train_batch_size 1 --learning_rate 2e-3 --max_train_steps 1000 --mixed_precision bf16"
        )


def _comparison(run: Run, initial_rows: torch.Tensor) -> Image.Image:
    """Two rows of pictures from the same noise: with the rows before training, and after."""
    config = run.config
    assert config.seed is not None
    kind = "painting in the style of" if config.learnable_property == "style" else "photo of"
    seeds = list(range(config.seed, config.seed + config.num_comparison_images))
    learned = run.concept.rows.detach().clone()
    images = []
    for rows, when in ((initial_rows, "before"), (learned, "after")):
        with torch.no_grad():
            run.concept.rows.copy_(rows)
        images += _draw(run, f"a {kind} {config.placeholder_token}", seeds, f"pictures {when}")
    return grid(images, columns=len(seeds))


def _save_full_pipeline(source: models.ModelSource, output: Path, token: str, rows: torch.Tensor) -> None:
    """The model as it was, in float32, plus the new word: loads with StableDiffusionPipeline.from_pretrained."""
    model = models.load(source, torch.float32)
    pipeline = models.pipeline_of(model, sampler="model")
    pipeline.load_textual_inversion({token: rows.cpu()}, token=token)
    try:
        pipeline.save_pretrained(output, safe_serialization=True)
    except (OSError, SafetensorError) as error:
        raise IcomError(
            f"Cannot write the whole pipeline to {output}: {error}. The new word itself is saved there ({EMBEDDING})."
        ) from error

"""`icom train`: the training run, top to bottom."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from icom.config.train import TrainConfig
from icom.config.training import settings, to_yaml
from icom.config.watching import SamplePrompt
from icom.data.bucket_order import BucketOrder
from icom.engine.memory import keep_freed_memory
from icom.errors import IcomError, UsageError
from icom.files import make_writable_folder, write_atomically
from icom.methods import textual_inversion
from icom.methods.embedding_file import load_initial_rows
from icom.models import hub, loading
from icom.models.parts import VAE
from icom.parallel.group import Group, joined
from icom.parallel.place import find_place
from icom.report.facts import names_to_show, note_facts
from icom.signals import StopRequest
from icom.training import tracking
from icom.training.begin import begin, check_resumed, read_checkpoint, start_accelerate
from icom.training.checkpoint import Saved, State, from_parts, save_checkpoint, to_document, to_tensors
from icom.training.checkpoint_folders import list_checkpoints, set_aside
from icom.training.loop import Steps, diverged, happened, loop
from icom.training.material import Material, open_material
from icom.training.optimizers import put_state, state_of
from icom.training.pictures import check_vae, transform_of
from icom.training.report import Metrics
from icom.training.results import Learned, finish, say_start, validate
from icom.training.run import Run, prepare, settle
from icom.training.samples import Samples, open_prompts, start_samples
from icom.training.step import batch_loss, loss_of, optimizer_step
from icom.training.train_validation import Validation, start_validation, validate_loss


def train(config: TrainConfig) -> None:
    """Learn the rows and write everything to --output_dir.

    Raises:
        UsageError: options that do not fit together or with the model, or of a list of words.
        IcomError: pictures, model, checkpoint or disk are no good, the loss diverged, another process is gone, or
            another run writes to --output_dir.
        Stopped: a signal came; a checkpoint was saved.
    """
    if config.concepts_list:
        raise UsageError(
            "--concepts_list is not of one run: icom.config.concepts.load_trainings reads it, and "
            "icom.training.concepts.train_concepts learns its words."
        )
    keep_freed_memory()
    began = time.monotonic()
    with ExitStack() as until_all_is_written:
        with joined(find_place(os.environ)) as group:
            finish_run = _train(config, group, until_all_is_written)
        if finish_run:  # the other processes need not wait for pictures
            finish_run(began)


def _train(config: TrainConfig, group: Group, until_all_is_written: ExitStack) -> Callable[[float], None] | None:
    """All that the processes do together.

    Args:
        config: checked.
        group: the processes.
        until_all_is_written: rank 0 holds the lock of --output_dir by it.

    Returns:
        What is left to rank 0: to write the results, given the time of the start.
    """
    # What is quick to check comes first: nothing is loaded for a run that cannot work.
    material = open_material(config, group)
    start = begin(config, group, {"The pictures": material.digests}, until_all_is_written)
    backend, output = start.backend, start.output
    resumed = read_whole_checkpoint(config, output, group)
    initial_rows = read_initial_embedding(config, group)
    source = open_model(config)
    prompts = check_fits(config, material, source, group)
    accelerator = start_accelerate(config, backend, group, start.precision, start.reporters)
    config = settle(config, group, source.name, start.precision, resumed, material.trained)
    repository = None
    if config.push_to_hub and group.leads:
        repository = hub.create_repository(config.hub_model_id or output.resolve().name, config.hub_token)

    model = loading.load(source, backend.dtype)
    after_step = resumed.state.step if resumed else 0
    run = prepare(config, backend, accelerator, model, material, group, initial_rows, after_step)
    learned = learn(run, resumed, material, start.reason, until_all_is_written, prompts, repository)
    return partial(finish, learned, repository) if learned else None


def learn(
    run: Run,
    resumed: Saved | None,
    material: Material,
    reason: str,
    until_end: ExitStack,
    prompts: Sequence[SamplePrompt],
    repository: str | None = None,
    doing: str = "training",
) -> Learned | None:
    """Train a run from where its checkpoint left it to its end.

    Args:
        run: as it begins.
        resumed: the checkpoint that it goes on from.
        material: what it learns from.
        reason: why this backend computes.
        until_end: closes its files.
        prompts: that rank 0 draws on the way.
        repository: for the upload.
        doing: what goes on, for people.

    Returns:
        What came of it, for rank 0.

    Raises:
        Diverged: the loss became no number. The other processes then wait for rank 0, which may have them go on.
        IcomError: the checkpoint is another run's, another process is gone, or a disk is full.
        Stopped: a signal came; a checkpoint was saved.
    """
    config = run.config
    initial = {name: parameter.detach().clone() for name, parameter in run.method.parameters.items()}
    state = take_place(run, resumed)
    if run.leads:
        tracking.start(run.accelerator, config)
        say_start(run, material, reason, run.method.describe(), state, repository)
        note_facts(run, run.backend, captions_cut=run.method.cut, **names_to_show(material.pictures, material.trained))
    validation = start_validation(run, state) if config.share_for_validation else None
    samples = start_samples(run, prompts)
    agree_on_choices(run, validation)
    if samples and (state.step == 0 or samples_due(run, validation, state.step)):
        with run.rows.shown():  # what a run that goes on from here may have left to it
            samples.draw(state.step)
    metrics = Metrics(run.output / "metrics.jsonl", after_step=state.step) if run.leads else None

    if validation and validation.file:
        until_end.callback(validation.file.close)
    last = loop(run, steps_of(run, validation, samples), state, metrics, doing)
    return Learned(run, initial, metrics.rows, last, state.step, validation, samples) if metrics else None


def open_model(config: TrainConfig) -> loading.ModelSource:
    """The model that the options name."""
    return loading.find(
        config.pretrained_model_name_or_path,
        tokenizer_name=config.tokenizer_name,
        revision=config.revision,
        variant=config.variant,
    )


def read_whole_checkpoint(config: TrainConfig, output: Path, group: Group) -> Saved | None:
    """Rank 0's checkpoint, whole, for all processes."""
    saved = read_checkpoint(config, output, group)
    if saved is None:
        return None
    tensors = group.broadcast_tensors(to_tensors(saved.state) if group.leads else None)
    return from_parts(tensors, to_document(saved))


def read_latest(config: TrainConfig, group: Group) -> Saved | None:
    """The checkpoint that one of several runs goes on from; None, and no word of it, where there is none yet."""
    output = Path(config.output_dir)
    if config.resume_from_checkpoint is None:
        return None
    there = group.broadcast(b"%d" % bool(list_checkpoints(output)) if group.leads else None)
    return read_whole_checkpoint(config, output, group) if there == b"1" else None


def read_initial_embedding(config: TrainConfig, group: Group) -> dict[str, torch.Tensor]:
    """Rank 0's rows of --initial_embedding by word, for all processes: the others' machines need no such file."""
    named = {word.placeholder_token: word for word in config.words if word.initial_embedding is not None}
    if not named:
        return {}
    rows = None
    if group.leads:
        rows = {
            token: load_initial_rows(Path(str(word.initial_embedding)).expanduser(), word.num_vectors)
            for token, word in named.items()
        }
    return group.broadcast_tensors(rows)


def check_fits(
    config: TrainConfig, material: Material, source: loading.ModelSource, group: Group
) -> list[SamplePrompt]:
    """Refuse what does not fit the model, before its weights are read.

    Returns:
        Rank 0's --sample_prompts, with the word in them.

    Raises:
        UsageError: the word is not new, its initializer unknown, a caption or prompt would be read otherwise because
            of it, or buckets have sizes that the VAE does not divide.
    """
    tokenizer = loading.load_tokenizer(source)
    textual_inversion.check(tokenizer, config, material.captions)
    if config.enable_bucket:
        check_vae(transform_of(config), len(loading.configuration(source, VAE)["block_out_channels"]))
    return open_prompts(config, tokenizer) if config.sample_prompts and group.leads else []


def take_place(run: Run, resumed: Saved | None) -> State:
    """Put the run's numbers where its checkpoint has them, and its folder in order: what another run left goes aside.

    Returns:
        Where the run begins.

    Raises:
        IcomError: the checkpoint is another run's, or of a step past the end, or the folder cannot be written.
    """
    state = State(0, 0)
    if resumed is not None:
        state = resumed.state
        assert run.config.max_train_steps is not None
        check_resumed(state, resumed.identity, run.identity, run.config.max_train_steps)
        _restore(run, state)
    if run.leads:
        make_writable_folder(run.output)
        set_aside(run.output, state.step)
        write_atomically(run.output / "config.yaml", to_yaml(run.config).encode())
    return state


def agree_on_choices(run: Run, validation: Validation | None) -> None:
    """Let all processes compute alike: the first one chooses in a forward pass that is thrown away.

    With buckets, a validation or samples, every process meets the shapes of training in the same order, forward and
    backward, wherever the run begins: what the engine packs depends on the shape that comes first.
    """
    several = run.stream.buckets or validation or run.config.sample_prompts
    if run.leads and several:
        _meet_shapes(run, validation)
    if run.group.size > 1:
        if run.leads and not several:
            batch_loss(run, range(run.config.train_batch_size))
        run.backend.choices.update(json.loads(run.group.broadcast(json.dumps(run.backend.choices).encode())))
    if several and not run.leads:
        _meet_shapes(run, validation)


def _meet_shapes(run: Run, validation: Validation | None) -> None:
    """Compute a batch of each shape: those of the training first."""
    if run.stream.buckets:
        _meet_buckets(run, run.stream.buckets)
    else:
        batch_loss(run, range(run.config.train_batch_size)).backward()
        run.optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for samples in validation.batches if validation else ():
            loss_of(run, samples)


def _meet_buckets(run: Run, buckets: BucketOrder) -> None:
    for number in buckets.first_batches():
        batch_loss(run, range(number * buckets.batch, (number + 1) * buckets.batch)).backward()
    if run.prior and run.prior.stream.buckets:
        _meet_buckets(run.prior, run.prior.stream.buckets)
    run.optimizer.zero_grad(set_to_none=True)


def steps_of(run: Run, validation: Validation | None, samples: Samples | None = None) -> Steps:
    """What a run does at the places of the loop."""
    save, waits = partial(_save, run, validation), run.backend.asynchronous
    # Where a process that is gone shows only when the device is waited for, the rows may never be there to be saved.
    rescue = save if run.leads and not waits else None
    show = partial(_show, run, validation, samples)
    steps = Steps(partial(optimizer_step, run), save, rescue, show, partial(_diverged, run))
    if waits:
        steps = replace(steps, due=partial(_due, run.config, validation))
    return replace(steps, ended=partial(validate_loss, run, validation)) if validation else steps


def _due(config: TrainConfig, validation: Validation | None, step: int) -> bool:
    """Whether anything is made of the rows after a step, by `_show` or a validation: the same in all processes."""
    every = [config.save_steps, validation.every if validation else 0]
    every += [config.validation_steps if config.validation_prompt else 0]
    every += [(config.sample_every_n_steps or 0) if config.sample_prompts else 0]
    return any(step % steps == 0 for steps in every if steps)


def samples_due(run: Run, validation: Validation | None, step: int) -> bool:
    """Whether samples are drawn after a step."""
    assert run.config.sample_every_n_steps
    ended = step == run.config.max_train_steps or (validation is not None and validation.learned)
    return ended or step % run.config.sample_every_n_steps == 0


def _show(run: Run, validation: Validation | None, samples: Samples | None, step: int, stop: StopRequest) -> None:
    """Embedding and pictures of a step, where they are due."""
    config = run.config
    if not run.leads:
        return
    with run.rows.shown():
        if step % config.save_steps == 0:
            path = run.output / f"learned_embeds-steps-{step}.safetensors"
            run.method.save(path)
        if config.validation_prompt and step % config.validation_steps == 0:
            validate(run, step)
        if samples and samples_due(run, validation, step):
            samples.draw(step, lambda: stop.signal_number is not None)


def _save(run: Run, validation: Validation | None, step: int, next_sample: int) -> None:
    if not run.leads:
        return
    ema = run.rows.ema
    state = State(
        step,
        next_sample,
        {name: parameter.detach().cpu() for name, parameter in run.method.parameters.items()},
        state_of(run.optimizer, run.method.parameters),
        dict(run.backend.choices),
        {name: tensor.cpu() for name, tensor in ema.weights.items()} if ema else {},
        ema.updates if ema else 0,
        validation.curve if validation else [],
        validation.best if validation else {},
    )
    save_checkpoint(run.output, state, run.identity, settings(run.config))


def _restore(run: Run, state: State) -> None:
    """Put a checkpoint's numbers back where `_save` took them from."""
    run.backend.choices.update(state.choices)
    with torch.no_grad():
        for name, parameter in run.method.parameters.items():
            parameter.copy_(state.parameters[name])
            if run.rows.ema:
                run.rows.ema.weights[name].copy_(state.mean[name])
    if run.rows.ema:
        run.rows.ema.updates = state.mean_updates
    put_state(run.optimizer, run.method.parameters, state.optimizer)


class Diverged(IcomError):
    """A run's loss became no number."""


def _diverged(run: Run, step: int, loss: float) -> IcomError:
    """What to do about a loss that is not finite, after `step` good steps; rank 0 tells it."""
    if not run.leads:
        return Diverged(happened(step, loss))
    broken = loading.broken_parts(run.model.source, run.backend.dtype)
    if broken:
        return IcomError(
            f"{happened(step, loss)} The weights of {' and '.join(broken)} in {run.model.source.name} hold numbers "
            "that are not finite: the model is damaged. Fetch it again."
        )
    lower = run.config.learning_rate / 10
    lower = lower if run.config.optimizer == "prodigy" else min(lower, 1e-3)
    return Diverged(str(diverged(run.output, step, loss, lower)))

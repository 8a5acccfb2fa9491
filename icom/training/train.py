"""`icom train`: the training run, top to bottom."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from icom import backends
from icom.config.train import TrainConfig
from icom.config.training import settings, to_yaml
from icom.data.images import list_pictures, passed_over
from icom.engine.memory import keep_freed_memory
from icom.errors import IcomError, Stopped
from icom.files import make_writable_folder, write_atomically
from icom.methods import textual_inversion
from icom.methods.embedding_file import load_initial_rows
from icom.models import hub, loading
from icom.parallel.group import Group, Lost, joined
from icom.parallel.place import choose_collectives, find_place
from icom.progress import progress
from icom.signals import StopRequest
from icom.training import tracking
from icom.training.checkpoint import (
    Identity,
    State,
    changes,
    delete_old_checkpoints,
    find_checkpoint,
    from_parts,
    list_checkpoints,
    load_checkpoint,
    mend_checkpoints,
    save_checkpoint,
    set_aside,
    to_document,
    to_tensors,
    versions,
)
from icom.training.lock import only_run_in
from icom.training.report import Metrics, running_mean
from icom.training.results import finish, say_start, validate
from icom.training.run import Run, precision_of, prepare, settle, start_accelerate
from icom.training.step import batch_loss, optimizer_step

PLACES = {
    *("train_data_dir", "pretrained_model_name_or_path", "tokenizer_name", "initial_embedding"),
    *("output_dir", "logging_dir", "cache_dir"),
}
"""Options that may differ between the machines of a run; what lies there is compared instead."""


def train(config: TrainConfig) -> None:
    """Learn the rows and write everything to --output_dir.

    Raises:
        UsageError: options that do not fit together or with the model.
        IcomError: pictures, model, checkpoint or disk are no good, the loss diverged, another process is gone, or
            another run writes to --output_dir.
        Stopped: a signal came; a checkpoint was saved.
    """
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
    precision, why = precision_of(config, group)
    backend, reason = backends.resolve(
        config.backend,
        precision,
        config.engine,
        allow_tf32=config.allow_tf32,
        compiled=config.compile,
        cache_dir=config.cache_dir,
        place=group.place,
    )
    reason = f"{reason}; {why}" if why else reason
    # What is quick to check comes first: nothing is loaded for a run that cannot work.
    pictures = list_pictures(config.train_data_dir)
    if group.leads and (notice := passed_over(config.train_data_dir)):
        print(f"icom: {notice}", file=sys.stderr)
    group.agree("The versions", versions())
    group.agree("The options", {name: value for name, value in settings(config).items() if name not in PLACES})
    group.agree("The pictures", {picture.path.name: picture.digest for picture in pictures})
    collectives, _ = choose_collectives(config.collectives, backend.process_group)
    group.agree("The collectives", {"collectives": collectives})
    group.connect(collectives)
    reporters = tracking.choose(config.report_to)
    output = Path(config.output_dir)
    if group.leads:
        make_writable_folder(output)
        until_all_is_written.enter_context(only_run_in(output))
        mend_checkpoints(output)
    resumed = _read_checkpoint(config, output, group)
    initial_rows = _read_initial_embedding(config, group)
    source = loading.find(
        config.pretrained_model_name_or_path,
        tokenizer_name=config.tokenizer_name,
        revision=config.revision,
        variant=config.variant,
    )
    textual_inversion.check(loading.load_tokenizer(source), config)
    accelerator = start_accelerate(config, backend, group, precision, reporters)
    config = settle(config, group, source.name, precision, resumed, len(pictures))
    repository = None
    if config.push_to_hub and group.leads:
        repository = hub.create_repository(config.hub_model_id or output.resolve().name, config.hub_token)

    model = loading.load(source, backend.dtype)
    after_step = resumed[0].step if resumed else 0
    run = prepare(config, backend, accelerator, model, pictures, group, initial_rows, after_step)
    group.agree("The model", {"weights": run.identity.model})
    initial = {name: parameter.detach().clone() for name, parameter in run.method.parameters.items()}
    state = _first_state(run, resumed)
    if run.leads:
        set_aside(output, state.step)
        write_atomically(output / "config.yaml", to_yaml(config).encode())
        tracking.start(accelerator, config)
        say_start(run, reason, state, repository)
    _agree_on_choices(run)
    metrics = Metrics(output / "metrics.jsonl", after_step=state.step) if run.leads else None

    try:
        with StopRequest() as stop:
            _loop(run, state, metrics, stop)
    finally:
        if metrics:
            metrics.close()
        for tracker in accelerator.trackers:  # not end_training, which would wait for a lost process
            tracker.finish()
    steps = (config.max_train_steps or 0) - state.step
    return partial(finish, run, initial, metrics.rows, repository, steps) if metrics else None


def _read_checkpoint(config: TrainConfig, output: Path, group: Group) -> tuple[State, Identity] | None:
    """Rank 0's checkpoint, for all processes: the others' machines have none."""
    if config.resume_from_checkpoint is None:
        return None
    tensors, document = None, {}
    if group.leads:
        folder = find_checkpoint(output, config.resume_from_checkpoint)
        if folder is None:
            print(f"icom: no checkpoint in {output} yet: starting anew.", file=sys.stderr)
        else:
            state, identity = load_checkpoint(folder)
            tensors, document = to_tensors(state), to_document(state, identity)
    document = json.loads(group.broadcast(json.dumps(document).encode()))
    return from_parts(group.broadcast_tensors(tensors), document) if document else None


def _read_initial_embedding(config: TrainConfig, group: Group) -> torch.Tensor | None:
    """Rank 0's rows of --initial_embedding, for all processes: the others' machines need no such file."""
    if config.initial_embedding is None:
        return None
    rows = None
    if group.leads:
        path = Path(config.initial_embedding).expanduser()
        rows = {"rows": load_initial_rows(path, config.num_vectors)}
    return group.broadcast_tensors(rows)["rows"]


def _first_state(run: Run, resumed: tuple[State, Identity] | None) -> State:
    """Where the run begins; its numbers are in place.

    Raises:
        IcomError: the checkpoint is another run's, or of a step past the end.
    """
    if resumed is None:
        return State(0, 0)
    state, identity = resumed
    if changed := changes(identity, run.identity):
        raise IcomError(
            f"This is not the run of the checkpoint; different: {'; '.join(changed)}. "
            "Restore that, or start a new run without --resume_from_checkpoint."
        )
    steps = run.config.max_train_steps
    assert steps is not None
    if state.step > steps:
        raise IcomError(
            f"The checkpoint is of step {state.step}, past --max_train_steps {steps}: nothing was changed. Give more "
            "steps, or name an earlier checkpoint with --resume_from_checkpoint."
        )
    _restore(run, state)
    return state


def _agree_on_choices(run: Run) -> None:
    """Let all processes compute alike: the first one chooses in a forward pass that is thrown away."""
    if run.group.size == 1:
        return
    if run.leads:
        batch_loss(run, range(run.config.train_batch_size))
    run.backend.choices.update(json.loads(run.group.broadcast(json.dumps(run.backend.choices).encode())))


def _loop(run: Run, state: State, metrics: Metrics | None, stop: StopRequest) -> None:
    """Optimizer steps until --max_train_steps, a signal, or a loss that is no number."""
    config = run.config
    assert config.max_train_steps is not None
    step, next_sample = state.step, state.next_sample
    saved_at = state.step or None  # the step of a checkpoint that no finite loss has followed yet
    losses = [row["loss"] for row in metrics.rows] if metrics else []
    bar = progress(
        None,
        "training",
        "step",
        total=config.max_train_steps,
        initial=step,
        disable=not run.leads,
        bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
    )
    with bar:
        while step < config.max_train_steps:
            began = time.monotonic()
            learning_rate = run.lr_scheduler.get_last_lr()[0]
            try:
                loss, stop_signal = optimizer_step(run, next_sample, stop.signal_number or 0)
            except Lost:
                if run.leads and saved_at is None and step > state.step:
                    _save(run, step, next_sample)
                raise
            if not math.isfinite(loss):
                if not run.leads:
                    run.group.wait_for_everyone()  # for rank 0's error: it knows the checkpoints
                raise _diverged(run, step, loss)
            if saved_at is not None and run.leads and config.checkpoints_total_limit:
                # Not when it was saved: its rows might have been the ones that go astray, and the older good.
                delete_old_checkpoints(run.output, config.checkpoints_total_limit, saved_at)
            saved_at = None
            step += 1
            next_sample += run.samples_per_step
            seconds = time.monotonic() - began
            logged = {"loss": loss, "lr": learning_rate}
            run.accelerator.log(logged, step=step)
            if metrics:
                metrics.add(step=step, **logged, seconds=round(seconds, 4))
            losses.append(loss)
            mean = running_mean(losses[-100:])[-1]
            bar.set_postfix_str(f"loss {mean:.4f}, lr {learning_rate:.2e}, {seconds:.2f} s/step", refresh=False)
            bar.update()
            done = step == config.max_train_steps
            if run.leads and (step % config.checkpointing_steps == 0 or stop_signal) and not done:
                _save(run, step, next_sample)
                saved_at = step
            if run.leads:
                _show(run, step)
            if stop_signal and not done:
                bar.close()
                run.group.wait_for_everyone()  # rank 0 has saved; a launcher kills all when the first one ends
                raise Stopped(
                    f"stopped after step {step}; saved {run.output / f'checkpoint-{step}'}. Continue with the same "
                    "command and --resume_from_checkpoint latest.",
                    stop_signal,
                )
        if run.leads and state.step < step:
            _save(run, step, next_sample)
            if config.checkpoints_total_limit:
                delete_old_checkpoints(run.output, config.checkpoints_total_limit, step)


def _show(run: Run, step: int) -> None:
    """Embedding and validation pictures of a step, where they are due."""
    config = run.config
    if step % config.save_steps == 0:
        path = run.output / f"learned_embeds-steps-{step}.safetensors"
        run.method.save(path)
    if config.validation_prompt and step % config.validation_steps == 0:
        validate(run, step)


def _save(run: Run, step: int, next_sample: int) -> None:
    kept = run.optimizer.state_dict()["state"]
    state = State(
        step,
        next_sample,
        {name: parameter.detach().cpu() for name, parameter in run.method.parameters.items()},
        {name: _on_cpu(kept[index]) for index, name in enumerate(run.method.parameters)},
        dict(run.backend.choices),
    )
    save_checkpoint(run.output, state, run.identity, settings(run.config))


def _on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _restore(run: Run, state: State) -> None:
    """Put a checkpoint's numbers back where `_save` took them from."""
    run.backend.choices.update(state.choices)
    with torch.no_grad():
        for name, parameter in run.method.parameters.items():
            parameter.copy_(state.parameters[name])
    kept = {index: state.optimizer[name] for index, name in enumerate(run.method.parameters)}
    run.optimizer.load_state_dict(run.optimizer.state_dict() | {"state": kept})


def _diverged(run: Run, step: int, loss: float) -> IcomError:
    """What to do about a loss that is not finite, after `step` good steps."""
    happened = f"The loss became {loss} at step {step + 1}; stopped before anything of it was saved."
    broken = loading.broken_parts(run.model.source, run.backend.dtype)
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

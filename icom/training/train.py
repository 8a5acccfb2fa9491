"""`icom train`: the training run, top to bottom."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from icom.config.train import TrainConfig
from icom.config.training import settings, to_yaml
from icom.data.images import list_pictures, passed_over
from icom.engine.memory import keep_freed_memory
from icom.errors import IcomError
from icom.files import write_atomically
from icom.methods import textual_inversion
from icom.methods.embedding_file import load_initial_rows
from icom.models import hub, loading
from icom.parallel.group import Group, joined
from icom.parallel.place import find_place
from icom.training import tracking
from icom.training.begin import begin, check_resumed, start_accelerate
from icom.training.checkpoint import (
    Identity,
    State,
    find_checkpoint,
    from_parts,
    load_checkpoint,
    save_checkpoint,
    set_aside,
    to_document,
    to_tensors,
)
from icom.training.loop import Advance, Steps, diverged, happened, loop
from icom.training.report import Metrics
from icom.training.results import finish, say_start, validate
from icom.training.run import Run, prepare, settle
from icom.training.step import batch_loss, optimizer_step


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
    # What is quick to check comes first: nothing is loaded for a run that cannot work.
    pictures = list_pictures(config.train_data_dir)
    if group.leads and (notice := passed_over(config.train_data_dir)):
        print(f"icom: {notice}", file=sys.stderr)
    same = {"The pictures": {picture.path.name: picture.digest for picture in pictures}}
    start = begin(config, group, same, until_all_is_written)
    backend, output = start.backend, start.output
    resumed = _read_checkpoint(config, output, group)
    initial_rows = _read_initial_embedding(config, group)
    source = loading.find(
        config.pretrained_model_name_or_path,
        tokenizer_name=config.tokenizer_name,
        revision=config.revision,
        variant=config.variant,
    )
    textual_inversion.check(loading.load_tokenizer(source), config)
    accelerator = start_accelerate(config, backend, group, start.precision, start.reporters)
    config = settle(config, group, source.name, start.precision, resumed, len(pictures))
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
        say_start(run, start.reason, state, repository)
    _agree_on_choices(run)
    metrics = Metrics(output / "metrics.jsonl", after_step=state.step) if run.leads else None

    rescue = partial(_save, run) if run.leads else None
    steps = Steps(partial(_advance, run), partial(_save, run), rescue, partial(_show, run), partial(_diverged, run))
    loop(run, steps, state, metrics)
    done = (config.max_train_steps or 0) - state.step
    return partial(finish, run, initial, metrics.rows, repository, done) if metrics else None


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
    assert run.config.max_train_steps is not None
    check_resumed(state, identity, run.identity, run.config.max_train_steps)
    _restore(run, state)
    return state


def _agree_on_choices(run: Run) -> None:
    """Let all processes compute alike: the first one chooses in a forward pass that is thrown away."""
    if run.group.size == 1:
        return
    if run.leads:
        batch_loss(run, range(run.config.train_batch_size))
    run.backend.choices.update(json.loads(run.group.broadcast(json.dumps(run.backend.choices).encode())))


def _advance(run: Run, next_sample: int, stop_signal: int) -> Advance:
    return Advance(*optimizer_step(run, next_sample, stop_signal))


def _show(run: Run, step: int) -> None:
    """Embedding and validation pictures of a step, where they are due."""
    config = run.config
    if not run.leads:
        return
    if step % config.save_steps == 0:
        path = run.output / f"learned_embeds-steps-{step}.safetensors"
        run.method.save(path)
    if config.validation_prompt and step % config.validation_steps == 0:
        validate(run, step)


def _save(run: Run, step: int, next_sample: int) -> None:
    if not run.leads:
        return
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
    broken = loading.broken_parts(run.model.source, run.backend.dtype)
    if broken:
        return IcomError(
            f"{happened(step, loss)} The weights of {' and '.join(broken)} in {run.model.source.name} hold numbers "
            "that are not finite: the model is damaged. Fetch it again."
        )
    return diverged(run.output, step, loss, min(run.config.learning_rate / 10, 1e-3))

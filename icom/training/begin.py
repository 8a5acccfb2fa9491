"""How all trainings begin: what computes, with whom, in which folder, with which optimizer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import torch

from icom import backends
from icom.config.common import Precision
from icom.config.training import RunOptions, settings
from icom.errors import IcomError, UsageError
from icom.files import make_writable_folder
from icom.parallel import environment
from icom.parallel.group import Group
from icom.parallel.place import Place, choose_collectives
from icom.training import tracking
from icom.training.checkpoint import (
    Identity,
    Saved,
    State,
    changes,
    from_parts,
    load_checkpoint,
    load_shared,
    settings_of,
    to_document,
    versions,
)
from icom.training.checkpoint_folders import find_checkpoint, mend_checkpoints
from icom.training.lock import only_run_in

if TYPE_CHECKING:
    from accelerate import Accelerator

    from icom.backends import Backend

PLACES = {
    *("train_data_dir", "pretrained_model_name_or_path", "tokenizer_name", "initial_embedding", "caption_templates"),
    *("class_data_dir", "output_dir", "logging_dir", "cache_dir"),
}
"""Options that may differ between the machines of a run; what lies there is compared instead."""


@dataclass(frozen=True)
class Start:
    """What is decided before a model is loaded: where the run computes, and why there; its trackers, its folder."""

    backend: Backend
    precision: Precision
    reason: str
    reporters: list[str]
    output: Path


def begin(
    config: RunOptions,
    group: Group,
    facts: Mapping[str, Mapping[str, object]],
    until_end: ExitStack,
    folders: Sequence[Path] = (),
) -> Start:
    """Choose what computes, agree with the other processes, connect to them, and take --output_dir.

    Args:
        config: checked.
        group: the processes.
        facts: what else all of them must have alike, by what it is: "The pictures".
        until_end: rank 0 holds the lock of --output_dir by it.
        folders: of its runs, where it has several; the first with a checkpoint tells what `auto` meant then.

    Raises:
        UsageError: options that this machine cannot do.
        IcomError: the processes differ, or another run writes to --output_dir.
    """
    precision, why = precision_of(config, group, folders)
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
    group.agree("The versions", versions())
    group.agree("The options", {name: value for name, value in settings(config).items() if name not in PLACES})
    for what, values in facts.items():
        group.agree(what, values)
    collectives, _ = choose_collectives(config.collectives, backend.process_group)
    group.agree("The collectives", {"collectives": collectives})
    group.connect(collectives)
    reporters = tracking.choose(config.report_to)
    output = Path(config.output_dir)
    if group.leads:
        make_writable_folder(output)
        until_end.enter_context(only_run_in(output))
        mend_checkpoints(output)
    return Start(backend, precision, reason, reporters, output)


def read_checkpoint(config: RunOptions, output: Path, group: Group) -> Saved | None:
    """The checkpoint that --resume_from_checkpoint names: rank 0's, as the others' machines have none.

    Args:
        config: the options.
        output: --output_dir.
        group: the processes.

    Returns:
        What it holds. Only rank 0's state has tensors; where a checkpoint is in parts, no state has.

    Raises:
        IcomError: there is no such checkpoint, or it is damaged.
    """
    if config.resume_from_checkpoint is None:
        return None
    folder = find_checkpoint(output, config.resume_from_checkpoint) if group.leads else None
    if group.leads and folder is None:
        print(f"icom: no checkpoint in {output} yet: starting anew.", file=sys.stderr)
    named = folder and (folder.name if folder.parent == output else str(folder.absolute()))
    named = group.broadcast((named or "").encode() if group.leads else None).decode()
    if not named:
        return None
    if in_parts := load_shared(output / named, group):
        return in_parts
    saved = load_checkpoint(output / named) if group.leads else None
    document = json.loads(group.broadcast(json.dumps(to_document(saved)).encode() if saved else None))
    return saved or from_parts({}, document)


def check_resumed(state: State, saved: Identity, now: Identity, steps: int) -> None:
    """Refuse to go on from another run's checkpoint.

    Args:
        state: of the checkpoint.
        saved: the run that wrote it.
        now: this run.
        steps: --max_train_steps.

    Raises:
        IcomError: it is another run's, or of a step past the end.
    """
    if changed := changes(saved, now):
        raise IcomError(
            f"This is not the run of the checkpoint; different: {'; '.join(changed)}. "
            "Restore that, or start a new run without --resume_from_checkpoint."
        )
    if state.step > steps:
        raise IcomError(
            f"The checkpoint is of step {state.step}, past --max_train_steps {steps}: nothing was changed. Give more "
            "steps, or name an earlier checkpoint with --resume_from_checkpoint."
        )


def precision_of(config: RunOptions, group: Group, folders: Sequence[Path] = ()) -> tuple[Precision, str]:
    """--mixed_precision, else what `accelerate launch` was configured with; for `auto` rank 0 decides for all.

    Returns:
        (precision, why `auto` took it: empty where it was named).

    Raises:
        UsageError: Accelerate is configured for something else.
        IcomError: a resumed run's checkpoint is damaged or not there.
    """
    wanted = config.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    decided = group.broadcast(
        json.dumps(_fast_precision(config, wanted, folders, group.place)).encode() if group.leads else None
    )
    if wanted == "auto":
        precision, why = json.loads(decided)
        return precision, why
    if wanted not in get_args(Precision):
        raise UsageError(f"Accelerate is configured for {wanted}; set --mixed_precision to auto, bf16 or no.")
    return cast(Precision, wanted), ""


def _fast_precision(config: RunOptions, wanted: str, folders: Sequence[Path], place: Place) -> tuple[str, str]:
    """What `auto` means: another precision would be another run than the checkpoint's, so that one is kept."""
    if wanted != "auto":
        return wanted, ""
    if config.resume_from_checkpoint is not None:
        for output in folders or [Path(config.output_dir)]:
            folder = find_checkpoint(output, config.resume_from_checkpoint)
            if folder is None:
                continue
            precision: str = settings_of(folder)["mixed_precision"]
            return precision, f"{'fp32' if precision == 'no' else precision}: the checkpoint's"
    return backends.fast_precision(config.backend, config.cache_dir, place)


def start_accelerate(
    config: RunOptions, backend: Backend, group: Group, precision: Precision, reporters: list[str]
) -> Accelerator:
    """Accelerate's part: trackers, and what its launcher was configured with. It adopts the group that is there."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    if group.size > 1:
        environment.for_accelerate()
    project = ProjectConfiguration(
        project_dir=config.output_dir, logging_dir=str(Path(config.output_dir) / config.logging_dir)
    )
    return Accelerator(
        cpu=backend.device.type == "cpu",
        mixed_precision=precision,
        log_with=reporters or None,
        project_config=project,
    )


def make_optimizer(
    config: RunOptions, parameters: Iterable[torch.nn.Parameter], group: Group, **options: Any
) -> torch.optim.AdamW:
    """AdamW as the options say.

    Args:
        config: the options.
        parameters: that are trained.
        group: the processes: --scale_lr counts them.
        options: further ones of torch's.
    """
    return torch.optim.AdamW(
        parameters,
        lr=learning_rate(config, group),
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.adam_weight_decay,
        eps=config.adam_epsilon,
        **options,
    )


def learning_rate(config: RunOptions, group: Group) -> float:
    """The peak rate, which --scale_lr may multiply."""
    return config.learning_rate * (config.samples_per_step(group.size) if config.scale_lr else 1)


def make_schedule(
    config: RunOptions, optimizer: torch.optim.Optimizer, after_step: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """The rate is a function of the step alone, so that nothing of the scheduler has to be kept in checkpoints."""
    from diffusers.optimization import get_scheduler

    assert config.max_train_steps is not None
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # a scheduler that does not begin at 0 asks for it
    schedule: torch.optim.lr_scheduler.LambdaLR = get_scheduler(
        config.lr_scheduler,
        optimizer,
        num_warmup_steps=config.lr_warmup_steps,
        num_training_steps=config.max_train_steps,
        num_cycles=config.lr_num_cycles,
        last_epoch=after_step - 1,
    )
    return schedule


def enable_xformers(unet: Any) -> None:
    """Let the UNet attend with xFormers.

    Raises:
        UsageError: it is not installed, or cannot work here.
    """
    try:
        unet.enable_xformers_memory_efficient_attention()
    except Exception as error:
        # ModuleNotFoundError without xFormers, ValueError without a GPU.
        raise UsageError(
            f"xFormers cannot be used here ({error}). Drop --enable_xformers_memory_efficient_attention."
        ) from error

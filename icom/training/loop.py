"""The loop of all trainings: step after step until the end or a signal, saving on the way."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from icom.config.training import RunOptions
from icom.errors import IcomError, Stopped
from icom.parallel.group import Group, Lost
from icom.progress import progress
from icom.signals import StopRequest
from icom.training.checkpoint import (
    State,
    delete_old_checkpoints,
    list_checkpoints,
)
from icom.training.report import Metrics, running_mean

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


class Running(Protocol):
    """What the loop has to know of a run."""

    group: Group
    accelerator: Accelerator
    lr_scheduler: torch.optim.lr_scheduler.LambdaLR

    @property
    def config(self) -> RunOptions:
        """With `max_train_steps` settled."""

    @property
    def output(self) -> Path:
        """--output_dir."""

    @property
    def samples_per_step(self) -> int:
        """Total batch: samples of all processes in one optimizer step."""


@dataclass(frozen=True)
class Advance:
    """What an optimizer step came to.

    Attributes:
        loss: mean over all processes; not finite where loss, gradient or a parameter was not.
        stop_signal: highest signal that any process got, or 0.
        figures: further ones for metrics and trackers.
        shown: further words for the progress line.
    """

    loss: float
    stop_signal: int
    figures: dict[str, float] = field(default_factory=dict)
    shown: str = ""


@dataclass(frozen=True)
class Steps:
    """What a method does at the places of the loop; all processes call each of them.

    Attributes:
        advance: one optimizer step, given the index of its first sample and the signal that this process got, or 0.
        save: a checkpoint, given step and next sample.
        rescue: the same when another process is lost; None where it takes all of them.
        show: what is due after a step.
        diverged: the error for a loss that is not finite, given the last good step and the loss.
    """

    advance: Callable[[int, int], Advance]
    save: Callable[[int, int], None]
    rescue: Callable[[int, int], None] | None
    show: Callable[[int], None]
    diverged: Callable[[int, float], IcomError]


def loop(run: Running, steps: Steps, state: State, metrics: Metrics | None) -> None:
    """Optimizer steps until --max_train_steps, a signal, or a loss that is no number.

    Args:
        run: at `state`.
        steps: of the method.
        state: where it begins.
        metrics: rank 0's.

    Raises:
        IcomError: the loss diverged, another process is gone, or a disk is full.
        Stopped: a signal came; a checkpoint was saved.
    """
    try:
        with StopRequest() as stop:
            _loop(run, steps, state, metrics, stop)
    finally:
        if metrics:
            metrics.close()
        for tracker in run.accelerator.trackers:  # not end_training, which would wait for a lost process
            tracker.finish()


def _loop(run: Running, steps: Steps, state: State, metrics: Metrics | None, stop: StopRequest) -> None:
    config, group = run.config, run.group
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
        disable=not group.leads,
        bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
    )
    with bar:
        while step < config.max_train_steps:
            began = time.monotonic()
            learning_rate = run.lr_scheduler.get_last_lr()[0]
            try:
                advance = steps.advance(next_sample, stop.signal_number or 0)
            except Lost:
                if steps.rescue and saved_at is None and step > state.step:
                    steps.rescue(step, next_sample)
                raise
            if not math.isfinite(advance.loss):
                if not group.leads:
                    group.wait_for_everyone()  # for rank 0's error: it knows the checkpoints
                raise steps.diverged(step, advance.loss)
            if saved_at is not None and group.leads and config.checkpoints_total_limit:
                # Not when it was saved: its rows might have been the ones that go astray, and the older good.
                delete_old_checkpoints(run.output, config.checkpoints_total_limit, saved_at)
            saved_at = None
            step += 1
            next_sample += run.samples_per_step
            seconds = time.monotonic() - began
            logged = {"loss": advance.loss, "lr": learning_rate, **advance.figures}
            run.accelerator.log(logged, step=step)
            if metrics:
                metrics.add(step=step, **logged, seconds=round(seconds, 4))
            losses.append(advance.loss)
            mean = running_mean(losses[-100:])[-1]
            bar.set_postfix_str(
                f"loss {mean:.4f}, lr {learning_rate:.2e}, {seconds:.2f} s/step{advance.shown}", refresh=False
            )
            bar.update()
            done = step == config.max_train_steps
            if (step % config.checkpointing_steps == 0 or advance.stop_signal) and not done:
                steps.save(step, next_sample)
                saved_at = step
            steps.show(step)
            if advance.stop_signal and not done:
                bar.close()
                group.wait_for_everyone()  # rank 0 has saved; a launcher kills all when the first one ends
                raise Stopped(
                    f"stopped after step {step}; saved {run.output / f'checkpoint-{step}'}. Continue with the same "
                    "command and --resume_from_checkpoint latest.",
                    advance.stop_signal,
                )
        if state.step < step:
            steps.save(step, next_sample)
            if group.leads and config.checkpoints_total_limit:
                delete_old_checkpoints(run.output, config.checkpoints_total_limit, step)


def diverged(output: Path, step: int, loss: float, learning_rate: float) -> IcomError:
    """What to do about a loss that is not finite, after `step` good steps.

    Args:
        output: --output_dir.
        step: the last good one.
        loss: that followed.
        learning_rate: one that is lower.
    """
    # The parameters of checkpoint-<step> led here; those of an earlier one are known to have given a finite loss.
    good = [path for path in list_checkpoints(output) if int(path.name.removeprefix("checkpoint-")) < step]
    start = (
        f"The last good checkpoint is {good[-1]}: continue from it with --resume_from_checkpoint {good[-1].name} and"
        if good
        else "There is no good checkpoint yet: start anew with"
    )
    return IcomError(
        f"{happened(step, loss)} {start} a lower learning rate (--learning_rate {learning_rate:g}). If that does not "
        "help, start anew with --mixed_precision no or --adam_epsilon 1e-6."
    )


def happened(step: int, loss: float) -> str:
    """That the loss is not finite, as a sentence."""
    return f"The loss became {loss} at step {step + 1}; stopped before anything of it was saved."

"""The loop of all trainings: step after step until the end or a signal, saving on the way."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from icom.config.finetune import FinetuneConfig
from icom.config.training import RunOptions
from icom.engine.memory import is_out_of_memory
from icom.errors import IcomError, Stopped, TemporaryFailure
from icom.parallel.group import Group, Lost
from icom.progress import progress
from icom.report.page import write_page
from icom.signals import StopRequest
from icom.training.checkpoint import State
from icom.training.checkpoint_folders import delete_old_checkpoints, list_checkpoints
from icom.training.outcome import STOPPED
from icom.training.report import Metrics, running_mean

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


class Running:
    """What every run knows of itself; dataclasses with these fields and more inherit it.

    Attributes:
        config: with every open choice settled.
        group: the processes.
    """

    config: RunOptions
    group: Group
    accelerator: Accelerator
    lr_scheduler: torch.optim.lr_scheduler.LambdaLR

    @property
    def output(self) -> Path:
        """--output_dir."""
        return Path(self.config.output_dir)

    @property
    def leads(self) -> bool:
        """Whether this process writes files and talks."""
        return self.group.leads

    @property
    def samples_per_step(self) -> int:
        """Total batch: samples of all processes in one optimizer step."""
        return self.config.samples_per_step(self.group.size)


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
            It returns what says what the step came to: on an asynchronous device it waits until that is known.
        save: a checkpoint, given step and next sample.
        rescue: the same when another process, or what the data come from, is lost; None where it takes all of them.
        show: what is due after a step, given that step and who asks the run to stop.
        ended: whether the run has come to its end before --max_train_steps, given the steps done; asked after every
            step, before that is saved, and before the first one.
        diverged: the error for a loss that is not finite, given the last good step and the loss.
        due: whether what a step came to has to be known before anything else is done, given its number. That of others
            is asked for when the one after has begun: a device that computes while Python goes on then never waits.
    """

    advance: Callable[[int, int], Callable[[], Advance]]
    save: Callable[[int, int], None]
    rescue: Callable[[int, int], None] | None
    show: Callable[[int, StopRequest], None]
    diverged: Callable[[int, float], IcomError]
    ended: Callable[[int], bool] = lambda step: False
    due: Callable[[int], bool] = lambda step: True


def at_once(advance: Callable[[int, int], Advance]) -> Callable[[int, int], Callable[[], Advance]]:
    """For `Steps`, what does an optimizer step and knows then what it came to."""

    def begin(next_sample: int, stop_signal: int) -> Callable[[], Advance]:
        done = advance(next_sample, stop_signal)
        return lambda: done

    return begin


def loop(run: Running, steps: Steps, state: State, metrics: Metrics | None, doing: str = "training") -> int:
    """Optimizer steps until --max_train_steps, the method's own end, a signal, or a loss that is no number.

    Args:
        run: at `state`.
        steps: of the method.
        state: where it begins.
        metrics: rank 0's.
        doing: what goes on, for people.

    Returns:
        The step that it ended after.

    Raises:
        IcomError: the loss diverged, another process is gone, or a disk is full.
        Stopped: a signal came; a checkpoint was saved.
    """
    try:
        with StopRequest() as stop:
            return _loop(run, steps, state, metrics, stop, doing)
    finally:
        if metrics:
            metrics.close()
        for tracker in run.accelerator.trackers:  # not end_training, which would wait for a lost process
            tracker.finish()


@dataclass(frozen=True)
class _Begun:
    """A step of which nobody knows yet what it came to.

    Attributes:
        number: of the step, from 1 on.
        learning_rate: that it was done with.
        time: when it began, of the monotonic clock.
        read: waits for it, and says what it came to.
    """

    number: int
    learning_rate: float
    time: float
    read: Callable[[], Advance]


class _Record:
    """Takes in what steps came to, in their order: for metrics, trackers, progress and old checkpoints.

    Attributes:
        saved_at: the step of a checkpoint that no finite loss has followed yet.
    """

    def __init__(self, run: Running, steps: Steps, state: State, metrics: Metrics | None, doing: str) -> None:
        self.run, self.steps, self.metrics = run, steps, metrics
        self.saved_at = state.step or None
        self._losses = [row["loss"] for row in metrics.rows] if metrics else []
        self._known_at = 0.0  # when it was known what the step before came to
        self.bar = progress(
            None,
            doing,
            "step",
            total=run.config.max_train_steps,
            initial=state.step,
            disable=not run.group.leads,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
        )

    def learn(self, one: _Begun) -> int:
        """What a step came to, as soon as it is known.

        Returns:
            The highest signal that any process got, or 0.

        Raises:
            IcomError: the loss diverged.
        """
        run, group = self.run, self.run.group
        advance = one.read()
        if not math.isfinite(advance.loss):
            if not group.leads:
                group.wait_for_everyone()  # for rank 0's error: it knows the checkpoints
            raise self.steps.diverged(one.number - 1, advance.loss)
        if self.saved_at is not None and group.leads and run.config.checkpoints_total_limit:
            # Not when it was saved: its rows might have been the ones that go astray, and the older good.
            delete_old_checkpoints(run.output, run.config.checkpoints_total_limit, self.saved_at)
        self.saved_at = None
        now = time.monotonic()
        seconds, self._known_at = now - max(one.time, self._known_at), now
        logged = {"loss": advance.loss, "lr": one.learning_rate, **advance.figures}
        run.accelerator.log(logged, step=one.number)
        if self.metrics:
            self.metrics.add(step=one.number, **logged, seconds=round(seconds, 4))
        self._losses.append(advance.loss)
        mean = running_mean(self._losses[-100:])[-1]
        self.bar.set_postfix_str(
            f"loss {mean:.4f}, lr {one.learning_rate:.2e}, {seconds:.2f} s/step{advance.shown}", refresh=False
        )
        self.bar.update()
        return advance.stop_signal


def _loop(run: Running, steps: Steps, state: State, metrics: Metrics | None, stop: StopRequest, doing: str) -> int:
    config, group = run.config, run.group
    assert config.max_train_steps is not None
    step, next_sample = state.step, state.next_sample
    record = _Record(run, steps, state, metrics, doing)
    begun: deque[_Begun] = deque()
    with record.bar:
        done = steps.ended(step) or step >= config.max_train_steps
        while not done:
            began = time.monotonic()
            learning_rate = float(run.lr_scheduler.get_last_lr()[0])
            needed = record.saved_at is None and step > state.step
            with _rescuing(steps, step, next_sample, needed=needed), _memory(run, step):
                read = steps.advance(next_sample, stop.signal_number or 0)
            step += 1
            next_sample += run.samples_per_step
            begun.append(_Begun(step, learning_rate, began, read))
            last, saves, signal = step == config.max_train_steps, step % config.checkpointing_steps == 0, 0
            unknown = 0 if last or saves or steps.due(step) else 1
            while len(begun) > (0 if signal else unknown):
                signal = max(signal, record.learn(begun.popleft()))
            with _rescuing(steps, step, next_sample):
                done = steps.ended(step) or last
            if (saves or signal) and not done:
                steps.save(step, next_sample)
                record.saved_at = step
            steps.show(step, stop)
            if signal and not done:
                record.bar.close()
                if metrics:
                    write_page(run.output, STOPPED)
                group.wait_for_everyone()  # rank 0 has saved; a launcher kills all when the first one ends
                raise Stopped(
                    f"stopped after step {step}; saved {run.output / f'checkpoint-{step}'}. Continue with the same "
                    "command and --resume_from_checkpoint latest.",
                    signal,
                )
        if state.step < step:
            steps.save(step, next_sample)
            if group.leads and config.checkpoints_total_limit:
                delete_old_checkpoints(run.output, config.checkpoints_total_limit, step)
    return step


@contextmanager
def _rescuing(steps: Steps, step: int, next_sample: int, *, needed: bool = True) -> Iterator[None]:
    """Inside, the loss of another process, or of the data, saves what was done; where it is not saved already."""
    try:
        yield
    except (Lost, TemporaryFailure):
        if steps.rescue and needed:
            steps.rescue(step, next_sample)
        raise


@contextmanager
def _memory(run: Running, step: int) -> Iterator[None]:
    """Inside, memory that runs out is an error that says what to do; `step` steps are done."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        config, batch = run.config, run.config.train_batch_size
        ways = []
        if batch > 1:
            ways.append(f"--train_batch_size {batch // 2} or less (and more accumulation, for the same total batch)")
            if isinstance(config, FinetuneConfig):
                ways.append(f"--train_batch_size auto --total_batch_size {run.samples_per_step}, which finds what fits")
        if not config.gradient_checkpointing:
            ways.append("--gradient_checkpointing")
        ways.append("a smaller --resolution")
        saved = list_checkpoints(run.output)
        again = f" {saved[-1].name} is whole: --resume_from_checkpoint latest goes on from it." if saved else ""
        raise IcomError(
            f"Out of memory in step {step + 1} with {batch} samples at a time (--train_batch_size {batch}): "
            f"{str(error).splitlines()[0]}. Use {'; or '.join(ways)}.{again}"
        ) from error


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

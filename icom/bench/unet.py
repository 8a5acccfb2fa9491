"""What a process of `icom bench --method unet` measures: steps of `icom finetune` itself, or of diffusers' script."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from icom import backends
from icom.bench.job import Job, Measurement, meeting, peak_gb, time_steps
from icom.bench.reference_unet import ReferenceFinetuner
from icom.config.finetune import FinetuneConfig
from icom.data.feed import Batches, Feed
from icom.data.order import Order
from icom.data.sources import open_source
from icom.engine import choices
from icom.methods.unet import Prepared
from icom.models import loading
from icom.parallel.group import joined
from icom.parallel.place import find_place
from icom.parallel.traffic import bytes_sent, sent_by_formula
from icom.training.finetune import advance, batches_of, set_up
from icom.training.finetune_run import FinetuneRun, sampler_of

WARM_UP = 2
"""Steps that are not counted: in the first one attention is chosen and the optimizer's state made."""
REFERENCE_WARM_UP = 1


def measure_unet(job: Job) -> Measurement:
    """Build the model, warm up and time the steps, in this process and those that it is joined with.

    Raises:
        IcomError, MemoryError, RuntimeError: what training raises.
    """
    return _measure_reference(job) if job.backend is None else _measure_ours(job)


@contextmanager
def made_run(job: Job) -> Iterator[FinetuneRun]:
    """The run that `icom finetune` would make with the job's options, before its first step."""
    with ExitStack() as until_end, tempfile.TemporaryDirectory(prefix="icom-bench-") as folder:
        group = until_end.enter_context(joined(find_place(os.environ)))
        run, _, _ = set_up(_options(job, folder), group, until_end)
        yield run


def _options(job: Job, folder: str) -> FinetuneConfig:
    return FinetuneConfig(
        pretrained_model_name_or_path=f"random:{job.arch}",
        train_data_dir=job.data,
        resolution=job.resolution,
        train_batch_size=job.batch_size,
        dataloader_num_workers=job.workers,
        gradient_checkpointing=job.gradient_checkpointing,
        use_ema=job.ema,
        parallel=job.parallel,
        # Random weights have to stay in the range where they are.
        learning_rate=1e-6,
        max_train_steps=WARM_UP + job.steps,
        seed=0,
        mixed_precision=job.mixed_precision,  # type: ignore[arg-type]
        backend=job.backend or "cpu",
        engine=job.engine,  # type: ignore[arg-type]
        report_to="none",
        output_dir=folder,
        cache_dir=job.cache,
    )


def _measure_ours(job: Job) -> Measurement:
    with made_run(job) as run, batches_of(run, 0) as feed:
        stopwatch = _Stopwatch(run, feed)
        seconds = time_steps(stopwatch.step, job.steps, WARM_UP, meeting(job))
        group = run.group
        shapes = [tuple(parameter.shape) for parameter in run.unet.parameters()]
        return Measurement(
            seconds,
            peak_gb(run.backend.device),
            forward=stopwatch.between("start", "middle", job.steps),
            backward=stopwatch.between("middle", "step", job.steps),
            bytes_per_step=round(sent_by_formula(run.parallel, shapes, group.size, run.backend.dtype.itemsize)),
            description=run.backend.describe(),
            group=group.size,
            losses=stopwatch.losses,
            waiting=stopwatch.waiting[-job.steps :],
            sent=stopwatch.sent[-job.steps :] if group.size > 1 else [],
            attention=dict(run.backend.choices),
            ways=choices.measured(run.backend.choices, Path(job.cache)),
        )


class _Stopwatch:
    """Calls the run's own step, and notes what it tells and when its parts begin."""

    def __init__(self, run: FinetuneRun, feed: Batches[Prepared]) -> None:
        self.run, self.feed = run, feed
        self.losses: list[float] = []
        self.waiting: list[float] = []
        self.sent: list[int] = []
        self.marks: dict[str, list[float]] = {"start": [], "middle": [], "step": []}
        run.network.register_forward_pre_hook(self._note("start"))
        run.network.register_forward_hook(self._note("middle"))
        run.optimizer.register_step_pre_hook(self._note("step"))

    def step(self, index: int) -> None:
        """The so manieth, from 0."""
        before = bytes_sent()
        told = advance(self.run, self.feed, index * self.run.samples_per_step, 0)
        self.sent.append(bytes_sent() - before)
        self.losses.append(told.loss)
        self.waiting.append(told.figures["waiting"])

    def between(self, one: str, other: str, steps: int) -> list[float]:
        """Seconds from one mark to the other, of the last steps."""
        pairs = zip(self.marks[one][-steps:], self.marks[other][-steps:], strict=True)
        return [end - begin for begin, end in pairs]

    def _note(self, name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if self.run.backend.device.type == "cuda":
                torch.cuda.synchronize()
            self.marks[name].append(time.perf_counter())

        return hook


@contextmanager
def made_reference(job: Job) -> Iterator[tuple[ReferenceFinetuner, Batches[Prepared]]]:
    """diffusers' script with the job's model and options, before its first step, and the samples of `made_run`."""
    from accelerate import Accelerator

    options = _options(job, "")
    backend, _ = backends.resolve(options.backend, job.mixed_precision, "off", cache_dir=job.cache)
    accelerator = Accelerator(cpu=backend.device.type == "cpu", mixed_precision=job.mixed_precision)
    model = loading.find(options.pretrained_model_name_or_path)
    trainer = ReferenceFinetuner(model, accelerator, options.learning_rate)
    data = open_source(options)
    batches = (range(first, first + job.batch_size) for first in itertools.count(0, job.batch_size))
    sampler = sampler_of(options, int(trainer.noise_scheduler.config["num_train_timesteps"]))
    with Feed(data, Order(data.runs, 0), batches, sampler, workers=0, ahead=0, max_damaged_share=0) as feed:
        yield trainer, feed


def _measure_reference(job: Job) -> Measurement:
    with made_reference(job) as (trainer, feed):
        losses: list[float] = []
        seconds = time_steps(
            lambda _: losses.append(trainer.step(next(feed))), job.steps, REFERENCE_WARM_UP, meeting(job)
        )
        description = f"diffusers' step ({trainer.accelerator.mixed_precision}), {torch.get_num_threads()} threads"
        return Measurement(seconds, peak_gb(trainer.accelerator.device), description=description, losses=losses)

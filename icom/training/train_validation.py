"""The validation loss of textual inversion, and the rows that it finds best."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch

from icom.data.sampling import Sample
from icom.files import write_atomically
from icom.training.report import Metrics
from icom.training.step import loss_of
from icom.training.stopping import chosen, is_learned
from icom.training.validation import FILE, mean_loss, report

if TYPE_CHECKING:
    from icom.training.checkpoint import State
    from icom.training.run import Run

_Item = TypeVar("_Item")

SAMPLES = 20
"""Samples of a validation: what they leave out does not change from step to step, so that few suffice."""
FORWARD = 0.5
"""What a sample's forward pass costs, in samples of a training step: frozen weights make the backward pass, which has
no gradients of weights to compute, about as expensive as the forward one."""
HELD_OUT_FROM = 20
"""Pictures from which on one in ten is held out: of fewer, each is worth more to the training than to its judgement."""
HELD_OUT = 10


@dataclass
class Validation:
    """The curve of a run and its best rows; part of its checkpoints.

    Attributes:
        batches: what is computed each time; a batch is of one picture.
        every: optimizer steps from one time to the next.
        stops: whether the run ends when the curve says so.
        file: rank 0's validation.jsonl.
        curve: (step, loss) from step 0 on.
        best: the rows that people get, of the step that is `chosen`.
        seconds: that it took in this process.
    """

    batches: list[list[Sample]]
    every: int
    stops: bool
    file: Metrics | None
    curve: list[tuple[int, float]]
    best: dict[str, torch.Tensor] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def learned(self) -> bool:
        """Whether the run has come to its end."""
        return self.stops and is_learned(self.curve)


def held_out_last(items: Sequence[_Item]) -> tuple[list[_Item], int]:
    """Pictures with those that are held out at the end, and how many are not: every tenth is, of HELD_OUT_FROM on."""
    if len(items) < HELD_OUT_FROM:
        return list(items), len(items)
    out = [item for number, item in enumerate(items) if number % HELD_OUT == HELD_OUT - 1]
    rest = [item for number, item in enumerate(items) if number % HELD_OUT != HELD_OUT - 1]
    return rest + out, len(rest)


def steps_between(share: float, samples_per_step: int) -> int:
    """Optimizer steps between validations that take at most this share of all samples' cost.

    It counts samples and no seconds, so that it is the same on every machine.

    Args:
        share: above 0, below 1.
        samples_per_step: of all processes.
    """
    cost = SAMPLES * FORWARD
    return max(1, math.ceil(cost * (1 - share) / (share * samples_per_step)))


def start_validation(run: Run, state: State) -> Validation:
    """What a run is validated on.

    Args:
        run: with pictures that are held out behind those of its stream.
        state: where it begins.
    """
    stream, pictures = run.stream, len(run.moments.mean)
    chosen = range(stream.pictures, pictures) or range(pictures)
    of_picture: dict[int, list[Sample]] = {}
    for sample in stream.fixed(chosen, SAMPLES):
        of_picture.setdefault(sample.picture, []).append(sample)
    size = run.config.train_batch_size
    batches = [samples[i : i + size] for samples in of_picture.values() for i in range(0, len(samples), size)]
    file = None
    if run.leads:
        path = run.output / FILE
        # The checkpoint's curve is the truth: a file may have lost its last line, or be another run's.
        write_atomically(path, b"")
        file = Metrics(path, after_step=0)
        for step, loss in state.curve:
            file.add(step=step, loss=loss)
    every = steps_between(run.config.share_for_validation, run.samples_per_step)
    return Validation(batches, every, run.config.stop == "auto", file, list(state.curve), dict(state.best))


def validate_loss(run: Run, validation: Validation, step: int) -> bool:
    """Compute the loss where it is due; all processes call it.

    They do so before the first step and after each, before that is saved: the checkpoint then has its loss.

    Returns:
        Whether the run has come to its end.

    Raises:
        IcomError: a process is gone, or the disk is full.
    """
    if step % validation.every == 0 and not (validation.curve and validation.curve[-1][0] >= step):
        began = time.monotonic()
        with run.rows.shown():
            loss = _loss(run, validation.batches)
            validation.curve.append((step, loss))
            if chosen(validation.curve)[0] == step:
                parameters = run.method.parameters
                validation.best = {name: tensor.detach().cpu().clone() for name, tensor in parameters.items()}
        report(run, validation.file, step, loss)
        validation.seconds += time.monotonic() - began
    return validation.learned


def take_best(run: Run, validation: Validation) -> None:
    """Go back to the rows of the step that is `chosen`; the training is over."""
    with torch.no_grad():
        for name, parameter in run.method.parameters.items():
            parameter.copy_(validation.best[name])


def _loss(run: Run, batches: list[list[Sample]]) -> float:
    total = sum(len(batch) for batch in batches)

    def part(number: int) -> float:
        batch = batches[number]
        return loss_of(run, batch).item() * len(batch) * len(batches) / total

    return mean_loss(run.group, len(batches), part, run.backend.device)

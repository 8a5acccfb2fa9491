"""`icom tune`: learning rate, vectors and steps by paired successive halving.

Successive halving: Jamieson & Talwalkar 2016, arXiv:1502.07943.
All candidates learn beside one frozen model, on the same samples of one stream, and are compared on the same fixed
samples: what differs between them is what they try, and nothing else. Each is a run of `icom train`, in a folder of its
own, with the bits that it has alone.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from icom.config.train import TrainConfig
from icom.config.training import to_yaml
from icom.config.tune import TuneConfig
from icom.engine.memory import keep_freed_memory
from icom.errors import IcomError, Stopped
from icom.files import write_atomically
from icom.models import loading
from icom.parallel.group import Group, joined
from icom.parallel.place import find_place
from icom.signals import StopRequest
from icom.training.begin import begin, start_accelerate
from icom.training.checkpoint import Saved, State
from icom.training.loop import loop
from icom.training.material import open_material
from icom.training.report import Metrics
from icom.training.results import EMBEDDING, say_start
from icom.training.run import Frozen, Run, Shown, attach, digests_of, encode, freeze, learner, settle
from icom.training.stopping import Curve, best, chosen
from icom.training.train import (
    agree_on_choices,
    check_fits,
    open_model,
    read_initial_embedding,
    read_latest,
    steps_of,
    take_place,
)
from icom.training.train_validation import Validation, start_validation, steps_between, take_best
from icom.training.tune_report import Try, draw_curves, print_table, write_tries

BEST = "best.yaml"
TRIES = "tries"
"""The folder of the candidates' runs in --output_dir."""


class _DivergedError(IcomError):
    """A candidate's loss is no number: it is out, and the others go on."""


@dataclass
class Candidate:
    """A run that may turn out to be the best.

    Attributes:
        run: with a configuration of its own, for --max_train_steps steps.
        validation: its curve.
        state: how far it has come.
        rounds: that it was in.
        diverged: whether its loss became no number.
    """

    run: Run
    validation: Validation
    state: State
    rounds: int = 0
    diverged: bool = False

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.run.output.name

    def loss_until(self, step: int) -> float:
        """The lowest validation loss of its first steps: what a round compares."""
        return math.inf if self.diverged else best(until(self.validation.curve, step))[1]

    @property
    def ended(self) -> bool:
        """Whether more steps would change nothing."""
        return self.diverged or self.validation.learned

    def as_try(self) -> Try:
        """For the table."""
        config, curve = self.run.config, self.validation.curve
        steps = self.run.lr_scheduler.last_epoch
        how = "diverged" if self.diverged else "learned" if self.validation.learned else ""
        return Try(config.learning_rate, config.num_vectors, self.rounds, steps, *best(curve), how, curve)


def until(curve: Curve, step: int) -> Curve:
    """The part of a curve up to a step."""
    return [point for point in curve if point[0] <= step]


def rounds(candidates: int, longest: int, every: int) -> list[tuple[int, int]]:
    """How many candidates go how far: each round halves them, and doubles the steps of those that stay.

    Args:
        candidates: at the start.
        longest: steps of the last round.
        every: steps between validations; rounds end with one, but for the last, which is as long as it may be.

    Returns:
        (candidates, steps that each has come to at its end) of every round, with one candidate in the last.
    """
    counts = [candidates]
    while counts[-1] > 1:
        counts.append((counts[-1] + 1) // 2)
    planned = []
    for number, count in enumerate(counts):
        share = longest / 2 ** (len(counts) - 1 - number)
        planned.append((count, min(longest, max(1, math.ceil(share / every)) * every)))
    return planned


def tune(config: TuneConfig) -> None:
    """Try what is to be tried, and write the best to --output_dir.

    Raises:
        UsageError: options that do not fit together or with the model.
        IcomError: pictures, model, checkpoint or disk are no good, nothing was learned, another process is gone, or
            another run writes to --output_dir.
        Stopped: a signal came; what was found was saved.
    """
    keep_freed_memory()
    began = time.monotonic()
    with ExitStack() as until_end, joined(find_place(os.environ)) as group:
        candidates, longest = _begin(config, group, until_end)
        every = steps_between(config.share_for_validation, candidates[0].run.samples_per_step)
        planned = rounds(len(candidates), longest, every)
        if group.leads:
            steps = sum((a - b) * n for (n, a), (_, b) in zip(planned, [(0, 0), *planned], strict=False))
            print(
                f"icom: {len(candidates)} tries in {len(planned)} rounds, at most {steps} steps in all: as many as "
                f"{steps / longest:.1f} runs of {longest}.",
                flush=True,
            )
        try:
            with StopRequest() as stop:  # between the loops, which have their own
                _compete(candidates, planned, group, stop)
        except Stopped as stopped:
            if group.leads:
                _write(config, candidates, began)
            raise Stopped(
                f"stopped; what was tried so far is in {config.output_dir}. Continue with the same command and "
                "--resume_from_checkpoint latest.",
                stopped.exit_code - 128,
            ) from None
        if group.leads and not _write(config, candidates, began):
            raise IcomError(
                f"None of {len(candidates)} tries learned anything: no validation loss fell below its start. Try other "
                "--learning_rates, or another --initializer_token."
            )


def _begin(config: TuneConfig, group: Group, until_end: ExitStack) -> tuple[list[Candidate], int]:
    """All candidates beside one frozen model, and the longest run of one in steps."""
    material = open_material(config, group)
    output = Path(config.output_dir)
    tried = [
        config.candidate(rate, vectors, str(output / TRIES / f"lr-{rate:g}-vectors-{vectors}"))
        for vectors in config.vectors
        for rate in config.learning_rates
    ]
    folders = [Path(one.output_dir) for one in tried]
    start = begin(config, group, {"The pictures": material.digests}, until_end, folders)
    source = open_model(config)
    for one in tried:
        check_fits(one, material, source, group)
    accelerator = start_accelerate(config, start.backend, group, start.precision, [])
    saved = [read_latest(candidate, group) for candidate in tried]
    known = next((one for one in saved if one), None)
    # One for all: who comes first draws the seed.
    common = settle(config, group, source.name, start.precision, known, material.trained)
    settled = ("pretrained_model_name_or_path", "seed", "max_train_steps", "mixed_precision", "validation_steps")
    tried = [replace(one, **{name: getattr(common, name) for name in settled}) for one in tried]
    model = loading.load(source, start.backend.dtype)
    digests = digests_of(model)
    frozen = freeze(tried[0], start.backend, accelerator, model, digests, group)
    shown = encode(frozen, tried[0], material)
    candidates: list[Candidate] = []
    for one, found in zip(tried, saved, strict=True):
        candidates.append(_candidate(frozen, shown, one, found))
        if file := candidates[-1].validation.file:
            until_end.callback(file.close)
    if group.leads:
        longest = max(candidates, key=lambda one: one.run.config.num_vectors)  # of whose captions most is cut off
        tries = f"{len(candidates)} tries of up to {longest.run.method.describe()}"
        say_start(longest.run, material, start.reason, tries, longest.state)
    agree_on_choices(candidates[0].run, candidates[0].validation)
    assert common.max_train_steps is not None
    return candidates, common.max_train_steps


def _candidate(frozen: Frozen, shown: Shown, config: TrainConfig, saved: Saved | None) -> Candidate:
    model = frozen.for_one_more()
    method = attach(model, config, shown.material.captions, read_initial_embedding(config, frozen.group), frozen.group)
    run = learner(frozen, shown, config, model, method, saved.state.step if saved else 0)
    state = take_place(run, saved)
    return Candidate(run, start_validation(run, state), state)


def _compete(
    candidates: Sequence[Candidate], planned: Sequence[tuple[int, int]], group: Group, stop: StopRequest
) -> None:
    """Let the candidates learn, round by round.

    Raises:
        Stopped: any process got a signal.
    """
    alive = list(candidates)
    for number, (count, step) in enumerate(planned, 1):
        if number > 1:
            alive = sorted(alive, key=lambda one: one.loss_until(planned[number - 2][1]))[:count]
        if number > 1 and all(one.ended for one in alive):
            break
        if group.leads:
            print(f"icom: round {number} of {len(planned)}: {len(alive)} to step {step}", flush=True)
        for one in alive:
            if signal := max(int(said) for said in group.gather(b"%d" % (stop.signal_number or 0))):
                raise Stopped("stopped", signal)
            one.rounds = number
            if not one.ended:
                _advance(one, step)
            if group.leads:
                print(f"  {one.name}: {one.loss_until(step):.5f}{'  learned' if one.validation.learned else ''}")


def _advance(candidate: Candidate, step: int) -> None:
    """Let a candidate go on to a step, or to its end."""
    run, state = candidate.run, candidate.state
    assert run.config.max_train_steps is not None

    def diverged(at: int, loss: float) -> IcomError:
        if run.leads:
            run.group.wait_for_everyone()  # the others do, and then go on as this process does
        return _DivergedError(f"step {at}: {loss}")

    metrics = Metrics(run.output / "metrics.jsonl", after_step=state.step) if run.leads else None
    steps = replace(steps_of(run, candidate.validation), diverged=diverged)
    this_far = replace(run, config=replace(run.config, max_train_steps=min(step, run.config.max_train_steps)))
    try:
        last = loop(this_far, steps, state, metrics)
    except _DivergedError:
        candidate.diverged = True
        return
    candidate.state = State(last, last * run.samples_per_step)


def _write(config: TuneConfig, candidates: Sequence[Candidate], began: float) -> bool:
    """Write what was tried, and the best of it; whether anything was learned."""
    output = Path(config.output_dir)
    candidates = [one for one in candidates if one.validation.curve]  # a signal may have come before some began
    tries = [one.as_try() for one in candidates]
    write_tries(tries, output / "tune.json")
    draw_curves(tries, output / "tune.png")
    print_table(tries)
    whole = [one for one in candidates if not one.diverged]
    # Who was in more rounds was found better than who was not, on as many steps.
    winner = min(whole, key=lambda one: (-one.rounds, best(one.validation.curve)[1]), default=None)
    if winner is None or best(winner.validation.curve)[0] == 0:
        return False
    step, _ = chosen(winner.validation.curve)
    take_best(winner.run, winner.validation)
    winner.run.method.save(output / EMBEDDING)
    found = replace(winner.run.config, output_dir=TrainConfig.output_dir, max_train_steps=step, stop=None)
    found = replace(found, validation_share=config.share_for_validation)
    write_atomically(output / BEST, to_yaml(found).encode())
    settings = winner.run.config
    vectors = "1 vector" if settings.num_vectors == 1 else f"{settings.num_vectors} vectors"
    print(
        f"\nBest: --learning_rate {settings.learning_rate:g}, {vectors}, {step} steps, found in "
        f"{time.monotonic() - began:.0f} s. In {output}:\n"
        f"  {EMBEDDING}  its rows, ready to use\n"
        f"  {BEST}  makes them again: icom train --config {output / BEST} --output_dir FOLDER\n"
        f"  tune.json, tune.png  what was tried"
    )
    return True

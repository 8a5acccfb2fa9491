"""`icom train --concepts_list`: several words, one after the other, beside one frozen model.

Each word has the run, the folder and the bits that `icom train` alone gives it. One whose loss becomes no number ends,
and the others go on: what led there (a rate that is too high for its pictures) says nothing about them, and who starts
a list does so for a night.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from icom.config.concepts import Concepts
from icom.config.train import TrainConfig
from icom.config.training import settings
from icom.config.watching import SamplePrompt
from icom.engine.memory import keep_freed_memory
from icom.errors import IcomError, Stopped
from icom.files import make_writable_folder
from icom.methods.embedding_file import load_embeddings, save_embeddings
from icom.models import loading
from icom.parallel.group import Group, Lost, joined
from icom.parallel.place import find_place
from icom.training.begin import PLACES, Start, begin, start_accelerate
from icom.training.checkpoint import Saved
from icom.training.checkpoint_folders import mend_checkpoints
from icom.training.lock import is_running, only_run_in
from icom.training.material import Material, open_material
from icom.training.outcome import DONE, read_outcome
from icom.training.prior import class_captions
from icom.training.report import read_metrics
from icom.training.results import EMBEDDING, write_results
from icom.training.run import Frozen, attach, digests_of, encode, freeze, learner, settle
from icom.training.stopping import best
from icom.training.train import (
    Diverged,
    check_fits,
    learn,
    open_model,
    read_initial_embedding,
    read_latest,
)
from icom.training.validation import FILE

if TYPE_CHECKING:
    import torch

    from icom.methods.textual_inversion import TextualInversion
    from icom.models.loading import Model


@dataclass
class _Concept:
    """One of the list.

    Attributes:
        name: for people: "concept 2 of 5 <toy>".
        config: of its run.
        material: pictures and captions.
        saved: the checkpoint that it goes on from.
        initial_rows: word -> its rows of --initial_embedding.
        prompts: rank 0's, to be drawn on the way.
        learned: whether its results are there.
        problem: why it has none.
    """

    name: str
    config: TrainConfig
    material: Material
    saved: Saved | None = None
    initial_rows: Mapping[str, torch.Tensor] = field(default_factory=dict)
    prompts: list[SamplePrompt] = field(default_factory=list)
    learned: bool = False
    problem: str = ""

    @property
    def output(self) -> Path:
        """Of its run."""
        return Path(self.config.output_dir)


def train_concepts(config: Concepts) -> None:
    """Learn all words of a list.

    Raises:
        UsageError: options that do not fit together or with the model.
        IcomError: pictures, model, checkpoint or disk are no good, some words' losses diverged, another process is
            gone, or another run writes to --output_dir.
        Stopped: a signal came; a checkpoint was saved.
    """
    keep_freed_memory()
    with ExitStack() as until_end, joined(find_place(os.environ)) as group:
        start, frozen, concepts = _begin(config, group, until_end)
        for concept in concepts:
            done = group.broadcast(b"%d" % _is_done(concept) if group.leads else None) == b"1"
            if not done:
                _train(concept, frozen, start)
            elif group.leads:
                print(f"icom: {concept.name}: done already, in {concept.output}", flush=True)
            concept.learned = not concept.problem
            if group.leads:
                _write_all(start.output, concepts)
        if group.leads:
            _show(start.output, concepts)
        if failed := [concept for concept in concepts if concept.problem]:
            if not group.leads:
                group.wait_for_everyone()  # for rank 0's error
            raise IcomError(_what_failed(failed, len(concepts)))


def _begin(config: Concepts, group: Group, until_end: ExitStack) -> tuple[Start, Frozen, list[_Concept]]:
    """All that can be checked before the first word is learned, and the model."""
    common, count = config.common, len(config.concepts)
    concepts: list[_Concept] = []
    for number, one in enumerate(config.concepts, 1):
        name = f"concept {number} of {count} {one.label}"
        with _naming(name):
            concepts.append(_Concept(name, one, open_material(one, group)))
    facts: dict[str, dict[str, object]] = {"The concepts": {concept.name: "" for concept in concepts}}
    for concept in concepts:
        chosen = {name: value for name, value in settings(concept.config).items() if name not in PLACES}
        facts[f"The options of {concept.name}"] = chosen
        facts[f"The pictures of {concept.name}"] = dict(concept.material.digests)
    start = begin(common, group, facts, until_end, [concept.output for concept in concepts])
    source = open_model(common)
    for concept in concepts:
        with _naming(concept.name):
            if group.leads and not is_running(concept.output):
                mend_checkpoints(concept.output)
            concept.saved = read_latest(concept.config, group)
            concept.initial_rows = read_initial_embedding(concept.config, group)
            concept.prompts = check_fits(concept.config, concept.material, source, group)
            concept.config = settle(
                *(concept.config, group, source.name, start.precision, concept.saved, concept.material.trained)
            )
    accelerator = start_accelerate(common, start.backend, group, start.precision, [])
    model = loading.load(source, start.backend.dtype)
    digests = digests_of(model)
    for concept in concepts:
        with _naming(concept.name):
            fresh = replace(model, tokenizer=loading.load_tokenizer(source))
            method = _attach(concept, fresh, group)  # may refuse what it is given; nothing else is of use yet
            if concept.config.with_prior_preservation:
                method.saying(fresh, class_captions(concept.config))
    return start, freeze(common, start.backend, accelerator, model, digests, group), concepts


def _attach(concept: _Concept, model: Model, group: Group) -> TextualInversion:
    return attach(model, concept.config, concept.material.captions, concept.initial_rows, group)


def _train(concept: _Concept, frozen: Frozen, start: Start) -> None:
    """Train a word to its end; a loss that becomes no number is its `problem`.

    What is left of the word before is forgotten: shapes that came first, samples, rows.
    """
    began, group = time.monotonic(), frozen.group
    if group.leads:
        print(f"\nicom: {concept.name}, to {concept.output}", flush=True)
    frozen.backend.start_anew(frozen.model)
    with ExitStack() as until_end:
        if group.leads:
            make_writable_folder(concept.output)
            until_end.enter_context(only_run_in(concept.output))
        accelerator = start_accelerate(concept.config, frozen.backend, group, start.precision, start.reporters)
        mine = replace(frozen, accelerator=accelerator)
        model = mine.for_one_more()
        method = _attach(concept, model, group)
        shown = encode(mine, concept.config, concept.material)
        after_step = concept.saved.state.step if concept.saved else 0
        run = learner(mine, shown, concept.config, model, method, after_step)
        try:
            learned = learn(
                run, concept.saved, concept.material, start.reason, until_end, concept.prompts, doing=concept.name
            )
        except Diverged as error:
            if group.leads:
                print(f"icom: {concept.name}: {error}", file=sys.stderr, flush=True)
                group.wait_for_everyone()  # the others do, and then go on as this process does
            concept.problem = str(error)
            return
        except Stopped as stopped:
            raise Stopped(f"{concept.name}: {stopped}", stopped.exit_code - 128) from None
        if learned:
            write_results(learned)
            print(f"icom: {concept.name}: learned in {time.monotonic() - began:.0f} s", flush=True)


def _is_done(concept: _Concept) -> bool:
    """Whether this very run has left its results: with these options, of these files."""
    if concept.saved is None:
        return False
    outcome, identity = read_outcome(concept.output), concept.saved.identity
    material = concept.material
    return (
        outcome.state == DONE
        and all(outcome.settings.get(name) == value for name, value in settings(concept.config).items())
        and identity.pictures == material.files
        and material.captions.identity().items() <= identity.options.items()
    )


def _write_all(output: Path, concepts: Sequence[_Concept]) -> None:
    """One file with all words so far: whatever happens later, it is there."""
    learned = [concept.output / EMBEDDING for concept in concepts if concept.learned]
    words = {token: rows for file in learned for token, rows in load_embeddings(file).items()}
    if words:
        save_embeddings(output / EMBEDDING, words)


def _show(output: Path, concepts: Sequence[_Concept]) -> None:
    """A line for each, and what to do with them."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("word", box=None, pad_edge=False)
    validated = any((concept.output / FILE).exists() for concept in concepts)
    for heading in ("steps", "loss", *(["validation loss"] if validated else []), "seconds"):
        table.add_column(heading, justify="right")
    table.add_column("file", overflow="fold")
    for concept in concepts:
        outcome = read_outcome(concept.output)
        cells = [concept.config.label, f"{outcome.step}/{outcome.steps}"]
        cells.append("–" if outcome.loss is None else f"{outcome.loss:.4f}")
        if validated:
            curve = [(row["step"], row["loss"]) for row in read_metrics(concept.output / FILE)]
            cells.append(f"{best(curve)[1]:.5f}" if curve else "–")
        cells.append(f"{outcome.seconds:.0f}")
        cells.append(str(concept.output / EMBEDDING) if concept.learned else "none: the loss became no number")
        table.add_row(*map(escape, cells), style=None if concept.learned else "yellow")
    print()
    Console(highlight=False, width=None if sys.stdout.isatty() else 400).print(table)
    if any(concept.learned for concept in concepts):
        first = next(concept.config.label for concept in concepts if concept.learned)
        words = ["--embedding", str(output / EMBEDDING), "--prompt", f"a photo of {first}"]
        print(f"All words in one file: {output / EMBEDDING}\nDraw with it:\n  icom generate {shlex.join(words)}")


def _what_failed(failed: Sequence[_Concept], count: int) -> str:
    listed = "\n  ".join(f"{concept.name}: {concept.problem}" for concept in failed)
    config = failed[0].output / "config.yaml"
    return (
        f"{len(failed)} of {count} concepts have no result:\n  {listed}\n"
        "Give them a lower learning_rate in the list and start the same command with --resume_from_checkpoint latest, "
        f"which passes over what is learned; or train one alone: icom train --config {config} …"
    )


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Inside, an error says which concept it is about."""
    try:
        yield
    except Lost:
        raise
    except IcomError as error:
        raise type(error)(f"{name}: {error}") from error

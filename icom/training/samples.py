"""--sample_prompts: the same prompts with the same noise, drawn again and again while a word is learned."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from icom.commands.generate import draw
from icom.config.watching import SamplePrompt, read_prompts
from icom.data.caption_reading import marked
from icom.files import make_writable_folder, write_atomically
from icom.methods.embedding import filled
from icom.methods.prompts import check_prompts
from icom.models import pipelines
from icom.progress import progress
from icom.training import tracking
from icom.training.checkpoint_folders import SAMPLES, move_aside
from icom.training.contact_sheet import Row, animation, contact_sheet
from icom.training.report import A1111_SAMPLERS, drawn_with, save_png

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

    from icom.config.train import TrainConfig
    from icom.training.run import Run

SHEET = "samples.png"


@dataclass(frozen=True)
class Sample:
    """A picture that is drawn again and again.

    Attributes:
        prompt: with the word in it, and all that it leaves to the run settled.
        parameters: what it is drawn with, as its PNGs say.
    """

    prompt: SamplePrompt
    parameters: str

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        assert self.prompt.width
        assert self.prompt.height
        return self.prompt.width, self.prompt.height


@dataclass(frozen=True)
class Samples:
    """What rank 0 draws on its way.

    Attributes:
        run: whose word it is.
        samples: one for each prompt.
        every: optimizer steps from one time to the next.
    """

    run: Run
    samples: Sequence[Sample]
    every: int

    def path(self, number: int, step: int) -> Path:
        """Of a prompt's picture; prompts count from 1."""
        return self.run.output / SAMPLES / f"prompt-{number}-step-{step}.png"

    def missing(self, step: int) -> list[int]:
        """Prompts without a picture of a step."""
        return [n for n, one in enumerate(self.samples, 1) if not _shows(self.path(n, step), one.parameters)]

    def draw(self, step: int, stopping: Callable[[], bool] = lambda: False) -> None:
        """Draw what is missing of a step, and the sheet.

        Args:
            step: the run's; its rows are in place.
            stopping: asked before each picture: whether to leave the rest to the run that goes on from here.
        """
        if not (numbers := self.missing(step)):
            return
        run = self.run
        make_writable_folder(run.output / SAMPLES)
        run.method.activate(run.model)
        pipeline = pipelines.pipeline_of(run.model)
        drawn = 0
        with run.backend.autocast():
            for number in progress(numbers, f"samples of step {step}", "picture", leave=False):
                if stopping():
                    break
                one, prompt = self.samples[number - 1], self.samples[number - 1].prompt
                assert prompt.seed is not None
                picture = draw(
                    pipeline,
                    prompt.text,
                    prompt.seed,
                    steps=prompt.steps,
                    guidance=prompt.guidance,
                    negative_prompt=prompt.negative,
                    resolution=one.size,
                )
                save_png(picture, self.path(number, step), one.parameters)
                tracking.log_pictures(run.accelerator, f"sample {number}", [picture], step)
                drawn += 1
        if drawn:
            self._write_sheet()

    def _write_sheet(self) -> None:
        rows = self.rows()
        save_png(contact_sheet(rows), self.run.output / SHEET)
        if kind := self.run.config.sample_animation:
            write_atomically(self.run.output / f"samples.{kind}", animation(rows, kind))

    def rows(self) -> list[Row]:
        """What there is of each prompt, in this run and the one that it goes on from."""
        found: list[Row] = []
        for number, one in enumerate(self.samples, 1):
            paths = {_step(path): path for path in self.run.output.glob(f"{SAMPLES}/prompt-{number}-step-*.png")}
            found.append((one.prompt.text, {s: p for s, p in paths.items() if s >= 0 and _shows(p, one.parameters)}))
        return found


def open_prompts(config: TrainConfig, tokenizer: CLIPTokenizer) -> list[SamplePrompt]:
    """--sample_prompts, with the words in them; says what cannot be meant.

    Args:
        config: of the run.
        tokenizer: knows the words.

    Raises:
        UsageError: the prompts' file is no good, or a prompt says a word where the text encoder does not read it.
        IcomError: the word stands inside another.
    """
    words = [word.placeholder_token for word in config.words]

    def said(text: str, place: str) -> str:
        return filled(marked(text, words, place), *([word] for word in words))

    prompts = [
        replace(one, text=said(one.text, one.place), negative=one.negative and said(one.negative, one.place))
        for one in read_prompts(config)
    ]
    warnings = [
        f"{prompt.place} does not say {' or '.join(words)} ([name] stands for it): its pictures will not change."
        for prompt in prompts
        if not any(word in f"{prompt.text} {prompt.negative}" for word in words)
    ]
    for prompt in prompts:
        warnings += check_prompts(tokenizer, [prompt.text], prompt.negative, [])
    for warning in warnings:
        print(f"icom: {warning}", file=sys.stderr)
    return prompts


def start_samples(run: Run, opened: Sequence[SamplePrompt]) -> Samples | None:
    """What rank 0 draws; None for others, and where nothing is to be drawn.

    Args:
        run: about to begin.
        opened: rank 0's prompts.
    """
    if not opened:
        return None
    config = run.config
    assert config.sample_every_n_steps
    prompts = [_settled(config, number, prompt) for number, prompt in enumerate(opened)]
    samples = Samples(
        run, [Sample(prompt, _parameters(run, prompt)) for prompt in prompts], config.sample_every_n_steps
    )
    # A run may go on with other prompts: their pictures are no row of the earlier ones'.
    ours = {path for _, pictures in samples.rows() for path in pictures.values()}
    foreign = [path for path in run.output.glob(f"{SAMPLES}/prompt-*-step-*.png") if path not in ours]
    if foreign:
        folder = move_aside(run.output, foreign)
        print(f"icom: moved {len(foreign)} sample(s) of other prompts to {folder}.", file=sys.stderr)
    count = f"{len(prompts)} prompt" + "s" * (len(prompts) > 1)
    print(f"icom: {run.output / SHEET}: {count}, every {samples.every} steps", flush=True)
    return samples


def _settled(config: TrainConfig, number: int, prompt: SamplePrompt) -> SamplePrompt:
    assert config.seed is not None
    return replace(
        prompt,
        width=prompt.width or config.resolution,
        height=prompt.height or config.resolution,
        seed=config.seed + number if prompt.seed is None else prompt.seed,
    )


def _parameters(run: Run, prompt: SamplePrompt) -> str:
    assert prompt.width
    assert prompt.height
    assert prompt.seed is not None
    name = run.config.pretrained_model_name_or_path
    return drawn_with(
        prompt.text,
        prompt.negative,
        steps=prompt.steps,
        sampler=A1111_SAMPLERS["dpm++"],
        guidance=prompt.guidance,
        seed=prompt.seed,
        size=(prompt.width, prompt.height),
        model=Path(name).name if Path(name).is_dir() else name,
    )


def _shows(path: Path, parameters: str) -> bool:
    """Whether a whole picture is there that was drawn so."""
    try:
        with Image.open(path) as image:
            image.load()
            return bool(image.info.get("parameters") == parameters)
    except (OSError, SyntaxError, ValueError):  # what Pillow's decoders raise
        return False


def _step(path: Path) -> int:
    found = re.fullmatch(r"prompt-\d+-step-(\d+)", path.stem)
    return int(found[1]) if found else -1

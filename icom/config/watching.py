"""The options of `icom train` about pictures that show what it has learned so far, and the lines of their prompts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from icom.config.common import check_at_least_one
from icom.errors import UsageError

LONGEST_SIDE = 4096
MOST_INFERENCE_STEPS = 1000


@dataclass(kw_only=True)
class WatchingOptions:
    """Pictures on the way. Names are those of kohya's sd-scripts."""

    sample_prompts: list[str] = field(default_factory=list)
    """Prompts to draw during training, or a .txt file with one per line; [name] or {} is the new word. Each keeps its
    noise from step to step: samples.png shows what was learned in between. At a prompt's end as in sd-scripts: --n
    (negative prompt), --w, --h, --d (seed), --l (guidance), --s (denoising steps)."""
    sample_every_n_steps: int | None = None
    """Draw --sample_prompts every so many steps, and before the first and at the end. Default: --validation_steps."""
    sample_animation: Literal["webp", "gif"] | None = None
    """Also write samples.webp or samples.gif, which shows the steps one after the other."""

    def check_watching(self) -> None:
        """Refuse what cannot work; a file of prompts is read when the run begins.

        Raises:
            UsageError: names the option, or the prompt.
        """
        check_at_least_one(sample_every_n_steps=self.sample_every_n_steps)
        if self.prompts_file is None:
            read_prompts(self)
        if not self.sample_prompts and (self.sample_animation or self.sample_every_n_steps):
            option = "sample_animation" if self.sample_animation else "sample_every_n_steps"
            raise UsageError(f"--{option} is about --sample_prompts: give some, or drop it.")

    @property
    def prompts_file(self) -> str | None:
        """The file that --sample_prompts names, where it names one."""
        if len(self.sample_prompts) == 1 and self.sample_prompts[0].strip().lower().endswith(".txt"):
            return self.sample_prompts[0].strip()
        return None


@dataclass(frozen=True)
class SamplePrompt:
    """A line of --sample_prompts; None: as the run has it.

    Attributes:
        text: with the word, [name] or {} in it, or without.
        place: where it stands, for messages.
        negative: what to steer away from.
        width, height: in pixels.
        seed: of the noise.
        guidance: scale of classifier-free guidance.
        steps: of denoising.
    """

    text: str
    place: str
    negative: str | None = None
    width: int | None = None
    height: int | None = None
    seed: int | None = None
    guidance: float = 7.5
    steps: int = 25


_FLAGS = {"n": "negative", "w": "width", "h": "height", "d": "seed", "l": "guidance", "s": "steps"}
"""sd-scripts' names in a line -> fields."""
_KNOWN = ", ".join(f"--{name}" for name in _FLAGS)


def read_prompts(options: WatchingOptions) -> list[SamplePrompt]:
    """The prompts, from the options or their file.

    Raises:
        UsageError: the file is missing or empty, or a line is no good; says which.
    """
    path = options.prompts_file
    prompts = read_lines(lines_of(options), f"--sample_prompts{f' {path}, line' if path else ', prompt'}")
    if path and not prompts:
        raise UsageError(f'--sample_prompts {path} is empty. Write prompts into it, one per line: "a photo of [name]".')
    return prompts


def lines_of(options: WatchingOptions) -> list[str]:
    """The prompts as they were written, from the options or their file.

    Raises:
        UsageError: the file cannot be read.
    """
    if options.prompts_file is None:
        return options.sample_prompts
    try:
        return Path(options.prompts_file).expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read --sample_prompts {options.prompts_file}: {error}") from error


def read_lines(lines: list[str], where: str) -> list[SamplePrompt]:
    """What lines say; empty ones and comments (#) are passed over.

    Args:
        lines: of sd-scripts' syntax: text, then --n TEXT --w PIXELS --h PIXELS --d SEED --l GUIDANCE --s STEPS.
        where: they stand; the number of the line follows.

    Raises:
        UsageError: a flag that there is not, or one without a good value; says in which line.
    """
    return [
        _read_line(line.strip(), f"{where} {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.strip().startswith("#")
    ]


def _read_line(line: str, place: str) -> SamplePrompt:
    text, *rest = re.split(r"(?:^|\s)--", line)
    if not text.strip():
        raise UsageError(f"{place}: no prompt before {line.split(maxsplit=1)[0]}.")
    values: dict[str, str] = {}
    for part in rest:
        name, _, value = part.partition(" ")
        if name.lower() not in _FLAGS:
            raise UsageError(f"{place}: there is no --{name}. Prompts may have {_KNOWN}.")
        if not value.strip():
            raise UsageError(f"{place}: --{name} has no value.")
        values[name.lower()] = value.strip()

    def number(name: str, low: float, high: float, of: type[int] | type[float] = int) -> float | None:
        if name not in values:
            return None
        try:
            value = of(values[name])
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            whole = "a whole number" if of is int else "a number"
            raise UsageError(f"{place}: --{name} has to be {whole} from {low:g} to {high:g}, not {values[name]}.")
        return value

    sides = [number(name, 8, LONGEST_SIDE) for name in "wh"]
    for name, side in zip("wh", sides, strict=True):
        if side is not None and side % 8:
            raise UsageError(f"{place}: --{name} has to be a multiple of 8, not {side:g}.")
    width, height = (None if side is None else int(side) for side in sides)
    seed = values.get("d")
    if seed is not None and not (seed.isdecimal() and int(seed) < 2**63):
        raise UsageError(f"{place}: --d has to be a seed between 0 and 2^63 - 1, not {seed}.")
    return SamplePrompt(
        text.strip(),
        place,
        values.get("n"),
        width,
        height,
        None if seed is None else int(seed),
        number("l", 1, 1000, float) or SamplePrompt.guidance,
        int(number("s", 1, MOST_INFERENCE_STEPS) or SamplePrompt.steps),
    )

"""Makes report.html from the files of a run."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from icom import __version__
from icom.data.images import folder_of, read_picture
from icom.errors import IcomError
from icom.files import write_atomically
from icom.report.advice import advise
from icom.report.curves import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, chart
from icom.report.facts import Facts, read_facts
from icom.training.checkpoint_folders import VALIDATION
from icom.training.report import running_mean
from icom.training.stopping import chosen, fell

PAGE = "report.html"
THUMBNAIL, SMALLEST = 144, 256
"""Pixels of training pictures on the page; of what is enlarged where it has fewer."""
LARGEST_SHEET = (2048, 4096)
"""Pixels of a sheet's sides on the page; in the folder it has all of them."""
TITLES = {
    "d*lr": "Rate that Prodigy found",
    "grad_norm": "Norm of the gradient",
    "images_per_second": "Pictures per second",
    "waiting": "Share of the time spent waiting for data",
    "damaged": "Damaged samples",
}
"""Further figures in metrics.jsonl -> what they are."""


@dataclass(frozen=True)
class Shown:
    """A picture on the page: what it is, and its bytes as a data: address."""

    title: str
    source: str
    width: int
    height: int


def write_page(folder: Path, state: str | None = None) -> Path:
    """Write report.html for the run in a folder.

    Args:
        folder: --output_dir.
        state: of the run, where the caller knows it better than the files.

    Raises:
        IcomError: the folder cannot be written.
    """
    import jinja2

    facts = read_facts(folder)
    if state:
        facts = replace(facts, outcome=replace(facts.outcome, state=state))
    # Whatever a caption, a word or an option holds is text here.
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("icom.report", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("page.html.j2").render(
        facts=facts,
        outcome=facts.outcome,
        title=title_of(facts),
        figures=list(figures(facts)),
        advice=advise(facts),
        charts=[one for one in charts(facts) if one],
        sheets=list(sheets(folder)),
        pictures=pictures_of(facts),
        machine=dict(machine_of(facts)),
        frame={"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
        version=__version__,
    )
    write_atomically(folder / PAGE, page.encode())
    return folder / PAGE


def title_of(facts: Facts) -> str:
    """The words, or what else was trained."""
    words = [facts.settings, *(facts.settings.get("further_words") or [])]
    tokens = [str(word["placeholder_token"]) for word in words if word.get("placeholder_token")]
    return " and ".join(tokens) or facts.outcome.folder.resolve().name


def figures(facts: Facts) -> Iterator[tuple[str, str]]:
    """(what, how much): what people look for first."""
    outcome = facts.outcome
    yield "state", outcome.state
    yield "steps", f"{outcome.step:,} of {outcome.steps:,}" if outcome.steps else f"{outcome.step:,}"
    if outcome.loss is not None:
        yield "loss, mean of the last steps", f"{outcome.loss:.4f}"
    if facts.validation and fell(facts.validation):
        step, loss = chosen(facts.validation)
        yield "validation loss", f"{loss:.4f} at step {step:,}"
    if outcome.score is not None:
        yield "judge", f"{outcome.score:.0%}"
    if outcome.seconds:
        yield "training time", _duration(outcome.seconds)
        yield "seconds per step", f"{outcome.seconds / max(1, len(facts.rows)):.2f}"
        if samples := facts.noted.get("samples_per_step"):
            yield "samples per second", f"{samples * len(facts.rows) / outcome.seconds:.2f}"


def charts(facts: Facts) -> Iterator[Chart | None]:
    """Loss, validation loss, rate, and whatever else was measured."""
    steps, losses = [row["step"] for row in facts.rows], [row["loss"] for row in facts.rows]
    raw, mean = list(zip(steps, losses, strict=True)), list(zip(steps, running_mean(losses), strict=True))
    yield chart("Loss", [("raw", "of each step", raw), ("mean", "running mean", mean)])
    if facts.validation:
        mark = None
        if fell(facts.validation):
            kept = facts.settings.get("stop") == "auto"
            step = chosen(facts.validation)[0]
            mark = (step, f"step {step} is {'kept' if kept else 'what --stop auto keeps'}")
        title = "Validation loss: on fixed pictures, noises and timesteps"
        yield chart(title, [("mean", "validation loss", list(facts.validation))], mark)
    yield chart("Learning rate", [("mean", "learning rate", [(row["step"], row["lr"]) for row in facts.rows])])
    if len(facts.norms) > 1:
        yield chart("Norm of the learned rows", [("mean", "mean over the rows", list(facts.norms))])
    for name, title in TITLES.items():
        yield chart(title, [("mean", name, [(row["step"], row[name]) for row in facts.rows if name in row])])
    yield chart("Seconds per step", [("mean", "seconds", [(row["step"], row["seconds"]) for row in facts.rows])])


def sheets(folder: Path) -> Iterator[Shown]:
    """Pictures that the run drew."""
    named = {
        "samples.png": "The same prompts with the same noise, over the steps",
        "comparison.png": "Before training (above) and after it, with the same noise",
    }
    for name, title in named.items():
        if shown := _shown(folder / name, title):
            yield shown
    drawn = sorted(folder.glob(f"{VALIDATION}/step-*.png"), key=lambda path: (len(path.stem), path.stem))
    if drawn and (shown := _shown(drawn[-1], f"Validation pictures of {drawn[-1].stem.replace('-', ' ')}")):
        yield shown


def pictures_of(facts: Facts) -> list[Shown]:
    """Some of the training pictures, small; none where they are no longer there."""
    names, place = facts.noted.get("picture_names"), facts.settings.get("train_data_dir")
    if not (isinstance(names, list) and isinstance(place, str)):
        return []
    found = []
    for name in map(str, names):
        try:
            picture = read_picture(folder_of(place) / Path(name).name)
        except (IcomError, OSError):
            continue
        picture.thumbnail((THUMBNAIL, THUMBNAIL))
        found.append(Shown(name, _data_uri(picture), *picture.size))
    return found


def machine_of(facts: Facts) -> Iterator[tuple[str, str]]:
    """What it ran on."""
    noted = facts.noted
    names = {"began": "began", "computes": "computes", "cpu": "CPU", "cores": "cores", "memory_gb": "memory, GB"}
    for name, said in (names | {"processes": "processes", "samples_per_step": "samples per step"}).items():
        if name in noted:
            yield said, str(noted[name])
    versions: Any = noted.get("versions")
    if isinstance(versions, dict):
        yield "versions", ", ".join(f"{package} {version}" for package, version in versions.items())


def _shown(path: Path, title: str) -> Shown | None:
    """A drawn picture, no larger than LARGEST_SHEET."""
    try:
        with Image.open(path) as image:
            picture = image.convert("RGB")
    except (OSError, SyntaxError, ValueError):  # what Pillow's decoders raise
        return None
    if picture.width < SMALLEST:  # the bundled model's, say
        picture = picture.resize([SMALLEST // picture.width * side for side in picture.size], Image.Resampling.NEAREST)
    picture.thumbnail(LARGEST_SHEET)
    return Shown(title, _data_uri(picture), *picture.size)


def _data_uri(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", quality=85)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"

"""What the scores of a learned word look like: a table, a curve over its steps, a section of its model card."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from icom.files import write_atomically

IMAGES, TEXT = "image_similarity", "text_alignment"
_HEADINGS = {
    IMAGES: "similarity to the training pictures",
    "nearest": "to the nearest of them",
    TEXT: "text alignment",
    "judge": "judge",
}
BEGIN, END = "<!-- scores of icom evaluate{} -->", "<!-- end of the scores{} -->"
"""Around a word's section of the model card; what stands between them is made anew."""


def best_step(rows: Sequence[dict[str, Any]]) -> int:
    """The step whose pictures are most like the training pictures, the first of several; of step 0 only if alone."""
    learned = [row for row in rows if row["step"]] or list(rows)
    return int(max(learned, key=lambda row: row[IMAGES])["step"])


def columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Scores that the rows have, in order."""
    return [name for name in _HEADINGS if name in rows[0]]


def _cell(row: dict[str, Any], name: str) -> str:
    if name == "judge":
        return f"{row[name]:.0%}"
    return f"{row[name]:.3f} ± {row['error']:.3f}" if name == IMAGES else f"{row[name]:.3f}"


def show(result: dict[str, Any]) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    rows = result["scores"]
    table = Table(
        title=escape(f"{result['word']}: {result['pictures']} pictures per step, seen by {result['image_encoder']}")
    )
    table.add_column("step", justify="right")
    for name in columns(rows):
        table.add_column(f"{_HEADINGS[name]} ↑", justify="right")
    for row in rows:
        style = "bold" if row["step"] == result["best_step"] else None
        table.add_row(str(row["step"]), *(_cell(row, name) for name in columns(rows)), style=style)
    table.caption = escape(" ".join(sentences(result)))
    print()
    Console(soft_wrap=False).print(table)


def sentences(result: dict[str, Any]) -> list[str]:
    """What makes the numbers readable."""
    rows = result["scores"]
    best = next(row for row in rows if row["step"] == result["best_step"])
    said = [f"Most like the training pictures: step {best['step']}."]
    near = [
        row["step"] for row in rows if row["step"] and row is not best and row[IMAGES] > best[IMAGES] - best["error"]
    ]
    if near:
        said.append(f"Within its standard error: {', '.join(map(str, near))}.")
    if rows[0]["step"] == 0:
        said.append("Step 0 is what the word started from.")
    if (among := result["among_training_pictures"]) is not None:
        said.append(f"The training pictures among themselves: {among:.3f}.")
    if TEXT in rows[0]:
        aligned = max(rows, key=lambda row: float(row[TEXT]))
        said.append(f"Best text alignment: step {aligned['step']}.")
    return said


def write_curve(result: dict[str, Any], path: Path) -> None:
    """Draw the scores over the steps, side by side, as PNG; the training pictures' own similarity as a line."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = result["scores"]
    steps = [row["step"] for row in rows]
    names = [name for name in columns(rows) if name != "nearest"]
    figure = Figure(figsize=(4.5 * len(names), 3.5), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False)
    for axes, name in zip(panels[0], names, strict=True):
        spread = [row["error"] for row in rows] if name == IMAGES else None
        axes.errorbar(steps, [row[name] for row in rows], yerr=spread, color="tab:blue", marker="o", capsize=3)
        axes.set(xlabel="optimizer step", title=_HEADINGS[name])
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if name == "judge":
            axes.set_ylim(-0.05, 1.05)
        if name == IMAGES and result["among_training_pictures"] is not None:
            label = "training pictures\namong themselves"
            axes.axhline(result["among_training_pictures"], color="grey", linestyle="--", label=label)
            axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120)
    write_atomically(path, buffer.getvalue())


def write_card(folder: Path, name: str, result: dict[str, Any]) -> Path | None:
    """Put the scores into the run's README.md, in place of those that are there; None where it has none.

    Args:
        folder: the run's.
        name: tells the word from others of the run; empty where there are none.
        result: of results.json.

    Raises:
        IcomError: it cannot be written.
    """
    path = folder / "README.md"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    begin, end = (mark.format(f" of {name}" if name else "") for mark in (BEGIN, END))
    title = f"## Scores of `{result['word']}`" if name else "## Scores"
    section = f"{begin}\n{title}\n\n{_section(result)}\n{end}"
    there = re.compile(rf"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not there.search(text):
        text = f"{text.rstrip()}\n\n{begin}{end}\n"
    text = there.sub(lambda _: section, text, count=1)
    write_atomically(path, text.encode())
    return path


def _section(result: dict[str, Any]) -> str:
    rows = result["scores"]
    names = columns(rows)
    prompts = ", ".join(f"`{prompt}`" for prompt in result["prompts"])
    lines = [
        f"{result['pictures']} pictures of each step, drawn with {result['num_inference_steps']} steps of "
        f"{result['scheduler']} at guidance {result['guidance_scale']:g} from {prompts}, seen by "
        f"{result['image_encoder']}: mean cosine to {result['training_pictures']} training pictures.",
        "",
        "| step | " + " | ".join(_HEADINGS[name] for name in names) + " |",
        "|---" * (len(names) + 1) + "|",
        *(f"| {row['step']} | " + " | ".join(_cell(row, name) for name in names) + " |" for row in rows),
        "",
        " ".join(sentences(result)),
    ]
    return "\n".join(lines)

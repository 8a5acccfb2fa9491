"""What `icom tune` shows of its tries: a table, a picture, and JSON."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from icom.files import write_atomically
from icom.training.stopping import Curve


@dataclass(frozen=True)
class Try:
    """How one pair of learning rate and vectors did.

    Attributes:
        learning_rate, vectors: what was tried.
        rounds: that it was in.
        steps: that it trained.
        best_step, best_loss: where its validation loss was lowest.
        how: it ended: "learned", "diverged", or "" where others were better, or it was the best to the last step.
        curve: (step, validation loss).
    """

    learning_rate: float
    vectors: int
    rounds: int
    steps: int
    best_step: int
    best_loss: float
    how: str
    curve: Curve


def in_order(tries: Sequence[Try]) -> list[Try]:
    """The best first: who came further, then who has the lower loss."""
    return sorted(tries, key=lambda one: (one.how == "diverged", -one.rounds, one.best_loss))


def write_tries(tries: Sequence[Try], path: Path) -> None:
    """As JSON, the best first."""
    write_atomically(path, (json.dumps([asdict(one) for one in in_order(tries)], indent=1) + "\n").encode())


def print_table(tries: Sequence[Try]) -> None:
    """The best first."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("learning rate", "vectors", "rounds", "steps", "validation loss", "at step"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for one in in_order(tries):
        cells = [f"{one.learning_rate:g}", str(one.vectors), str(one.rounds), str(one.steps)]
        table.add_row(*cells, f"{one.best_loss:.5f}", str(one.best_step), one.how)
    Console(highlight=False, width=None if sys.stdout.isatty() else 400).print(table)


def draw_curves(tries: Sequence[Try], path: Path) -> None:
    """The validation loss of each try over its steps, as PNG: a colour for a learning rate, a line for the vectors."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rates, vectors = sorted({one.learning_rate for one in tries}), sorted({one.vectors for one in tries})
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    colours = mpl.colormaps["viridis"].resampled(len(rates))
    styles = ("-", "--", ":", "-.")
    for one in tries:
        steps, losses = zip(*one.curve, strict=True)
        axes.plot(
            steps,
            losses,
            color=colours(rates.index(one.learning_rate)),
            linestyle=styles[vectors.index(one.vectors) % len(styles)],
            marker=".",
            label=f"{one.learning_rate:g} x {one.vectors}",
        )
    start = max(one.curve[0][1] for one in tries)
    lowest = min(one.best_loss for one in tries)
    if lowest < start:
        axes.set_ylim(lowest - 0.05 * (start - lowest), start + 0.3 * (start - lowest))  # not those that go astray
    axes.set(xlabel="optimizer step", ylabel="validation loss", title="Learning rate x vectors")
    axes.legend(frameon=False, fontsize="small", ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120)
    write_atomically(path, buffer.getvalue())

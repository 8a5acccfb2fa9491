"""`icom report`: how far several runs came, in one table."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from icom.config.report import ReportConfig
from icom.errors import UsageError
from icom.report.page import write_page
from icom.training.outcome import DONE, NONE, Outcome, read_outcome

_SHOWN_ELSEWHERE = {"output_dir", "max_train_steps"}


def report(config: ReportConfig) -> None:
    """Print a line for each run.

    Raises:
        UsageError: a folder is none, or holds no run.
        IcomError: a page cannot be written.
    """
    if not config.folders:
        raise UsageError("Which runs? icom report FOLDER …, for instance: icom report runs/*")
    outcomes = [outcome for folder in config.folders for outcome in _outcomes(Path(folder).expanduser())]
    for outcome in outcomes if config.html else ():
        print(write_page(outcome.folder), file=sys.stderr)
    if config.json:
        for outcome in outcomes:
            print(json.dumps(asdict(outcome), default=str))
    else:
        show_outcomes(outcomes)


def show_outcomes(outcomes: Sequence[Outcome]) -> None:
    """As a table; options that are not the same in all runs get a column each."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    begun = [outcome for outcome in outcomes if outcome.settings]
    several = len({outcome.training for outcome in begun}) > 1
    names = dict.fromkeys(name for outcome in begun for name in outcome.settings if name not in _SHOWN_ELSEWHERE)
    differing = [name for name in names if _differs(name, begun)]
    scores = any(outcome.score is not None for outcome in outcomes)
    table = Table(box=None, pad_edge=False)
    for heading in ("run", *(["training"] if several else [])):
        table.add_column(heading, overflow="fold")
    table.add_column("state")
    for heading in ("steps", "loss", *(["score"] if scores else []), "seconds"):
        table.add_column(heading, justify="right")
    for name in differing:
        table.add_column(name, overflow="fold")
    for outcome in outcomes:
        cells = [str(outcome.folder), *([outcome.training] if several else []), outcome.state]
        cells += [f"{outcome.step}/{outcome.steps}" if outcome.steps else "–"]
        cells.append("–" if outcome.loss is None else f"{outcome.loss:.4f}")
        if scores:
            cells.append("–" if outcome.score is None else f"{outcome.score:.0%}")
        cells.append(f"{outcome.seconds:.0f}")
        cells += [str(outcome.settings.get(name, "–")) for name in differing]
        table.add_row(*map(escape, cells), style=None if outcome.state == DONE else "yellow")
    # In a file or a pipe a table is as wide as it needs to be.
    Console(highlight=False, width=None if sys.stdout.isatty() else 400).print(table)


def _differs(name: str, begun: Sequence[Outcome]) -> bool:
    """Whether an option is not the same in all runs; one that only another training has says nothing."""
    knowing = {outcome.training for outcome in begun if name in outcome.settings}
    return len({str(outcome.settings.get(name)) for outcome in begun if outcome.training in knowing}) > 1


def _outcomes(folder: Path) -> list[Outcome]:
    """Of the folder itself, or of those in it."""
    if not folder.is_dir():
        raise UsageError(f"No folder {folder}.")
    if (own := read_outcome(folder)).state != NONE:
        return [own]
    inside = [read_outcome(path) for path in sorted(folder.iterdir(), key=_by_number) if path.is_dir()]
    if found := [outcome for outcome in inside if outcome.state != NONE]:
        return found
    raise UsageError(f"No run has written to {folder}: no config.yaml is there, nor in the folders in it.")


def _by_number(path: Path) -> tuple[int, str]:
    """0, 1, 2, 10; names after them."""
    return (int(path.name), "") if path.name.isdecimal() else (sys.maxsize, path.name)

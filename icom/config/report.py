"""The options of `icom report`."""

from __future__ import annotations

from dataclasses import dataclass

import tyro


@dataclass(kw_only=True)
class ReportConfig:
    """Show how far runs came: state, steps, loss, score, seconds; and the options in which they differ.

    Example: icom report runs/*
    """

    folders: tyro.conf.Positional[tuple[str, ...]]
    """Output folders of `icom train` and `icom finetune`, or folders that hold such."""
    json: bool = False
    """Print JSON, a line for each run."""
    html: bool = False
    """Also make report.html in each run's folder anew: curves, pictures, options, machine, what to try next. Runs of
    `icom train` and `icom finetune` leave one at their end."""

"""A line of the table of `icom doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "warning", "failure"]
MARKS: dict[Status, str] = {"ok": "✓", "note": "·", "warning": "!", "failure": "✗"}
GB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        name: what was looked at.
        status: see MARKS.
        value: what was found.
        fix: what to do; empty where nothing has to be done.
    """

    name: str
    status: Status
    value: str
    fix: str = ""


def gigabytes(size: int) -> str:
    """For instance: 5.9 GB."""
    return f"{size / GB:.1f} GB"

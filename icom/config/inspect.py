"""The options of `icom inspect`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(kw_only=True)
class InspectConfig:
    """Say what is in a checkpoint and whether it is whole: every byte is read.

    Example: icom inspect tuned/checkpoint-500
    """

    checkpoint: tyro.conf.Positional[Path]
    """Folder of a checkpoint."""
    json: bool = False
    """Print JSON."""

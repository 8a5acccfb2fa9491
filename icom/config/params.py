"""The options of `icom params`."""

from __future__ import annotations

from dataclasses import dataclass

import tyro


@dataclass(kw_only=True)
class ParamsConfig:
    """Print how many parameters each part of a model has. Architectures are known without a download."""

    model: tyro.conf.Positional[str]
    """sd15, sd2-base, sd21, tiny, bundled, a folder, a single file, or a Hub id."""
    json: bool = False
    """Print JSON."""

"""The options of `icom doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class DoctorConfig:
    """Check what a long run needs: CPU, memory, disk, versions, network. Exit code 1: training would fail.

    Example: icom doctor --output_dir runs/dicoo
    """

    output_dir: str = "text-inversion-model"
    """Where training is to write: --output_dir of `icom train`."""
    cache_dir: str | None = None
    """Folder of the latent cache: --cache_dir of `icom train`."""
    json: str | None = None
    """Also write the findings to this file; `-` prints them as JSON instead of the table."""

"""A UNet of few layers: processes exchange block by block in a step, which takes its time on one machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SMALL_UNET: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": [32, 64],
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 128,
}
"""Its configuration; it fits the bundled VAE and text encoder."""


def write_small_unet(folder: Path) -> Path:
    """For --from_scratch."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "unet.yaml"
    file.write_text(json.dumps(SMALL_UNET))
    return file

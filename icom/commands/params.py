"""`icom params`: parameters per part of a model, from its configuration alone."""

from __future__ import annotations

import json
from typing import Any

import torch

from icom.config import ParamsConfig
from icom.models import loading
from icom.models.architectures import ARCHITECTURES, build_text_encoder, build_unet, build_vae


def params(config: ParamsConfig) -> None:
    """Print the table (or JSON).

    Raises:
        IcomError: no such model.
    """
    counts = count_parameters(config.model)
    if config.json:
        print(json.dumps({"model": config.model, **counts, "total": sum(counts.values())}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Parameters of {config.model}", show_footer=True)
    table.add_column("part", footer="all")
    total = sum(counts.values())
    table.add_column("parameters", justify="right", footer=f"{total:,}")
    table.add_column("millions", justify="right", footer=f"{total / 1e6:.6f} M")
    for part, count in counts.items():
        table.add_row(part, f"{count:,}", f"{count / 1e6:.6f} M")
    Console().print(table)


def count_parameters(name: str) -> dict[str, int]:
    """Parameters of text encoder, VAE and UNet, without loading or allocating weights.

    Args:
        name: an architecture, `bundled`, a folder, a single file, or a Hub id.
    """
    parts: dict[str, Any]
    with torch.device("meta"):
        if name in ARCHITECTURES:
            parts = {
                "text_encoder": build_text_encoder(name),
                "vae": build_vae(name),
                "unet": build_unet(name),
            }
        else:
            parts = _from_folder(name)
    return {part: sum(p.numel() for p in module.parameters()) for part, module in parts.items()}


def _from_folder(name: str) -> dict[str, Any]:
    loading.quiet_libraries()
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    source = loading.find(name, configs_only=True)
    if source.file:
        architecture = source.file.architecture
        return {
            "text_encoder": build_text_encoder(architecture, source.file.vocabulary),
            "vae": build_vae(architecture),
            "unet": build_unet(architecture),
        }
    folder = source.folder
    assert folder is not None
    return {
        "text_encoder": CLIPTextModel(CLIPTextConfig.from_pretrained(folder / "text_encoder")),
        "vae": AutoencoderKL.from_config(AutoencoderKL.load_config(folder / "vae")),
        "unet": UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(folder / "unet")),
    }

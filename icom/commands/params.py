"""`icom params`: parameters per part of a model, from its configuration alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from icom.config.params import ParamsConfig
from icom.models import loading
from icom.models.architectures import ARCHITECTURES
from icom.models.parts import PARTS, Part


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
    loading.quiet_libraries()
    build = _builder(name)
    with torch.device("meta"):
        parts = {part.name: build(part) for part in PARTS}
    return {part: sum(p.numel() for p in module.parameters()) for part, module in parts.items()}


def _builder(name: str) -> Callable[[Part], Any]:
    """What builds a part of the model of that name."""
    if name in ARCHITECTURES:
        return lambda part: part.build(ARCHITECTURES[name])
    source = loading.find(name, configs_only=True)
    if source.file:
        architecture = ARCHITECTURES[source.file.architecture].with_vocabulary(source.file.vocabulary)
        return lambda part: part.build(architecture)
    folder = source.folder
    assert folder is not None
    return lambda part: part.build_from(folder)

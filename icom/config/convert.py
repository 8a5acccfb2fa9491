"""The options of `icom convert`."""

from __future__ import annotations

from dataclasses import dataclass

import tyro


@dataclass(kw_only=True)
class ConvertConfig:
    """Write a learned word of any format (A1111's .pt, learned_embeds.bin, …) as safetensors.

    Example: icom convert charturner.pt --output charturner.safetensors
    """

    embedding: tyro.conf.Positional[str]
    """A file or a Hub id; FILE=<word> names the word anew. Of pickled files only tensors are read."""
    output: str | None = None
    """The file to write. Default: FILE.safetensors beside it; for a Hub id here, under the repository's name."""

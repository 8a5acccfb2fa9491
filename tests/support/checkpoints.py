"""What a run leaves, as tests read it: by the format alone, without icom's own reading."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def tensors_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors, in one file or in parts."""
    parts = [load_file(file) for file in sorted(checkpoint.glob("*.safetensors"))]
    named = {name: [part[name] for part in parts if name in part] for name in parts[0]}
    return {name: found[0] if len(found) == 1 else torch.cat(found) for name, found in named.items()}


def assert_same_tensors(one: Path, other: Path) -> None:
    """Of two checkpoints."""
    tensors, others = tensors_in(one), tensors_in(other)
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())


def validation_curve(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of an --output_dir."""
    rows = [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]

"""The tensors of a checkpoint on the disk: in one file, or in parts that several processes wrote.

Part k of a tensor has the rows (of its first dimension) that follow those of part k - 1; what has no dimension is in
the first part. That is how FSDP deals tensors out, so each process writes and reads its own rows alone, and another
number of processes reads other ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

WHOLE = "state.safetensors"


def part_name(rank: int, size: int) -> str:
    """The file that one of `size` processes writes."""
    return f"state-{rank + 1:05}-of-{size:05}.safetensors"


def file_names(folder: Path) -> list[str]:
    """The files that a checkpoint has to have, as those that are there say."""
    parts = sorted(path.name for path in folder.glob("state-*-of-*.safetensors"))
    if not parts:
        return [WHOLE]
    size = int(parts[-1].removesuffix(".safetensors").rpartition("-")[2])
    return [part_name(rank, size) for rank in range(size)]


class Stored(Mapping[str, torch.Tensor]):
    """Name -> tensor, read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises: OSError, SafetensorError."""
        self._files = [safe_open(folder / name, "pt") for name in file_names(folder)]
        self._parts: dict[str, list[Any]] = {}
        for file in self._files:
            for name in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 - it is no mapping
                self._parts.setdefault(name, []).append(file)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, name: str) -> torch.Tensor:
        """All of it."""
        parts = [file.get_tensor(name) for file in self._parts[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of all of it."""
        shapes = [file.get_slice(name).get_shape() for file in self._parts[name]]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes[0] else ()

    def rows(self, name: str, wanted: range) -> torch.Tensor:
        """Some of its rows; nothing else of it comes into the memory."""
        found, first = [], 0
        for file in self._parts[name]:
            part = file.get_slice(name)
            begin, end = max(wanted.start - first, 0), min(wanted.stop - first, part.get_shape()[0])
            if begin < end:
                found.append(part[begin:end])
            first += part.get_shape()[0]
        return torch.cat(found) if found else self._parts[name][0].get_slice(name)[0:0]

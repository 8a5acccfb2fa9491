"""Forward and backward passes that are recorded once for each shape of batch, and played again: CUDA graphs.

A GPU that runs a small batch waits for Python between kernels; one that plays a graph does not. What plays it gets new
numbers in the memory that it was recorded with. A pass draws no random numbers (they come with the batch), so that a
graph gives what the pass would give.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

Compute = Callable[[], Sequence[torch.Tensor]]
Play = Callable[[], None]


class Numbers(Protocol):
    """What a pass reads, on the device."""

    def tensors(self) -> list[torch.Tensor]:
        """All of it."""


_Numbers = TypeVar("_Numbers", bound=Numbers)


@dataclass(frozen=True)
class _Recorded:
    inputs: list[torch.Tensor]
    results: Sequence[torch.Tensor]
    play: Play


class Graphs:
    """The passes of a run."""

    def __init__(self, record: Callable[[Compute], tuple[Sequence[torch.Tensor], Play]]) -> None:
        """Args: the backend's; it returns the tensors that hold the results whenever the pass has been played."""
        self._record = record
        self._recorded: dict[Hashable, _Recorded] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._recorded)

    def results(
        self, name: Hashable, batch: _Numbers, compute: Callable[[_Numbers], Sequence[torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        """What `compute` gives for a batch.

        Args:
            name: of the pass: what it depends on beside the batch and what has its place in memory (weights, rows).
            batch: its first one is kept: its memory gets the numbers of all that have its shapes.
            compute: depends on nothing but shapes in what it does; recorded at the first batch of each.

        Returns:
            The results; they hold until the pass is played again.
        """
        tensors = batch.tensors()
        key = (name, *((tensor.shape, tensor.dtype) for tensor in tensors))
        recorded = self._recorded.get(key)
        if recorded is None:
            results, play = self._record(lambda: compute(batch))
            recorded = self._recorded[key] = _Recorded(tensors, results, play)
        else:
            for place, numbers in zip(recorded.inputs, tensors, strict=True):
                place.copy_(numbers)
        recorded.play()
        return recorded.results

"""Which part of a work a command does."""

from __future__ import annotations

from collections.abc import Mapping

from icom.config.precompute import parse_part
from icom.errors import UsageError


def part_of(wanted: str | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """(K, N): this command does the K-th of N parts.

    Args:
        wanted: --part.
        environment: of the process; a Slurm array's task has its number there.

    Raises:
        UsageError: the array's tasks have no consecutive numbers.
    """
    if wanted is not None:
        return parse_part(wanted)
    names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_COUNT")
    if not all(environment.get(name, "").isdecimal() for name in names):
        return 1, 1
    task, first, last, count = (int(environment[name]) for name in names)
    if last - first + 1 != count:
        raise UsageError(
            f"The array's tasks are {count} of those from {first} to {last}, so that their parts are not clear: give "
            "--part K/N, or tasks with consecutive numbers. What is whole is not made again."
        )
    return task - first + 1, count

"""Options that several commands have."""

from __future__ import annotations

import math
from typing import Literal, TypeVar

import tyro

from icom.errors import UsageError

_Item = TypeVar("_Item")
Repeatable = tyro.conf.UseAppendAction[list[list[_Item]]]
"""An option that takes several values and may be repeated: --prompt a b --prompt c is [[a, b], [c]]."""


def flat(groups: list[list[_Item]]) -> list[_Item]:
    """The values of an option that may be repeated, in their order."""
    return [value for group in groups for value in group]


Precision = Literal["no", "fp16", "bf16"]

PrecisionName = Literal["auto", "no", "fp16", "bf16"]
"""What --mixed_precision takes; `auto` becomes one of the others before anything is computed."""

BackendName = Literal["auto", "cpu", "ipex", "cuda"]

EngineName = Literal["auto", "on", "off"]


def check_at_least_one(**options: int | str | None) -> None:
    """Refuse counts below 1; None and words such as `auto` are no counts.

    Raises:
        UsageError: names the option.
    """
    for name, value in options.items():
        if isinstance(value, int) and value < 1:
            raise UsageError(f"--{name} has to be at least 1, not {value}.")


def check_not_negative(**options: float | None) -> None:
    """Refuse numbers below 0; None is no number.

    Raises:
        UsageError: names the option.
    """
    for name, value in options.items():
        if value is not None and value < 0:
            raise UsageError(f"--{name} must not be negative.")


def check_positive(**options: float | None) -> None:
    """Refuse what is not above 0, or infinite; None is no number.

    Raises:
        UsageError: names the option.
    """
    for name, value in options.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"--{name} has to be a positive number, not {value}.")


def check_resolution(resolution: int) -> None:
    """The VAE halves the picture three times, so both sides have to be multiples of 8.

    Raises:
        UsageError: otherwise.
    """
    if resolution < 8 or resolution % 8:
        below = max(8, resolution // 8 * 8)
        raise UsageError(f"--resolution has to be a multiple of 8, not {resolution}. Nearest: {below} or {below + 8}.")

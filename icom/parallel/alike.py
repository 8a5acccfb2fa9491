"""Whether machines are alike: the one place where facts of several are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Machine = TypeVar("Machine")
Fact = TypeVar("Fact")


@dataclass(frozen=True)
class Difference(Generic[Machine, Fact]):
    """A fact in which a machine is unlike the others.

    Attributes:
        machine: that differs.
        name: of the fact.
        found: there; None where the machine does not have the fact.
        expected: what it should be; None where only this machine has the fact.
    """

    machine: Machine
    name: str
    found: Fact | None
    expected: Fact | None


def differences(
    facts: Mapping[Machine, Mapping[str, Fact]], expected: Mapping[str, Fact]
) -> Iterator[Difference[Machine, Fact]]:
    """All differences, machine after machine, in order of the expected facts; what only a machine has comes last."""
    for machine, own in facts.items():
        for name in dict.fromkeys([*expected, *own]):
            found, wanted = own.get(name), expected.get(name)
            if found != wanted:
                yield Difference(machine, name, found, wanted)


def usual(facts: Iterable[Mapping[str, Fact]]) -> dict[str, Fact]:
    """What most machines have, fact by fact; of several that are equally common, the first machine's."""
    having: dict[str, list[Fact]] = {}
    for own in facts:
        for name, fact in own.items():
            having.setdefault(name, []).append(fact)
    return {name: Counter(some).most_common(1)[0][0] for name, some in having.items()}

"""A fault at every call that `icom provision` makes: afterwards nothing is left, or a second call completes it."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.wire import Icom, Wire, remembered

OPTIONS = ("--count", "2", "--placement_group", "--max_hours", "1")
FAULTS = {
    "refused": 1000,
    "throttled": 1000,
    "throttled twice": 2,
    "timeout": 1000,
    "timeout twice": 2,
    "ctrl-c": 1,
}
"""What happens -> to how many attempts of the call. `timeout`: AWS does what it was asked, its answer is lost."""


def reset(wire: Wire, at: int | None = None, fault: str = "", times: int = 0) -> None:
    wire.calls.clear()
    wire.at, wire.fault, wire.times = at, fault, times


@pytest.fixture
def calls(make: Icom, icom: Icom, wire: Wire) -> list[str]:
    """The calls of a provision that meets no fault; each has the same, so that one is enough."""

    def once() -> list[str]:
        result = make("--cluster", "smooth", *OPTIONS)
        assert result.code == 0, result.err
        made = list(wire.calls)
        assert icom("teardown", "--yes", "--all_images", "--cluster", "smooth").code == 0
        return made

    found: list[str] = remembered("calls", once)
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_at_every_call_leaves_nothing(
    fault: str,
    calls: list[str],
    make: Icom,
    wire: Wire,
    empty: Callable[[], None],
    left: Callable[[str], list[str]],
) -> None:
    outcomes: Counter[str] = Counter()
    hangup = signal.getsignal(signal.SIGHUP)
    for i, call in enumerate(calls):
        empty()
        cluster = f"c{i}-{fault.replace(' ', '-')}"
        reset(wire, i, fault.partition(" ")[0], FAULTS[fault])
        result = make("--cluster", cluster, *OPTIONS)
        where = f"{fault} at call {i} ({call}): {result}"
        reset(wire)
        if result.code == 0:
            assert fault != "ctrl-c", where
            outcomes["completed"] += 1
        else:
            assert result.code == (130 if fault == "ctrl-c" else 1), where
            assert "twice" not in fault, where
            outcomes["failed, nothing left"] += 1
            assert fault == "ctrl-c" or "icom: " in result.err, where
            assert left(cluster) == [], where
    assert signal.getsignal(signal.SIGHUP) == hangup, "it is ignored while things are removed, and no longer"
    print(f"\n{len(calls)} calls, {fault} at each: {dict(outcomes)}")


@pytest.mark.parametrize("fault", ["refused", "timeout", "ctrl-c"])
def test_second_call_completes_what_was_kept(
    fault: str,
    calls: list[str],
    make: Icom,
    icom: Icom,
    wire: Wire,
    empty: Callable[[], None],
    left: Callable[[str], list[str]],
    nodes: Callable[[str], list[dict[str, Any]]],
) -> None:
    kept = 0
    first_that_makes = len(calls) - calls[::-1].index("ec2:CreateSecurityGroup") - 1  # before it came the rehearsal
    for i, call in list(enumerate(calls))[first_that_makes:]:
        empty()
        cluster = f"k{i}-{fault}"
        reset(wire, i, fault, FAULTS[fault])
        first = make("--cluster", cluster, "--keep_on_failure", *OPTIONS)
        kept += bool(first.code and left(cluster))
        reset(wire)
        where = f"{fault} at call {i} ({call}): {first}"
        second = make("--cluster", cluster, *OPTIONS)
        assert second.code == 0, f"{where}\nthen {second}"
        assert sorted(tag["Value"] for n in nodes(cluster) for tag in n["Tags"] if tag["Key"] == "icom:role") == [
            *("master", "worker-1"),
        ], where
    assert icom("teardown", "--yes", "--all_images", "--cluster", cluster).code == 0
    assert left(cluster) == []
    makers = len(calls) - first_that_makes
    print(f"\n{makers} calls that make, {fault} at each: {kept} left something, a second provision completed all")

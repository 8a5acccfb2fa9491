"""A fault at each kind of call that `icom provision` makes: afterwards nothing is left, or a second call completes it.

Guards provisioning.provision, ec2 and teardown.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.support.command import long
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
REPEATED = ("throttled", "throttled twice", "timeout twice")
"""What botocore repeats the call for, in one place for all of them: met at the last call of an operation alone."""
LOOKS = """
    sts:GetCallerIdentity ssm:GetParameter servicequotas:GetServiceQuota api.pricing:GetProducts
    ec2:DescribeInstanceTypes ec2:DescribeInstanceTypeOfferings ec2:DescribeSubnets
""".split()
"""Kinds of calls that a provision makes before it changes anything; most several times."""
MAKES = """
    ec2:CreateSecurityGroup ec2:AuthorizeSecurityGroupIngress ec2:ImportKeyPair ec2:CreatePlacementGroup
    ec2:RunInstances ec2:StopInstances ec2:CreateImage ec2:TerminateInstances ec2:DescribeInstances
    ec2:DescribeSecurityGroups ec2:DescribeKeyPairs ec2:DescribePlacementGroups ec2:DescribeImages
""".split()
"""Those that it makes then, too."""
QUICK = "ec2:CreateImage"
"""The one at which `make test` has a fault of each kind."""


def at_each(faults: Iterable[str], operations: Iterable[str], quick: Iterable[str]) -> list[Any]:
    """(fault, operation) for each of both; `make test` has the `quick` faults at one operation."""
    return [
        (fault, operation) if operation == QUICK and fault in quick else long(fault, operation)
        for fault in faults
        for operation in operations
    ]


def some(calls: list[str], operation: str, fault: str) -> list[int]:
    """Which calls of an operation meet a fault: the first, one in the middle and the last.

    Those between have the same to leave behind: nodes are looked at again and again while nothing is made.
    """
    found = [i for i, call in enumerate(calls) if call == operation]
    return found[-1:] if fault in REPEATED else sorted({found[0], found[len(found) // 2], found[-1]})


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


def test_calls_are_those_that_meet_faults(calls: list[str]) -> None:
    assert set(calls) == {*LOOKS, *MAKES}


@pytest.mark.parametrize(("fault", "operation"), at_each(FAULTS, LOOKS + MAKES, FAULTS))
def test_fault_at_a_call_leaves_nothing(
    fault: str,
    operation: str,
    calls: list[str],
    make: Icom,
    wire: Wire,
    empty: Callable[[], None],
    left: Callable[[str], list[str]],
    subtests: pytest.Subtests,
) -> None:
    hangup = signal.getsignal(signal.SIGHUP)
    for i in some(calls, operation, fault):
        with subtests.test(call=i):
            empty()
            cluster = f"c{i}-{fault.replace(' ', '-')}"
            reset(wire, i, fault.partition(" ")[0], FAULTS[fault])
            result = make("--cluster", cluster, *OPTIONS)
            reset(wire)
            if result.code == 0:
                assert fault != "ctrl-c"
            else:
                assert result.code == (130 if fault == "ctrl-c" else 1), result
                assert "twice" not in fault, result
                assert fault == "ctrl-c" or "icom: " in result.err, result
                assert left(cluster) == [], result
    assert signal.getsignal(signal.SIGHUP) == hangup, "it is ignored while things are removed, and no longer"


@pytest.mark.parametrize(("fault", "operation"), at_each(["refused", "timeout", "ctrl-c"], MAKES, ["ctrl-c"]))
def test_second_call_completes_what_was_kept(
    fault: str,
    operation: str,
    calls: list[str],
    make: Icom,
    icom: Icom,
    wire: Wire,
    empty: Callable[[], None],
    left: Callable[[str], list[str]],
    nodes: Callable[[str], list[dict[str, Any]]],
    subtests: pytest.Subtests,
) -> None:
    first_that_makes = len(calls) - calls[::-1].index("ec2:CreateSecurityGroup") - 1  # before it came the rehearsal
    for i in (first_that_makes + i for i in some(calls[first_that_makes:], operation, fault)):
        with subtests.test(call=i):
            empty()
            cluster = f"k{i}-{fault}"
            reset(wire, i, fault, FAULTS[fault])
            first = make("--cluster", cluster, "--keep_on_failure", *OPTIONS)
            reset(wire)
            second = make("--cluster", cluster, *OPTIONS)
            assert second.code == 0, f"{first}\nthen {second}"
            roles = [tag["Value"] for n in nodes(cluster) for tag in n["Tags"] if tag["Key"] == "icom:role"]
            assert sorted(roles) == ["master", "worker-1"], first
            assert icom("teardown", "--yes", "--all_images", "--cluster", cluster).code == 0
            assert left(cluster) == []

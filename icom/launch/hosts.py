"""The hosts file, in the dialects of all MPIs, and how many processes each host gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from icom import names
from icom.errors import UsageError
from icom.names import HostName, Malformed

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1"})

_SEE = "hosts.example explains the file"


@dataclass(frozen=True)
class Host:
    """A line of the hosts file.

    Attributes:
        name: as ssh takes it.
        slots: how many processes the line asks for; None where it says nothing.
        line: its number, from 1.
    """

    name: HostName
    slots: int | None
    line: int


@dataclass(frozen=True)
class Share:
    """A host and how many processes run there; the first host has rank 0."""

    host: Host
    ranks: int


def read_hosts(path: str) -> list[Host]:
    """Read `host`, `host:N` (Intel MPI, MPICH) and `host slots=N` (Open MPI) lines; `#` starts a comment.

    Raises:
        UsageError: no such file, no host in it, or lines that are wrong; all of these are named with their number.
    """
    try:
        text = Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(f"Cannot read the hosts file {path}: {reason}. One host per line; {_SEE}.") from None
    hosts: list[Host] = []
    problems = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _parse(words, number)
            _check_place(host, hosts)
            hosts.append(host)
        except ValueError as error:
            problems.append(f"{path}, line {number}: {line.strip()!r}: {error}")
    if problems:
        raise UsageError("The hosts file is wrong; nothing was started.\n  " + "\n  ".join(problems))
    if not hosts:
        raise UsageError(f"The hosts file {path} names no host. One per line; {_SEE}.")
    return hosts


def _parse(words: list[str], number: int) -> Host:
    name, colon, count = words[0].partition(":")
    counts = [count] if colon else []
    if "@" in name:
        user, _, place = name.partition("@")
        raise ValueError(f"mpirun takes no user here; write `Host {place}` and `User {user}` into ~/.ssh/config")
    try:
        host = names.host(name if ":" not in count else words[0])
    except Malformed as error:
        raise ValueError(
            f"{str(error).rstrip('.')}; give anything else, such as an IPv6 address, a name in ~/.ssh/config"
        ) from None
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key != "slots":
            raise ValueError(f"{word!r} is not understood; after the name comes nothing or slots=N")
        counts.append(value)
    if len(counts) > 1:
        raise ValueError("two numbers of slots")
    if not counts:
        return Host(host, None, number)
    if not (counts[0].isascii() and counts[0].isdigit() and int(counts[0]) > 0):
        raise ValueError(f"{counts[0]!r} is no number of processes (1, 2, …)")
    return Host(host, int(counts[0]), number)


def _check_place(host: Host, before: list[Host]) -> None:
    twin = next((other for other in before if other.name == host.name), None)
    if twin:
        raise ValueError(f"stands in line {twin.line} already; for two processes on a host write {host.name}:2")
    if host.name in LOCAL_NAMES and before:
        raise ValueError(
            "has to be the first line: rank 0 and the address that all others connect to belong to the first host. "
            "Or write the name by which the others reach this machine"
        )


def share_out(hosts: list[Host], n: int | None, ppn: int) -> list[Share]:
    """How many processes each host gets: its slots, else `ppn`; the hosts are filled in their order.

    Args:
        hosts: from `read_hosts`.
        n: processes in all; None: as many as there is room for.
        ppn: processes of a host whose line has no number.

    Raises:
        UsageError: more processes than room, or numbers below 1.
    """
    for option, value in (("--ppn", ppn), ("-n", n)):
        if value is not None and value < 1:
            raise UsageError(f"{option} has to be at least 1, not {value}.")
    room = [host.slots or ppn for host in hosts]
    left = sum(room) if n is None else n
    if left > sum(room):
        raise UsageError(
            f"-n {n}: the hosts have room for {sum(room)} processes ({len(hosts)} hosts, --ppn {ppn} where their line "
            "says nothing). Add hosts, or raise --ppn."
        )
    shares = []
    for host, most in zip(hosts, room, strict=True):
        if left:
            shares.append(Share(host, min(most, left)))
            left -= shares[-1].ranks
    return shares

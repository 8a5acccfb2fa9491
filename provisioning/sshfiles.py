"""The writers of what ssh reads: blocks of an ssh config, lines of known_hosts. What does not fit is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from icom import names
from icom.names import Address, Malformed


def host_block(
    hosts: Sequence[str], where: Address | None, alias: str, more: Mapping[str, Path | str], user: str | None = None
) -> str:
    """A Host of an ssh config, that trusts recorded keys and nothing else.

    Args:
        hosts: what ssh calls it: names or addresses, no patterns.
        where: the address to connect to.
        alias: under which its key is recorded.
        more: further options of icom's own; a Path is quoted.
        user: to log in as; None for the one who calls ssh.

    Raises:
        Malformed: one of them is none.
    """
    options: dict[str, str] = {"HostName": names.address(where), "HostKeyAlias": names.word(alias)}
    if user is not None:
        options["User"] = names.user(user)
    options |= {option: names.ssh_path(value) if isinstance(value, Path) else value for option, value in more.items()}
    options |= {"StrictHostKeyChecking": "yes", "BatchMode": "yes", "ConnectTimeout": "10"}
    options |= {"ServerAliveInterval": "15", "ServerAliveCountMax": "4"}
    lines = [names.line("Host", *map(_host_or_address, hosts))]
    return "".join(lines + [names.line(f"  {option}", value) for option, value in options.items()])


def known_host(aliases: Sequence[str], key: str) -> str:
    """A line of known_hosts: no patterns, no markers.

    Raises:
        Malformed: an alias is none, or the key.
    """
    return names.line(",".join(map(names.word, aliases)), names.public_key(key))


def _host_or_address(text: str) -> str:
    try:
        return names.host(text)
    except Malformed:
        return names.address(text)

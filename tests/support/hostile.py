"""Text that strangers may send: each value broke, or could break, a file, a shell line, ssh or a terminal."""

from __future__ import annotations

import re

LINES = [
    "master\nProxyCommand touch PWNED",
    "master\r\n  ProxyCommand touch PWNED",
    "worker-1\n  LocalCommand touch PWNED\n  PermitLocalCommand yes",
    "master\u2028ProxyCommand touch PWNED",
    "master\x85ProxyCommand touch PWNED",
    "worker-1 *",
    "*",
    "!master",
    "worker-\u00b2",
    "m\u0430ster",
    "worker-1,other",
    "worker-1$(touch PWNED)",
    "worker-1`touch PWNED`",
    "worker-1;touch PWNED",
    'worker-1"',
    "../../../etc/x",
    "-oProxyCommand=touch PWNED",
]
"""As EC2 can tell them: XML has no other control characters."""
TEXTS = [*LINES, "", "\x00", "master\x00", "\x1b]0;title\x07", "a\x1b[2Jb", "\u202erof", "%h", "${HOME}", " master"]

ROLES = [*LINES, "worker-0", "worker-01", "worker--1", "w" * 250]

SCREEN = "\x1b[2J\x1b[1;1Hall is well\x1b]0;title\x07\x1b]8;;http://x\x1b\\x\x1b[8mhidden\x9b5n\x07\b\b\x1bc"
"""Clears the screen, sets the title, makes a link, hides, asks the terminal to answer, rings, goes back, resets."""


def obeyed(text: str) -> list[str]:
    """What a terminal would obey in a text."""
    return re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text.replace("\r\n", "\n"))

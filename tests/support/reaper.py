"""Ends what a test run leaves behind, whatever ended the run: `python reaper.py MARK`, with a pipe as its input.

Every process that the tests start inherits the mark in its environment. When the pipe closes, because the run is over
or because its process was killed, all that carry the mark are killed. (What runs on hosts in namespaces has an
environment of its own, and ends with its host.)
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

MARK = "ICOM_TEST_RUN"
"""The variable that carries it, after those of the runs that this one is a test of, with colons between them."""


def marked(mark: str) -> dict[int, str]:
    """Pid -> command line of all living processes that inherited the mark, but for this one."""
    wanted, found = re.compile(rf"^{MARK}=(.*:)?{mark}(:|$)"), {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                # Of a zombie nothing can be read, as of one that has ended.
                if any(wanted.match(line) for line in (entry / "environ").read_text(errors="replace").split("\0")):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return found


def kill(mark: str) -> None:
    """SIGKILL for all of them, until none is left: one may start another meanwhile."""
    while left := marked(mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run; its end is what this waits for
    sys.stdin.buffer.read()
    kill(sys.argv[1])

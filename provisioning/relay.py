"""What a node prints while a command runs there, shown here as it comes, and never obeyed by the terminal."""

from __future__ import annotations

import codecs
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from subprocess import Popen
from typing import IO, TextIO

from icom.names import plain

_PIECE = 1 << 16


@contextmanager
def showing(process: Popen[bytes], err: TextIO, out: TextIO | None = None) -> Iterator[None]:
    """Inside, and until its pipes end, show a process's errors on `err`, and its output on `out` if that is given."""
    pairs = [(process.stderr, err), *([(process.stdout, out)] if out else [])]
    threads = [threading.Thread(target=_pass_on, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


def _pass_on(source: IO[bytes], to: TextIO) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while piece := os.read(source.fileno(), _PIECE):
        # A progress bar goes back to the beginning of its line, and no further.
        text = plain(decoder.decode(piece), "\n\t\r").encode(to.encoding or "utf-8", "replace")
        with suppress(OSError, ValueError):  # nobody reads any more: the other side must not wait for that
            to.write(text.decode(to.encoding or "utf-8"))
            to.flush()

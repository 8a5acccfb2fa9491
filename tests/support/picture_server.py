"""A web server with the world's pictures, and all that goes wrong with those of strangers.

/N.png is picture N, /N.jpg the same as JPEG; others: see `_Handler.do_GET`. Pictures below /held/ wait while a file is
there. Run as a program (ADDRESS FILE) it prints where it is.
"""

from __future__ import annotations

import http.server
import io
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from icom.world.concepts import seen_things
from icom.world.scene import describe, draw, random_scene


def picture(number: int, kind: str = "PNG") -> bytes:
    """Picture N of the world."""
    with io.BytesIO() as file:
        draw(random_scene(random.Random(number), seen_things())).save(file, kind)
        return file.getvalue()


def caption(number: int) -> str:
    """What it shows."""
    return describe(random_scene(random.Random(number), seen_things()), random.Random(number))


_CONTENTS = {
    "broken": picture(1)[:100],
    "text": b"<html>no picture here</html>",
    # Pillow would start a program for it.
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n",
    "huge": picture(1) + bytes(3_000_000),
}


class _Handler(http.server.BaseHTTPRequestHandler):
    asked: list[tuple[str, str]]
    held: Path | None
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing is said."""

    def do_GET(self) -> None:
        """What comes first in the path says what goes wrong."""
        self.asked.append((self.path, self.headers["User-Agent"]))
        what, _, rest = self.path.lstrip("/").partition("/")
        self._wait(what)
        if what == "busy" and sum(path == self.path for path, _ in self.asked) == 1:
            self._answer(b"", 503)
        elif what == "to":  # /to/http://…
            self._answer(b"", 302, Location=rest)
        elif what == "round":
            self._answer(b"", 301, Location=self.path)
        elif what == "optout":
            self._answer(picture(1), **{"X-Robots-Tag": "otherbot: noai, nofollow"})
        elif what == "cut":
            self._answer(picture(1), length=10**6)
        elif what == "slow":
            self._drip()
        elif what in _CONTENTS:
            self._answer(_CONTENTS[what])
        else:
            number, _, ending = (rest or what).partition(".")
            if number.isdecimal():
                self._answer(picture(int(number), "JPEG" if ending == "jpg" else "PNG"))
            else:
                self._answer(b"", 404)

    def _wait(self, what: str) -> None:
        while what == "held" and self.held and self.held.exists():
            time.sleep(0.05)
        if what == "never":
            time.sleep(3)

    def _answer(self, content: bytes, code: int = 200, length: int | None = None, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)
        if length is not None:
            self.close_connection = True

    def _drip(self) -> None:
        """A byte now and then, so that no single wait is long, until the other side has enough of it."""
        self.send_response(200)
        self.send_header("Content-Length", str(10**6))
        self.end_headers()
        while True:
            self.wfile.write(b"x")
            time.sleep(0.05)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may leave."""


@contextmanager
def pictures(address: str = "127.0.0.1", held: Path | None = None) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The server's address, and what it was asked for: path and User-Agent."""
    asked: list[tuple[str, str]] = []
    handler = type("Handler", (_Handler,), {"asked": asked, "held": held})
    with _Server((address, 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://{address}:{running.server_port}", asked
        finally:
            running.shutdown()
            thread.join()


if __name__ == "__main__":
    with pictures(sys.argv[1], Path(sys.argv[2])) as (place, _):
        print(place, flush=True)
        while True:
            time.sleep(60)

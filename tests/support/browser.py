"""A real browser for what is made for browsers: Chromium without a window, spoken to through a pipe.

The protocol is Chrome's own (chromedevtools.github.io/devtools-protocol), messages of JSON with a zero byte after each.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "google-chrome", "chrome-headless-shell")


def find_browser() -> str | None:
    """The first of NAMES that is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page in it.

    Attributes:
        events: all that it told of itself: requests, messages of its console, exceptions.
    """

    def __init__(self, process: subprocess.Popen[bytes], to: int, of: int) -> None:
        self._process, self._to, self._of = process, to, of
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Ask it something; events that come meanwhile are kept."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            told = self._read()
            if told.get("id") == self._number:
                assert "error" not in told, told
                return dict(told["result"])
            self.events.append(told)

    def open(self, page: Path) -> None:
        """Go to a file, and wait until all of it is there."""
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def show(self, width: int, scheme: str = "light") -> None:
        """On a screen of so many pixels' width, in the reader's `light` or `dark`."""
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self) -> bytes:
        """The whole page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def requests(self) -> list[str]:
        """Addresses that the page asked for, but for those of data that it holds itself."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        addresses = [str(event["params"]["request"]["url"]) for event in sent]
        return [address for address in addresses if not address.startswith("data:")]

    def complaints(self) -> list[dict[str, Any]]:
        """What it wrote to its console or log, and exceptions."""
        methods = (
            "Log.entryAdded",
            "Runtime.consoleAPICalled",
            "Runtime.exceptionThrown",
            "Page.javascriptDialogOpening",
        )
        return [event for event in self.events if event.get("method") in methods]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._of, 2**16)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser, with its own files in a folder; it ends with the block.

    Not as root's usual self: Chromium's sandbox needs a user of its own, and the pages are ours.
    """
    name = find_browser()
    assert name
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
    words += [f"--user-data-dir={folder}", "--disable-background-networking", "--disable-dev-shm-usage"]
    (reads, to), (of, writes) = os.pipe(), os.pipe()

    # The protocol's two ends are file descriptors 3 and 4.
    shell = ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "bash", name, *words]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(shell, pass_fds=(reads, writes), start_new_session=True, **quiet)  # type: ignore[call-overload]
    os.close(reads)
    os.close(writes)
    try:
        yield Browser(process, to, of)
    finally:
        os.close(to)  # which it takes for goodbye
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(of)

"""What the parts of the set-up share: where things are, running commands, downloads, errors."""

from __future__ import annotations

import http.client
import shlex
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
NETWORK_ERRORS = (OSError, http.client.HTTPException)  # urllib.error.URLError is an OSError


class SetupError(Exception):
    """What went wrong and what to do about it, in words for the user."""


def say(message: str) -> None:
    """One line of progress; flushed, so that it stays in order with what the tools print."""
    print(f"icom setup: {message}", flush=True)


def call(command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> None:
    """Run a command in the open; it must succeed."""
    words = [str(word) for word in command]
    try:
        code = subprocess.run(words, cwd=ROOT, env=env, check=False).returncode
    except OSError as error:
        raise SetupError(f"cannot run {words[0]}: {error.strerror}") from None
    if code:
        raise SetupError(f"this command failed (exit code {code}): {shlex.join(words)}")


def ask(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Run a command for its output; exit code 127 when it cannot be started."""
    words = [str(word) for word in command]
    try:
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError as error:
        return subprocess.CompletedProcess(words, 127, "", str(error))


def last_lines(text: str, count: int = 3) -> str:
    """The end of a tool's error output, where the reason stands."""
    return "\n".join(text.strip().splitlines()[-count:])


def reason(error: Exception) -> str:
    """A network error in a few words."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__


def download(url: str) -> bytes:
    """The bytes at `url`, all of them or an exception."""
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            body: bytes = response.read()
            return body
    except ValueError as error:  # not a URL
        raise urllib.error.URLError(str(error)) from None

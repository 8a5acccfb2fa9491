"""Files that lie elsewhere (in S3, behind a web address, made by a command): asked for their size, listed, fetched."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from functools import cache
from typing import IO, Any, TypeVar

from icom.data.metadata import EXTRA
from icom.errors import IcomError, UsageError

PIPE = "pipe:"
SCHEMES = ("s3", "https", "http")
_ATTEMPTS = 3
_PAUSE = 2.0
"""Seconds before a second attempt; the third waits twice as long."""
_PATIENCE = 60.0
"""Seconds without a byte before an attempt counts as failed."""
_PART = 1 << 20


@dataclass(frozen=True)
class Found:
    """What is known of a file. `stamp` is its ETag (or the time of its last change), where the other side says one."""

    place: str
    size: int | None
    stamp: str | None


def is_remote(place: str) -> bool:
    """Whether this is no path.

    Raises:
        UsageError: it is an address of a kind that cannot be read.
    """
    if place.startswith(PIPE):
        return True
    scheme, found, _ = place.partition("://")
    if not found or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        return False
    if scheme not in SCHEMES:
        raise UsageError(
            f"{place}: {scheme}:// cannot be read, only {', '.join(f'{known}://' for known in SCHEMES)} and "
            "pipe:COMMAND, whose output is the shard."
        )
    return True


class _BrokeOff(IcomError):
    """The other side or the network is at fault, perhaps for a moment."""


def look(place: str) -> Found:
    """Size and stamp of a file.

    Raises:
        IcomError: it is missing or cannot be reached.
    """
    return _attempted(lambda: _look(place))


def fetch(place: str, file: IO[bytes]) -> Found:
    """Write all of a file.

    Args:
        place: an address or pipe:COMMAND.
        file: empty.

    Raises:
        IcomError: it is missing, cannot be reached, or ended early.
        OSError: `file` cannot be written.
    """

    def anew() -> Found:
        file.seek(0)
        file.truncate()
        return _run(place, file) if place.startswith(PIPE) else _fetch(place, file)

    return _attempted(anew)


T = TypeVar("T")


def _attempted(do: Callable[[], T]) -> T:
    for attempt in range(1, _ATTEMPTS):
        try:
            return do()
        except _BrokeOff:
            time.sleep(_PAUSE * attempt)
    return do()


def _look(place: str) -> Found:
    if place.startswith("s3://"):
        with _explained(place):
            answer = _s3().head_object(**_bucket_and_key(place))
            return Found(place, answer["ContentLength"], answer["ETag"])
    with _request(place, "HEAD") as answer:
        return _of_headers(place, answer.headers)


def _fetch(place: str, file: IO[bytes]) -> Found:
    if place.startswith("s3://"):
        with _explained(place):
            answer = _s3().get_object(**_bucket_and_key(place))
            for part in answer["Body"].iter_chunks(_PART):  # raises where less comes than was promised
                file.write(part)
            return Found(place, answer["ContentLength"], answer["ETag"])
    with _request(place, "GET") as answer:
        found = _of_headers(place, answer.headers)
        written = 0
        while part := _read(place, answer):
            file.write(part)
            written += len(part)
    if found.size not in (None, written):
        raise _BrokeOff(f"{place} ended after {written:,} of {found.size:,} bytes.")
    return Found(place, written, found.stamp)


def list_s3(pattern: str, root: str) -> list[Found]:
    """What matches a pattern with stars, in order of name.

    Args:
        pattern: s3://bucket/…; `*` stands for anything but a slash, `**` for anything.
        root: what comes before its first star, up to a slash.

    Raises:
        IcomError: nothing matches, or the bucket cannot be listed.
    """
    matches = re.compile(_regular(pattern))
    target = _bucket_and_key(root)
    found = []
    with _explained(root):
        pages = _s3().get_paginator("list_objects_v2").paginate(Bucket=target["Bucket"], Prefix=target["Key"])
        for page in pages:
            for item in page.get("Contents", ()):
                place = f"s3://{target['Bucket']}/{item['Key']}"
                if matches.fullmatch(place):
                    found.append(Found(place, item["Size"], item["ETag"]))
    if not found:
        raise IcomError(f"Nothing in S3 matches {pattern} (--train_data_dir).")
    return sorted(found, key=lambda one: one.place)


def _regular(pattern: str) -> str:
    """A pattern of a shell's as a regular expression."""
    signs = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*|\*|\?|\[[^\]]+\])", pattern)
    return "".join(signs.get(part) or (part if part[:1] == "[" else re.escape(part)) for part in parts)


def _run(place: str, file: IO[bytes]) -> Found:
    """The output of a command of the shell's."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            place.removeprefix(PIPE), shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        )
        assert process.stdout
        size = 0
        with process:
            while part := process.stdout.read(_PART):
                file.write(part)
                size += len(part)
        if process.returncode:
            errors.seek(0)
            said = errors.read()[-400:].decode(errors="replace").strip()
            raise IcomError(f"The command of {place} ended with code {process.returncode}: {said or 'it says nothing'}")
    return Found(place, size, None)


@cache
def _s3() -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise IcomError(f"Reading s3:// needs boto3, which comes with the extra `data`: {EXTRA}.") from None
    return boto3.session.Session().client("s3", config=Config(retries={"mode": "standard"}, max_pool_connections=32))


def _bucket_and_key(place: str) -> dict[str, str]:
    bucket, _, key = place.removeprefix("s3://").partition("/")
    if not bucket:
        raise UsageError(f"{place} names no bucket: s3://BUCKET/KEY.")
    return {"Bucket": bucket, "Key": key}


@contextmanager
def _explained(place: str) -> Iterator[None]:
    """What S3 refuses, in the user's terms."""
    try:
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            HTTPClientError,
            NoCredentialsError,
            PartialCredentialsError,
        )
    except ImportError:
        _s3()  # says what to install
        raise
    try:
        yield
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise IcomError(
            f"No credentials for {place}. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, run "
            "`aws configure`, or give the machine a role; what is public can be read by its https:// address."
        ) from error
    except ClientError as error:
        answer = error.response.get("Error", {})
        raise IcomError(
            f"S3 refuses {place}: {answer.get('Code', '')} {answer.get('Message', '')} Is it there, and yours to read?"
        ) from error
    except (BotoCoreError, HTTPClientError) as error:
        raise _BrokeOff(f"S3 cannot be reached for {place}: {error}.") from error


@contextmanager
def _request(place: str, method: str) -> Iterator[Any]:
    """An answer of a web server."""
    try:
        answer = urllib.request.urlopen(urllib.request.Request(place, method=method), timeout=_PATIENCE)
    except urllib.error.HTTPError as error:
        error.close()
        kind = _BrokeOff if error.code >= 500 else IcomError
        raise kind(f"{place}: the server answers {error.code} {error.reason}.") from error
    except OSError as error:  # URLError is one
        raise _BrokeOff(f"{place} cannot be reached: {getattr(error, 'reason', error)}.") from error
    with answer:
        yield answer


def _read(place: str, answer: Any) -> bytes:
    import http.client

    try:
        return bytes(answer.read(_PART))
    except (OSError, http.client.HTTPException) as error:
        raise _BrokeOff(f"{place} broke off: {error}.") from error


def _of_headers(place: str, headers: Message) -> Found:
    size = headers["Content-Length"]
    return Found(place, int(size) if size else None, headers["ETag"] or headers["Last-Modified"])

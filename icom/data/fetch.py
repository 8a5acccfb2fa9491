"""One picture of a stranger's web server: fetched within limits, and seen to be a picture."""

from __future__ import annotations

import io
import ipaddress
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from icom import __version__
from icom.config.shards import DownloadConfig
from icom.data.images import BadPicture, NotAPicture, decode_picture
from icom.data.metadata import EXTRA
from icom.errors import IcomError

try:
    import urllib3
    from urllib3.connection import HTTPConnection, HTTPSConnection
    from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
    from urllib3.exceptions import (
        HTTPError,
        MaxRetryError,
        NameResolutionError,
        NewConnectionError,
        ResponseError,
        SSLError,
        TimeoutError,
    )
except ImportError as error:
    raise IcomError(f"Downloading needs {error.name}, which comes with the extra `data`: {EXTRA}.") from None

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

_REDIRECTS = 5
_PAUSE = 1.0
"""Seconds before a second attempt; each further one waits twice as long."""
_PART = 1 << 16
_BUSY = {429, 500, 502, 503, 504}
"""What servers answer that may do better in a moment."""
_OPTED_OUT = {"noai", "noimageai", "noindex", "noimageindex"}
"""Directives of X-Robots-Tag by which a site says that its pictures are not for collections."""
_FORMATS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "AVIF": "avif", "BMP": "bmp"}
"""What the web's pictures are, and the endings of their names. Pillow's other decoders (EPS starts a program) stay
away from what strangers send."""


@dataclass(frozen=True)
class Fetched:
    """A picture as it came.

    Attributes:
        content: of its file.
        ending: of its name, without the dot.
        size: (width, height) in pixels, upright.
    """

    content: bytes
    ending: str
    size: tuple[int, int]


class Failed(Exception):
    """There is no picture; the reason is one of few, so that they can be counted.

    Attributes:
        reason: for the table.
        passing: whether it may go better in a moment.
    """

    def __init__(self, reason: str, *, passing: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.passing = reason, passing


class Fetcher:
    """Fetches pictures; several threads may do so at a time."""

    def __init__(self, config: DownloadConfig) -> None:
        from PIL import Image

        Image.init()
        self._formats = [kind for kind in _FORMATS if kind in Image.OPEN]  # MPO is opened as JPEG
        self._config = config
        self.stopping = threading.Event()
        """Once it is set, nothing new is begun."""
        self._manager = urllib3.PoolManager(
            num_pools=4 * config.threads,
            maxsize=config.threads,
            headers={"User-Agent": config.user_agent or f"icom/{__version__}", "Accept": "image/*,*/*;q=0.5"},
        )
        if not config.allow_private_addresses:
            self._manager.pool_classes_by_scheme = {"http": _PublicHTTP, "https": _PublicHTTPS}

    def close(self) -> None:
        """Let the connections go."""
        self._manager.clear()

    def __call__(self, url: object) -> Fetched:
        """One picture.

        Raises:
            Failed: with the reason.
        """
        if not isinstance(url, str) or not url.lower().startswith(("http://", "https://")):
            raise Failed("no http:// or https:// address")
        for attempt in range(self._config.retries):
            try:
                return self._attempt(url)
            except Failed as error:
                if not error.passing:
                    raise
            self.stopping.wait(_PAUSE * 2**attempt)
        return self._attempt(url)

    def _attempt(self, url: str) -> Fetched:
        if self.stopping.is_set():
            raise Failed("stopped")
        try:
            content = self._content(url)
        except MaxRetryError as error:
            raise _why(error.reason) from error
        except (HTTPError, OSError, ValueError, _Private) as error:
            raise _why(error) from error
        return self._picture(content)

    def _content(self, url: str) -> bytes:
        """Of the file.

        Raises:
            Failed: the server's answer is none, or too large, or takes too long.
            HTTPError, OSError, ValueError, _Private: no answer.
        """
        deadline = time.monotonic() + self._config.timeout
        response = self._manager.request(
            "GET",
            url,
            preload_content=False,
            timeout=urllib3.Timeout(connect=self._config.timeout, read=self._config.timeout),
            retries=urllib3.Retry(total=None, connect=0, read=0, status=0, other=0, redirect=_REDIRECTS),
        )
        try:
            if response.status != 200:
                raise Failed(f"HTTP {response.status}", passing=response.status in _BUSY)
            if _OPTED_OUT & _directives(response):
                raise Failed("the site says noai or noindex (X-Robots-Tag)")
            most = self._config.max_picture_mb * 1e6
            content = bytearray()
            while part := response.read1(_PART):  # what has come, however little
                content += part
                if len(content) > most:
                    raise Failed(f"more than {self._config.max_picture_mb:g} MB")
                if time.monotonic() > deadline:
                    raise Failed("not in time", passing=True)
        except BaseException:
            response.close()  # the rest is not wanted
            raise
        response.release_conn()
        return bytes(content)

    def _picture(self, content: bytes) -> Fetched:
        """See that the whole file decodes.

        Raises:
            Failed: it does not.
        """
        from PIL import Image

        try:
            size = decode_picture(io.BytesIO(content), "", self._formats).size
            with Image.open(io.BytesIO(content), formats=self._formats) as image:
                return Fetched(content, _FORMATS[str(image.format)], size)
        except NotAPicture as error:
            raise Failed(f"not a picture of the web ({', '.join(self._formats)})") from error
        except BadPicture as error:
            raise Failed("a damaged picture, or one of too many pixels") from error


def _directives(response: BaseHTTPResponse) -> set[str]:
    """Of X-Robots-Tag, also those for one kind of robot (`otherbot: noindex`)."""
    said = ",".join(response.headers.getlist("X-Robots-Tag"))
    return {directive.rpartition(":")[2].strip().lower() for directive in said.split(",")}


def is_public(address: str) -> bool:
    """Whether an IP address, in numbers, is on the internet."""
    read = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(read, ipaddress.IPv6Address):
        read = read.ipv4_mapped or read.sixtofour or read
    return read.is_global and not read.is_multicast


class _Private(Exception):
    """The address is not on the internet."""


def _refuse_private(connected: socket.socket) -> socket.socket:
    """Look at whom one is connected to, which no name, redirect or second answer of a name server can get around.

    Raises:
        _Private: it is not the internet; nothing was sent.
    """
    if not is_public(connected.getpeername()[0]):
        connected.close()
        raise _Private
    return connected


class _PublicConnection(HTTPConnection):
    def _new_conn(self) -> socket.socket:
        return _refuse_private(super()._new_conn())


class _PublicSecureConnection(HTTPSConnection):
    def _new_conn(self) -> socket.socket:
        return _refuse_private(super()._new_conn())


class _PublicHTTP(HTTPConnectionPool):
    ConnectionCls = _PublicConnection


class _PublicHTTPS(HTTPSConnectionPool):
    ConnectionCls = _PublicSecureConnection


def _why(error: BaseException | None) -> Failed:
    """The kind of failure that an exception means."""
    for kind, reason, passing in _REASONS:
        if isinstance(error, kind):
            return Failed(reason, passing=passing)
    return Failed("the connection broke off", passing=True)


_REASONS: tuple[tuple[type[Exception], str, bool], ...] = (
    (_Private, "a private address (--allow_private_addresses)", False),
    (NameResolutionError, "no such host", False),
    (NewConnectionError, "no connection", True),
    (TimeoutError, "not in time", True),
    (SSLError, "TLS: certificate or protocol", False),
    (ResponseError, f"more than {_REDIRECTS} redirects", False),
    (ValueError, "no http:// or https:// address", False),  # also where a redirect leads to
)
"""What is thrown, what is counted, and whether it may go better in a moment; the first that fits."""

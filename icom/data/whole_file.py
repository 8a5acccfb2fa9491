"""A file that has its name once it is whole, and the digest of what was written."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from icom.errors import IcomError
from icom.files import sync_folder
from icom.training.lock import locked


class DigestingFile(io.RawIOBase):
    """Passes on what is written, in order, and keeps its SHA-256."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: BinaryIO | None = file
        self._digest, self.size = hashlib.sha256(), 0

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, content: Any) -> int:
        """More bytes."""
        if self._file:
            self._file.write(content)
        self._digest.update(content)
        length = memoryview(content).nbytes
        self.size += length
        return length

    def tell(self) -> int:
        """Bytes up to now."""
        return self.size

    def give_up(self) -> None:
        """Pass nothing on any more: libraries write what they still hold when they are let go."""
        self._file = None

    def hexdigest(self) -> str:
        """SHA-256 of all of them."""
        return self._digest.hexdigest()


@contextmanager
def whole_file(path: Path) -> Iterator[DigestingFile]:
    """A file that has its name once all is written and synced; before, `.NAME.part`, which the next attempt takes over.

    Raises:
        IcomError: another process is writing it.
        OSError: the disk is full, or the folder not writable.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        descriptor = locked(temporary)
    except BlockingIOError:
        raise IcomError(f"Another process is writing {path}. Give each its own --part, or wait for it.") from None
    except OSError:  # a file system without locks; what is wrong with the folder itself is wrong here, too
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        digesting = DigestingFile(file)
        try:
            file.truncate(0)
            yield digesting
            file.flush()
            os.fsync(descriptor)
            temporary.replace(path)
            sync_folder(path.parent)
        except BaseException:
            digesting.give_up()
            with suppress(OSError):
                temporary.unlink()
            raise


def write_whole(path: Path, content: bytes) -> None:
    """Write a `whole_file`. Of a process that is killed meanwhile nothing stays once the next has written it, which
    `icom.files.write_atomically` cannot say: its temporary names are new ones each time.

    Raises:
        IcomError, OSError: as there.
    """
    with whole_file(path) as file:
        file.write(content)

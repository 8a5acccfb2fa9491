"""WebDataset's tars, written: the same content gives the same bytes, whoever writes it and when."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager


class TarOfSamples:
    """Members go in one after another; those of a sample together."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar

    def add(self, name: str, content: bytes) -> None:
        """A member."""
        member = tarfile.TarInfo(name)  # no owner, no time
        member.size = len(content)
        self._tar.addfile(member, io.BytesIO(content))


@contextmanager
def tar_of_samples(file: io.RawIOBase) -> Iterator[TarOfSamples]:
    """A tar in an open file; its end is written where all went well."""
    tar = tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT)  # noqa: SIM115
    yield TarOfSamples(tar)
    tar.close()

"""A shard of precomputed latents: how one is written and read, as parquet or as a tar of safetensors.

Parquet: a row per picture, each a row group of its own, so that one is read without its neighbours; `states`, and
`mean_R` and `std_R` for each resolution R, are the numbers' bytes (little-endian, row-major, in the shapes and dtype
that the file's metadata `icom` has as JSON); pages carry checksums. Tar: a member NUMBER.safetensors per picture with
tensors of the same names, and the rest as JSON in its metadata `icom`. Both kinds are opened by other tools.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from icom.data.records import Crops, DamagedRecord, Record
from icom.errors import IcomError

if TYPE_CHECKING:
    import pyarrow

METADATA = "icom"
"""The key of what is said in files' metadata."""


@dataclass(frozen=True)
class Kept:
    """What a shard keeps of a picture.

    Attributes:
        number: of the record in the source.
        key, caption: of the record.
        size: (width, height) of the picture in pixels.
        places: resolution -> (top, left) of each crop in the resized picture.
        tensors: name -> numbers in the dtype that is kept: `states` (tokens, width), and for each resolution R `mean_R`
            and `std_R` (crops, mirrors, channels, R / 8, R / 8).
    """

    number: int
    key: str
    caption: str
    size: tuple[int, int]
    places: Mapping[int, Sequence[tuple[int, int]]]
    tensors: Mapping[str, torch.Tensor]


class Writer(Protocol):
    """Writes a shard into an open file."""

    def add(self, kept: Sequence[Kept]) -> None:
        """More pictures."""

    def finish(self) -> list[tuple[int, int]] | None:
        """Write what comes at the end; returns (offset, bytes) of each picture, where reading needs that."""


class Reader(Protocol):
    """A shard, open for reading; for one thread."""

    def read(self, row: int, resolution: int) -> Record:
        """A picture's crops at one resolution.

        Raises:
            DamagedRecord: what is there is not what was written.
            OSError: it cannot be read.
        """

    def close(self) -> None:
        """Let the file go."""


# Parquet.


class ParquetWriter:
    """See `Writer`."""

    def __init__(self, file: io.RawIOBase, made: str, resolutions: Sequence[int]) -> None:
        """Args: where to write to; the JSON that says what made it; resolutions of all pictures."""
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter

        place = pa.list_(pa.struct([("top", pa.int32()), ("left", pa.int32())]))
        columns = [("number", pa.int64()), ("key", pa.string()), ("caption", pa.string())]
        columns += [("width", pa.int32()), ("height", pa.int32()), ("states", pa.binary())]
        for side in resolutions:
            columns += [(f"crops_{side}", place), (f"mean_{side}", pa.binary()), (f"std_{side}", pa.binary())]
        self._schema = pa.schema(columns, metadata={METADATA: made})
        # Noise does not compress, and nobody searches in it.
        self._writer = ParquetWriter(
            file,
            self._schema,
            compression="NONE",
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
        )

    def add(self, kept: Sequence[Kept]) -> None:
        """More pictures."""
        import pyarrow as pa

        rows = []
        for one in kept:
            row: dict[str, Any] = {"number": one.number, "key": one.key, "caption": one.caption}
            row |= {"width": one.size[0], "height": one.size[1]}
            row |= {
                f"crops_{side}": [{"top": top, "left": left} for top, left in at] for side, at in one.places.items()
            }
            row |= {name: _bytes(tensor) for name, tensor in one.tensors.items()}
            rows.append(row)
        if rows:
            self._writer.write_table(pa.Table.from_pylist(rows, self._schema), row_group_size=1)

    def finish(self) -> None:
        """Write the footer."""
        self._writer.close()


class ParquetReader:
    """See `Reader`."""

    def __init__(self, path: Path, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> None:
        """Open a shard.

        Args:
            path: of the file.
            shapes: name -> shape of its tensors.
            dtype: of them.

        Raises:
            IcomError: a column is missing, or it is no parquet file.
        """
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile

        self._path, self._shapes, self._dtype = path, shapes, dtype
        try:
            self._file = ParquetFile(path, memory_map=True, page_checksum_verification=True)
        except pa.ArrowInvalid as error:
            raise IcomError(f"{path} is damaged ({str(error).splitlines()[0]}). {MAKE_AGAIN}") from error
        crops = {name.replace("mean", "crops") for name in shapes if name.startswith("mean")}
        needed = {"key", "caption", "width", "height", *shapes, *crops}
        lacking = sorted(needed - set(self._file.schema_arrow.names))
        if lacking:
            self._file.close()
            raise IcomError(
                f"{path} has no column {', '.join(lacking)} (it has {', '.join(self._file.schema_arrow.names)}). "
                f"{MAKE_AGAIN}"
            )

    def read(self, row: int, resolution: int) -> Record:
        """A picture's crops at one resolution."""
        names = ["states", f"mean_{resolution}", f"std_{resolution}"]
        columns = ["key", "caption", "width", "height", f"crops_{resolution}", *names]
        try:
            table = self._file.read_row_group(row, columns=columns, use_threads=False)
        except OSError as error:
            if error.errno is not None:
                raise
            raise DamagedRecord(f"{self._path.name}, row {row}", "altered since it was written") from error
        key, caption = table["key"][0].as_py(), table["caption"][0].as_py()
        tensors = {name: self._tensor(name, table[name][0].as_buffer()) for name in names}
        places = [(place["top"], place["left"]) for place in table[f"crops_{resolution}"][0].as_py()]
        size = table["width"][0].as_py(), table["height"][0].as_py()
        return _record(key, caption, size, places, tensors, resolution)

    def _tensor(self, name: str, content: pyarrow.Buffer) -> torch.Tensor:
        return torch.frombuffer(bytearray(content), dtype=self._dtype).view(*self._shapes[name])

    def close(self) -> None:
        """Let the file go."""
        self._file.close()


# Tars.


class TarWriter:
    """See `Writer`."""

    def __init__(self, file: io.RawIOBase) -> None:
        self._tar = tarfile.open(fileobj=file, mode="w|", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        self._places: list[tuple[int, int]] = []

    def add(self, kept: Sequence[Kept]) -> None:
        """More pictures."""
        for one in kept:
            said = {
                "key": one.key,
                "caption": one.caption,
                "size": one.size,
                "crops": {str(side): list(places) for side, places in one.places.items()},
                "crc32": {name: zlib.crc32(_bytes(tensor)) for name, tensor in one.tensors.items()},
            }
            content = save(dict(one.tensors), metadata={METADATA: json.dumps(said)})
            member = tarfile.TarInfo(f"{one.number:09d}.safetensors")
            member.size = len(content)
            self._places.append((self._tar.offset + tarfile.BLOCKSIZE, len(content)))
            self._tar.addfile(member, io.BytesIO(content))

    def finish(self) -> list[tuple[int, int]]:
        """Write the end."""
        self._tar.close()
        return self._places


class TarReader:
    """See `Reader`."""

    def __init__(self, path: Path, places: Sequence[tuple[int, int]]) -> None:
        """Args: the file; (offset, bytes) of each picture."""
        self._path, self._places = path, places
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._let_go = weakref.finalize(self, os.close, self._descriptor)

    def read(self, row: int, resolution: int) -> Record:
        """A picture's crops at one resolution."""
        offset, length = self._places[row]
        content = os.pread(self._descriptor, length, offset)
        try:
            tensors = load(content)
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            said = json.loads(header["__metadata__"][METADATA])
            for name in ("states", f"mean_{resolution}", f"std_{resolution}"):
                if zlib.crc32(_bytes(tensors[name])) != said["crc32"][name]:
                    raise ValueError(name)
            places = [(top, left) for top, left in said["crops"][str(resolution)]]
            key, caption, (width, height) = said["key"], said["caption"], said["size"]
            return _record(key, caption, (width, height), places, tensors, resolution)
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise DamagedRecord(f"{self._path.name}, row {row}", "altered since it was written") from error

    def close(self) -> None:
        """Let the file go."""
        self._let_go()


# Both.

MAKE_AGAIN = "Delete it and give the command of `icom data precompute` again: that makes what is missing."


def _bytes(tensor: torch.Tensor) -> bytes:
    return np.ascontiguousarray(tensor.numpy()).tobytes()


def _record(
    key: str,
    caption: str,
    size: tuple[int, int],
    places: Sequence[tuple[int, int]],
    tensors: Mapping[str, torch.Tensor],
    resolution: int,
) -> Record:
    mean, std = tensors[f"mean_{resolution}"].float(), tensors[f"std_{resolution}"].float()
    return Record(key, caption, latents=Crops(mean, std, tensors["states"], tuple(places), size))

"""Files that are whole or absent: written under a temporary name, synced, renamed."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from icom.errors import IcomError

if TYPE_CHECKING:
    import torch


def write_atomically(path: Path, content: bytes, option: str = "--output_dir", mode: int = 0o644) -> None:
    """Write a file so that a reader (or a crash at any moment) sees the old content or the new one, never a mixture.

    Args:
        path: the file.
        content: all of it.
        option: what the user chose the folder with.
        mode: who may do what with it.

    Raises:
        IcomError: the disk is full or the folder is not writable; the old file is untouched.
    """
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(mode)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise write_error(path, error, option) from error


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(one: Path, other: Path) -> bool:
    """Swap what two names stand for, in one step that nothing can interrupt.

    Returns:
        False where the system cannot: nothing has changed then. Linux can on local disks, seldom on network ones.
    """
    at_working_folder, rename_exchange = -100, 2
    try:
        rename = ctypes.CDLL(None).renameat2  # not in Python's os
    except (AttributeError, OSError):
        return False
    return bool(
        rename(at_working_folder, os.fsencode(one), at_working_folder, os.fsencode(other), rename_exchange) == 0
    )


ASIDE = ".old"
"""Ends the name of a folder whose successor is about to take its place."""


def put_in_place(new: Path, target: Path) -> None:
    """Give a folder its name, so that what has the name is whole at every moment (but for a crash between two renames
    where the system cannot exchange names: `.NAME.old` is the old one then).

    If there is one of that name already, it is `new` afterwards.
    """
    sync_folder(new)
    if not target.exists():
        new.rename(target)
    elif not exchange(new, target):
        aside = target.with_name(f".{target.name}{ASIDE}")
        target.rename(aside)
        new.rename(target)
        aside.rename(new)
    sync_folder(target.parent)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file and sync it; the same tensors give the same bytes, in whatever order they come.

    Raises:
        OSError: the disk is full, or the folder not writable.
    """
    in_order = dict(sorted(tensors.items()))
    write_tensors_in_turn(path, in_order, in_order.items())


def write_tensors_in_turn(
    path: Path,
    like: Mapping[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: dict[str, str] | None = None,
) -> None:
    """Write a safetensors file and sync it; only one tensor has to be in the memory at a time.

    safetensors' own writer needs all of them, contiguous: it would copy every convolution that lies channels-last.
    The format (github.com/huggingface/safetensors): 8 bytes with the length of the header, JSON, the numbers.

    Args:
        path: the file.
        like: name -> a tensor with the shape and dtype of each.
        tensors: (name, tensor), in the order of `like`.
        metadata: for the header.

    Raises:
        OSError: the disk is full, or the folder not writable.
    """
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in like.items():
        begin, end = end, end + tensor.dtype.itemsize * math.prod(tensor.shape)
        dtype = _DTYPES[str(tensor.dtype)]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    words = json.dumps(header, separators=(",", ":")).encode()
    words += b" " * (-len(words) % 8)  # the numbers begin at a multiple of 8
    with path.open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        for (name, tensor), (expected, described) in zip(tensors, like.items(), strict=True):
            assert (name, tensor.dtype) == (expected, described.dtype)
            file.write(tensor.detach().cpu().contiguous().numpy().data)
        assert file.tell() == 8 + len(words) + end
        file.flush()
        os.fsync(file.fileno())


_DTYPES = {"torch.float32": "F32", "torch.float64": "F64", "torch.int64": "I64"}
"""torch's name -> safetensors', of what trainings keep."""


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def is_full(error: OSError) -> bool:
    """Whether the disk, or the user's quota on it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_error(path: Path, error: OSError, option: str = "--output_dir") -> IcomError:
    """Say in the user's terms why `path` could not be written."""
    if is_full(error):
        try:
            free = f"{shutil.disk_usage(path.parent).free / 2**20:.1f} MB free"
        except OSError:
            free = "nothing free"
        return IcomError(
            f"The disk is full ({free}): cannot write {path}. What was saved before is intact. Free some space or "
            f"choose another {option}."
        )
    in_the_way = next((place for place in (path, *path.parents) if place.is_file()), None)
    if isinstance(error, FileExistsError | NotADirectoryError) and in_the_way:
        return IcomError(f"Cannot write {path}: {in_the_way} is a file, no folder. Choose another {option}.")
    return IcomError(f"Cannot write {path}: {error.strerror or error}. Choose another {option}.")


def make_writable_folder(folder: Path, option: str = "--output_dir") -> None:
    """Create the folder and prove that files can be written there.

    Args:
        folder: that is wanted.
        option: what the user chose it with.

    Raises:
        IcomError: it cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise write_error(folder, error, option) from error


def cache_folder(configured: str | None) -> Path:
    """Where latents are kept: as configured, else $ICOM_CACHE_DIR, $XDG_CACHE_HOME/icom, ~/.cache/icom."""
    if configured:
        return Path(configured).expanduser()
    if own := os.environ.get("ICOM_CACHE_DIR"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "icom"

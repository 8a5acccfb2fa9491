"""Files to all nodes of a cluster and back: tar through OpenSSH, each folder once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from icom.launch import digests
from provisioning.script import script
from provisioning.transport import Transport

COMPLETE = ".complete"
"""The last file of an upload to arrive: without it the upload is sent again."""


@dataclass(frozen=True)
class Upload:
    """Files that all nodes get, in a folder whose name says what is in it.

    Attributes:
        what: for the user.
        root: the folder here.
        files: below it.
        name: of the folder in ~/pushed on the nodes.
    """

    what: str
    root: Path
    files: tuple[Path, ...]
    name: str


def upload_of(what: str, root: Path, files: Sequence[Path]) -> Upload:
    """Read the files once, for their digest.

    Raises:
        IcomError: a file cannot be read.
    """
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", root.resolve().name).lstrip("-.")
    return Upload(what, root, tuple(files), f"{readable or 'folder'}-{digests.of_files(root, files)[:16]}")


def upload(master: Transport, uploads: Sequence[Upload], say: Callable[[str], None]) -> None:
    """Bring uploads to the master, and from there to all workers; what is there already does not travel again.

    Raises:
        IcomError: a file cannot be read, or did not arrive.
    """
    names = [some.name for some in uploads]
    asked = master.run(script("pushed", "lacking", *names), doing="Looking for what it has").split()
    files: dict[str, bytes | Path] = {}
    for some in (some for some in uploads if some.name in asked):
        size = sum(file.stat().st_size for file in some.files)
        count = "1 file" if len(some.files) == 1 else f"{len(some.files)} files"
        say(f"sending {some.what} ({count}, {size / 1e6:.1f} MB)")
        folder = f"pushed/{some.name}"
        files |= {f"{folder}/{file.relative_to(some.root).as_posix()}": file for file in sorted(some.files)}
        files[f"{folder}/{COMPLETE}"] = b""
    if files:
        master.send(files)
    master.run(script("pushed", "to_workers", *names), doing="Bringing files to the workers")

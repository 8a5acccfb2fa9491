"""What a folder of shards was made from, so that no other work mixes its own with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from icom.errors import IcomError
from icom.files import make_writable_folder, write_atomically

DOWNLOADED, REORGANISED = "icom-download.json", "icom-reorganise.json"
"""Files that say what folders of `icom data download` and `icom data reorganise` were made from."""


def claim(output: Path, name: str, about: Mapping[str, Any]) -> None:
    """Take a folder for shards that are made from something; it may hold some of them already.

    Args:
        output: the folder; it is made where it is missing.
        name: of the file in it that says so.
        about: what decides their content, as JSON has it.

    Raises:
        IcomError: it is made from something else, or cannot be written.
    """
    make_writable_folder(output)
    path = output / name
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        others = [name for name in about if before.get(name) != about[name]]
    except FileNotFoundError:
        write_atomically(path, json.dumps(about).encode())
        return
    except (OSError, ValueError, AttributeError) as error:
        raise IcomError(f"Cannot read {path}: {error}. Choose another --output_dir, or remove that one.") from error
    if others:
        raise IcomError(
            f"{output} has tars that were made from something else: {', '.join(others)} differs. Choose another "
            "--output_dir, or remove that one."
        )

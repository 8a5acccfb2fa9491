"""The project's own files, as they travel to the nodes, and the digest that names an image that holds them."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

from icom.errors import UsageError

ROOT = Path(__file__).parent.parent
NEEDED = (
    *("Makefile", "README.md", "pyproject.toml", "constraints.txt", "environment.yml", "hosts.example"),
    *("LICENSE", "NOTICE", "textual_inversion_icom.py", "finetune_icom.py"),
    *("accelerate_configs", "icom", "provisioning"),
)
"""What a node needs to be set up and to train. Nothing else goes: a checkout may hold pictures and keys."""


def project_files(root: Path = ROOT) -> list[Path]:
    """The files below NEEDED, relative to `root`, sorted.

    Raises:
        UsageError: icom was not installed from a clone, so that there is nothing to set nodes up with.
    """
    if missing := [name for name in NEEDED if not (root / name).exists()]:
        raise UsageError(
            f"The nodes are set up from icom's repository, and {root} is none: it has no {missing[0]}. Install icom "
            "from a clone (make setup-master EXTRAS=aws), or give --no_setup."
        )
    places = [root / name for name in NEEDED]
    found = [path for place in places for path in ([place] if place.is_file() else place.rglob("*"))]
    return sorted(
        path.relative_to(root)
        for path in found
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    )


def digest(root: Path = ROOT) -> str:
    """32 hexadecimal digits that change when the path, the mode or a byte of any file does."""
    total = hashlib.sha256()
    for path in project_files(root):
        content = hashlib.sha256((root / path).read_bytes()).hexdigest()
        total.update(f"{path.as_posix()}\0{_mode(root / path):o}\0{content}\n".encode())
    return total.hexdigest()[:32]


def archive(root: Path = ROOT) -> bytes:
    """The files as a .tar.gz."""
    packed = io.BytesIO()
    # Not --best: most of it is weights, which do not shrink.
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1, format=tarfile.PAX_FORMAT) as tar:
        for path in project_files(root):
            content = (root / path).read_bytes()
            entry = tarfile.TarInfo(path.as_posix())
            entry.size, entry.mode = len(content), _mode(root / path)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def _mode(path: Path) -> int:
    return 0o755 if path.stat().st_mode & 0o100 else 0o644

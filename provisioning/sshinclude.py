"""One line in the user's ~/.ssh/config by which `ssh icom-NAME`, and whatever else uses ssh, finds all clusters."""

from __future__ import annotations

import glob
import os
import pwd
import shutil
import sys
import tempfile
from pathlib import Path

from provisioning.folder import SSH_CONFIGS, clusters_folder


def add_include() -> None:
    """Make the line the first of ~/.ssh/config, before any Host, unless it stands there already.

    A config that cannot be written is told on stderr and changes nothing else: `icom ssh` does without.
    """
    path = _config()
    if path is None:
        return
    try:
        before = path.read_bytes() if path.exists() else b""
        if _line() not in before.splitlines(keepends=True):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _write(path, _line() + before)
    except OSError as error:
        _warn(f"cannot write {path} ({error.strerror}), so that `ssh icom-NAME` does not work. `icom ssh` does.")


def remove_include_if_unused() -> None:
    """Take the line away once no cluster has an ssh config here; all else stays as it was, byte for byte.

    A config that cannot be written is told on stderr: the line finds nothing, and does no harm.
    """
    path = _config()
    if path is None or any(clusters_folder().glob(SSH_CONFIGS)):
        return
    try:
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if _line() not in lines:
            return
        rest = b"".join(line for line in lines if line != _line())
        if rest or path.is_symlink():
            _write(path, rest)
        else:
            path.unlink()
    except OSError as error:
        _warn(f"cannot write {path} ({error.strerror}). Its first line, an Include of {_pattern()}, can go.")


def _pattern() -> str:
    return f"{glob.escape(str(clusters_folder()))}/{SSH_CONFIGS}"


def _line() -> bytes:
    return f'Include "{_pattern()}"\n'.encode()


def _config() -> Path | None:
    """The file that ssh reads; None where $HOME, and so all that is icom's, is somebody else's (sudo)."""
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)  # ssh does not look at $HOME
    if home.resolve() != Path.home().resolve():
        _warn(f"$HOME is {Path.home()}, but ssh looks in {home}: `ssh icom-NAME` will not work. `icom ssh` does.")
        return None
    return home / ".ssh" / "config"


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all; the file's mode and owner stay, and a link goes on leading to it."""
    real = path.resolve()
    descriptor, temporary = tempfile.mkstemp(dir=real.parent, prefix=f".{real.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if real.exists():
            shutil.copymode(real, temporary)
            os.chown(temporary, real.stat().st_uid, real.stat().st_gid)
        Path(temporary).replace(real)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _warn(text: str) -> None:
    print(f"icom: {text}", file=sys.stderr)

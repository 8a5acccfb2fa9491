"""Files to all nodes of a cluster and back: tar through OpenSSH, each folder once."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from icom import names
from icom.errors import IcomError
from icom.files import write_error
from icom.launch import digests
from provisioning.relay import showing
from provisioning.script import Script, script

COMPLETE = ".complete"
"""The last file of an upload to arrive: without it the upload is sent again."""
NO_WAY = 255
"""Exit code of ssh itself, when there is no connection or no longer one."""
TAIL_LINES = 12


@dataclass(frozen=True)
class OpenSsh:
    """The way to a cluster's master."""

    ssh_config: Path
    host: str

    def argv(self, command: str | Script) -> list[str]:
        """The words that run a command in the master's home folder."""
        line = command.line if isinstance(command, Script) else command
        return ["ssh", "-T", "-F", str(self.ssh_config), "--", self.host, line]

    def ask(self, what: str, command: str | Script) -> str:
        """Run a command to its end; what it printed.

        Raises:
            IcomError: it failed, or there is no way to the master; `what` says what it was for.
        """
        done = subprocess.run(
            self.argv(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
        )
        if done.returncode:
            raise IcomError(f"{_failed(self, what, done.returncode)}\n  {_last_lines(done.stderr)}")
        return done.stdout


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


def upload(master: OpenSsh, uploads: Sequence[Upload], say: Callable[[str], None]) -> None:
    """Bring uploads to the master, and from there to all workers; what is there already does not travel again.

    Raises:
        IcomError: a file cannot be read, or did not arrive.
    """
    names = [some.name for some in uploads]
    asked = master.ask("Looking for what it has", script("pushed", "lacking", *names)).split()
    lacking = [some for some in uploads if some.name in asked]
    for some in lacking:
        size = sum(file.stat().st_size for file in some.files)
        files = "1 file" if len(some.files) == 1 else f"{len(some.files)} files"
        say(f"sending {some.what} ({files}, {size / 1e6:.1f} MB)")
    if lacking:
        _send(master, lacking)
    master.ask("Bringing files to the workers", script("pushed", "to_workers", *names))


def _send(master: OpenSsh, uploads: Sequence[Upload]) -> None:
    words, no, pipe = master.argv("tar -xf - -C pushed"), subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=no, stderr=pipe) as process, showing(process, sys.stderr):
        assert process.stdin
        try:
            with process.stdin, tarfile.open(fileobj=process.stdin, mode="w|") as tar:
                for some in uploads:
                    for file in sorted(some.files):
                        entry = tarfile.TarInfo(f"{some.name}/{file.relative_to(some.root).as_posix()}")
                        with file.open("rb") as content:
                            entry.size, entry.mode = file.stat().st_size, 0o644
                            tar.addfile(entry, content)
                    tar.addfile(tarfile.TarInfo(f"{some.name}/{COMPLETE}"))
        except BrokenPipeError:
            pass  # tar or ssh has ended, and says why
        except OSError as error:
            process.kill()
            raise IcomError(f"Cannot send {file}: {error.strerror or error}.") from error
    if process.returncode:
        raise IcomError(_failed(master, "Sending files", process.returncode))


def download(master: OpenSsh, folder: str, name: str, target: Path) -> int:
    """Bring the files of `folder/name` on the master into `target`; each is whole or the old one. How many they are.

    What `target` has besides stays. Links, devices and other things that are no files stay on the master.

    Raises:
        IcomError: the connection broke, a file cannot be written, or one is to go elsewhere than into `target`: tar of
            `folder/name` makes no such names, so the rest is not taken either.
    """
    count = 0
    words = master.argv(shlex.join(["tar", "-C", folder, "-cf", "-", "--", f"./{name}"]))
    no, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(words, stdin=no, stdout=pipe, stderr=pipe) as process, showing(process, sys.stderr):
        assert process.stdout
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
                for entry in tar:
                    if entry.isreg() and not entry.issparse():  # icom writes no others; a sparse one fills the disk
                        _write(target / _below(entry, name, target), tar, entry)
                        count += 1
            process.stdout.close()  # one that goes on sending is not waited for
        except (tarfile.FilterError, names.Malformed) as error:
            process.kill()
            process.wait()
            raise IcomError(f"{master.host} sends what is no file of the run: {error} No more is taken.") from None
        except (tarfile.TarError, EOFError, ValueError) as error:  # the last of a number that is none
            process.kill()
            raise IcomError(f"{_failed(master, 'Fetching the results', process.wait())} {error}") from error
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise IcomError(_failed(master, "Fetching the results", process.returncode))
    return count


def _below(entry: tarfile.TarInfo, name: str, target: Path) -> str:
    """Where in `target` a file of the stream belongs.

    Raises:
        tarfile.FilterError, Malformed: nowhere.
    """
    root, *parts = entry.name.removeprefix("./").split("/")
    if root != name or not parts or any(part in ("", ".", "..") for part in parts):
        raise names.Malformed(f"a file called {names.shown(entry.name)}.")
    path = names.line("/".join(parts)).rstrip("\n")
    tarfile.data_filter(entry.replace(name=path, deep=False), str(target))  # also what leads out by links that are here
    return path


def _write(path: Path, tar: tarfile.TarFile, entry: tarfile.TarInfo) -> None:
    unfinished = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = tar.extractfile(entry)
        assert content
        try:
            with unfinished.open("wb") as file:
                shutil.copyfileobj(content, file)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(path, error) from error


def _failed(master: OpenSsh, what: str, code: int) -> str:
    why = "ssh has no connection" if code == NO_WAY else f"exit code {code}"
    return f"{what} failed on {master.host} ({why})."


def _last_lines(text: str) -> str:
    return "\n  ".join(text.strip().splitlines()[-TAIL_LINES:]) or "(no output)"

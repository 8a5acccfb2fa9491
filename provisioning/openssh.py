"""The way to a node that users have: OpenSSH itself, with the cluster's own config and host keys."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import NoReturn

from icom import names
from icom.errors import IcomError
from icom.files import write_error
from provisioning.relay import showing
from provisioning.script import Script
from provisioning.transport import Running, Transport, start_here

NO_CONNECTION = 255
"""Exit code of ssh itself, when there is no connection or no longer one."""


class OpenSsh(Transport):
    """A node by its name in an ssh config, in which dead connections end by themselves."""

    seconds = math.inf

    def __init__(self, ssh_config: Path, host: str) -> None:
        super().__init__(host)
        self.ssh_config = ssh_config

    def argv(self, command: str | Script) -> list[str]:
        """The words that run a command on the node, with ssh's stdin, stdout and stderr."""
        line = command.line if isinstance(command, Script) else command
        return ["ssh", "-T", "-F", str(self.ssh_config), "--", self.name, line]

    def become(self, program: str, *words: str) -> NoReturn:
        """Go on as ssh or scp, with more words after its options; its exit code is ours."""
        options = {"ssh": [], "scp": ["-r", "-p"]}[program]
        sys.stdout.flush()
        try:
            os.execvp(program, [program, *options, "-F", str(self.ssh_config), "--", *words])
        except FileNotFoundError as error:
            raise IcomError(
                f"This needs OpenSSH's {program}. Debian, Ubuntu: apt-get install openssh-client"
            ) from error

    def send(self, files: Mapping[str, bytes | Path]) -> None:
        """Write files in their order, as one stream."""
        no, pipe = subprocess.DEVNULL, subprocess.PIPE
        with (
            subprocess.Popen(self.argv("tar -xf -"), stdin=pipe, stdout=no, stderr=pipe) as process,
            showing(process, sys.stderr),
        ):
            assert process.stdin
            try:
                with process.stdin, tarfile.open(fileobj=process.stdin, mode="w|") as tar:
                    for path, source in files.items():
                        entry = tarfile.TarInfo(path)
                        with BytesIO(source) if isinstance(source, bytes) else source.open("rb") as content:
                            entry.size, entry.mode = content.seek(0, os.SEEK_END), 0o644
                            content.seek(0)
                            tar.addfile(entry, content)
            except BrokenPipeError:
                pass  # tar or ssh has ended, and says why
            except OSError as error:
                process.kill()
                what = path if isinstance(source, bytes) else source
                raise IcomError(f"Cannot send {what}: {error.strerror or error}.") from error
        if process.returncode:
            raise IcomError(self._failed("Sending files", process.returncode))

    def fetch(self, folder: str, name: str, target: Path) -> int:
        """Bring the files of `folder/name` into `target`; each is whole or the old one. How many they are.

        What `target` has besides stays. Links, devices and other things that are no files stay on the node.

        Raises:
            IcomError: the connection broke, a file cannot be written, or one is to go elsewhere than into `target`: tar
                of `folder/name` makes no such names, so the rest is not taken either.
        """
        count = 0
        words = self.argv(shlex.join(["tar", "-C", folder, "-cf", "-", "--", f"./{name}"]))
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
                raise IcomError(f"{self.name} sends what is no file of the run: {error} No more is taken.") from None
            except (tarfile.TarError, EOFError, ValueError) as error:  # the last of a number that is none
                process.kill()
                raise IcomError(f"{self._failed('Fetching the results', process.wait())} {error}") from error
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise IcomError(self._failed("Fetching the results", process.returncode))
        return count

    def _start(self, line: str, on_line: Callable[[str], None] | None) -> Running:
        return start_here(self.argv(line))

    def _why(self, code: int) -> str:
        return "ssh has no connection" if code == NO_CONNECTION else super()._why(code)


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

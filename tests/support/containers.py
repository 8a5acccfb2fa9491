"""Containers and images in a store of the test's own, by podman and buildah.

All of it runs in process and mount namespaces that live as long as a pipe of this process's
(tests/support/namespaces.py): whatever ends the test, containers and what they have mounted are gone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.hosts import Host
from tests.support.namespaces import PATH, Space

NEEDED = ("buildah", "catatonit", "podman", "runc")
_FOLDERS = ("dev", "etc", "home/icom", "proc", "run", "sys", "tmp", "var")
_LINKS = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")


def missing(*more: str) -> list[str]:
    """What this machine lacks to run containers; empty when nothing."""
    found = [f"the command {name}" for name in (*NEEDED, *more) if shutil.which(name, path=PATH) is None]
    return found or ([] if os.geteuid() == 0 else ["the user root"])


@dataclass
class Store:
    """Images and containers.

    Attributes:
        folder: where they are.
        env: with which buildah and podman use them, outside of the namespaces too.
    """

    folder: Path
    env: dict[str, str]
    _space: Space

    def command(self, *words: str | Path, on: Host | None = None) -> list[str]:
        """The words that run `words` beside the containers, with `env`.

        Args:
            words: command and arguments.
            on: the host in whose network.
        """
        net = [f"--net=/proc/{on._space.pid}/ns/net"] if on else []
        pids = f"--pid=/proc/{self._space.pid}/ns/pid_for_children"
        return ["nsenter", f"--target={self._space.pid}", "--mount", pids, *net, *map(str, words)]

    def run(
        self, *words: str | Path, on: Host | None = None, text: str | None = None, fails: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run `words`, as `command` explains; output and errors apart.

        Args:
            words: command and arguments.
            on: the host in whose network.
            text: its input.
            fails: whether it may.
        """
        done = subprocess.run(
            self.command(*words, on=on), env=self.env, input=text or "", capture_output=True, text=True, check=False
        )
        assert fails or done.returncode == 0, f"{' '.join(map(str, words))}: {done.stdout}{done.stderr}"
        return done

    def inspect(self, kind: str, name: str) -> dict[str, Any]:
        """What podman knows of an image or a container."""
        found: dict[str, Any] = json.loads(self.run("podman", kind, "inspect", name).stdout)[0]
        return found

    def make_empty_image(self, name: str, binds: Sequence[Path], variables: Mapping[str, str]) -> None:
        """An image without a program: folders, users, and links that lead into a /usr to be mounted.

        Args:
            name: of the image.
            binds: folders to be mounted, which have to be there in a read-only root.
            variables: its environment.
        """
        root = self.folder / "empty"
        for folder in (*_FOLDERS, "usr", *(str(bind).lstrip("/") for bind in binds)):
            (root / folder).mkdir(parents=True, exist_ok=True)
        for link in _LINKS:
            if Path("/", link).is_symlink():
                (root / link).symlink_to(Path("/", link).readlink())
        (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nicom:x:1000:1000::/home/icom:/bin/sh\n")
        (root / "etc/hosts").touch()
        (root / "tmp").chmod(0o1777)
        with tarfile.open(self.folder / "empty.tar", "w") as tar:
            tar.add(root, "/")
        changes = [f"--change=ENV {name}={value}" for name, value in variables.items()]
        self.run("podman", "import", "--quiet", *changes, self.folder / "empty.tar", name)


@contextmanager
def store(folder: Path) -> Iterator[Store]:
    """An empty store in a folder, which is removed with all that is in it."""
    (folder / "tmp").mkdir(parents=True)
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder / "images"}"\nrunroot = "{folder / "run"}"\n'
    )
    # As little as a machine without systemd allows. The limits of processes in containers are this one's.
    (folder / "containers.conf").write_text(
        '[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\n'
        '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "runc"\n'
        f'tmp_dir = "{folder / "libpod"}"\n'
    )
    env = {
        **os.environ,
        "PATH": PATH,
        "BUILDAH_ISOLATION": "chroot",
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        "TMPDIR": str(folder / "tmp"),
    }
    try:
        with ExitStack() as stack:
            namespaces = ("--mount", "--pid", "--fork", "--mount-proc", "--propagation=private")
            # podman keeps its locks there, which another store's podman would free.
            made = Store(folder, env, Space.make(stack, namespaces, "mount -t tmpfs tmpfs /dev/shm"))
            yield made
            made.run("podman", "pod", "rm", "--force", "--all", "--time=0", fails=True)
            made.run("podman", "rm", "--force", "--all", "--time=0", fails=True)
    finally:
        shutil.rmtree(folder)

"""Processes that form a group on this machine, as mpirun would start them."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from subprocess import Popen

from tests.support.command import Result, start_python

SWITCHES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


class Ranks:
    """Real processes, with the variables that Hydra would set; each with a folder of its own to stand in."""

    def __init__(
        self,
        folder: Path,
        count: int,
        *arguments: str,
        of: dict[int, dict[str, str]] | None = None,
        secret: str = "",
        late: int = 0,
    ) -> None:
        """Start them.

        Args:
            folder: to work in.
            count: how many there are.
            arguments: of `python`.
            of: rank -> more of its environment.
            secret: ICOM_SECRET of all.
            late: so many of them, the last ones, are left to `start`.
        """
        self.port, self.arguments, self.secret = free_port(), arguments, secret
        self.folders = [folder / f"rank{rank}" for rank in range(count)]
        self.processes: list[Popen[str]] = []
        self._of = of or {}
        for _ in range(count - late):
            self.start(*arguments)

    def start(self, *arguments: str) -> None:
        """Start the next one."""
        rank, count = len(self.processes), len(self.folders)
        own = self.folders[rank]
        own.mkdir(parents=True, exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name not in SWITCHES}
        environment |= {
            "PMI_RANK": str(rank),
            "PMI_SIZE": str(count),
            "MPI_LOCALRANKID": str(rank),
            "MPI_LOCALNRANKS": str(count),
            "MASTER_PORT": str(self.port),
            "ICOM_SECRET": self.secret,
            **self._of.get(rank, {}),
        }
        self.processes.append(start_python(*arguments, environment=environment, folder=own))

    def results(self) -> list[Result]:
        """Of all, once all have ended; what hangs is the test's time limit's."""
        told = [process.communicate() for process in self.processes]
        return [Result(process.returncode, *t) for process, t in zip(self.processes, told, strict=True)]

    def wait_for_steps(self, count: int) -> None:
        """Until rank 0 has logged so many."""
        log = self.folders[0] / "out" / "metrics.jsonl"
        while not log.exists() or len(log.read_text().splitlines()) < count:
            assert all(process.poll() is None for process in self.processes)
            time.sleep(0.02)

    def end(self) -> None:
        """Whatever they are doing."""
        for process in self.processes:
            process.kill()
            process.communicate()


def free_port() -> int:
    """Of 127.0.0.1."""
    with socket.socket() as any_socket:
        any_socket.bind(("127.0.0.1", 0))
        return int(any_socket.getsockname()[1])

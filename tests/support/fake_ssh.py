"""Nodes that say yes to everything, for tests of what EC2 is asked; tests/provisioning/test_nodes.py has real ones.

They stand where fabric does, so that waiting, timeouts and errors are provisioning's own. Every step passes here:
`steps` tells which, and one of them can fail.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from icom.errors import IcomError
from provisioning.cluster import Node
from provisioning.health import AMX_FLAGS
from provisioning.hostkeys import make_key
from provisioning.on_node import MARK, Facts
from provisioning.ssh import Login, SshTransport

FACTS = json.dumps(asdict(Facts({"torch": "2"}, {}, sorted(AMX_FLAGS), "6.8", {})))


@dataclass
class Steps:
    """What was asked of all nodes, and one fault to inject."""

    done: list[str] = field(default_factory=list)
    """`role: command` of each step, and `role: sftp path`."""
    at: int | None = None
    """Which step (from 0) meets the fault."""
    fault: str = ""
    """error, broken, hang or ctrl-c."""
    says: str = "no such luck"
    """What the step that fails prints."""
    gone: bool = False
    """Whether a connection broke."""
    passed: float = 0
    """Seconds that went by while steps were hanging."""

    def meet_at(self, at: int | None, fault: str) -> None:
        """Count from 0 again; the step of that number meets the fault."""
        self.done.clear()
        self.at, self.fault, self.gone = at, fault, False

    def clock(self) -> float:
        """What the time is, for provisioning.transport."""
        return time.monotonic() + self.passed

    def pause(self, seconds: float) -> None:
        """Called between looks at a step that has not ended: an hour goes by."""
        self.passed += 3600

    def meet(self, what: str) -> SimpleNamespace:
        """Do a step."""
        self.done.append(what)
        failed = hangs = False
        if len(self.done) - 1 == self.at:
            if self.fault == "broken":
                self.gone = True
                raise EOFError("the connection is gone")
            if self.fault == "ctrl-c":
                os.kill(os.getpid(), signal.SIGINT)
            failed, hangs = self.fault == "error", self.fault == "hang"
        text = f"{MARK}1000.0\n{MARK}{FACTS}\n{MARK}1000.0\n" if "on_node facts" in what else ""
        if nodes := re.search(r"all_reduce.sh \S+ (\d+)", what):
            text = f"all-reduce of {nodes[1]} processes"
        return SimpleNamespace(
            failed=failed, exited=3 if failed else 0, stdout=text, stderr=self.says if failed else "", hangs=hangs
        )


class FakeConnection:
    """As much of fabric's Connection as provisioning.ssh uses."""

    def __init__(self, steps: Steps, node: Node) -> None:
        self._steps, self._node = steps, node
        self.transport = self.client = SimpleNamespace(close=lambda: None)

    def close(self) -> None:
        """As fabric's, which closes sftp first."""
        if self._steps.gone:
            raise EOFError

    def run(self, command: str, **_: Any) -> SimpleNamespace:
        """A shell command, which has ended, or never will."""
        done = self._run(command)
        runner = SimpleNamespace(process_is_finished=not done.hangs, kill=lambda: None)
        return SimpleNamespace(runner=runner, join=lambda: done)

    def _run(self, command: str) -> SimpleNamespace:
        if "ssh-keygen -q -t ed25519" in command:
            done = self._steps.meet(f"{self._node.role}: {command}")
            done.stdout = make_key().public
            return done
        return self._steps.meet(f"{self._node.role}: {command}")

    def sftp(self) -> Any:
        """A client that can write files."""

        @contextmanager
        def opened(path: str, mode: str) -> Iterator[Any]:
            done = self._steps.meet(f"{self._node.role}: sftp {path.removesuffix('.new')}")
            if done.failed:
                raise OSError("no such luck")
            if done.hangs:
                raise TimeoutError("timed out")
            sink = io.BytesIO()
            yield SimpleNamespace(chmod=lambda mode: None, set_pipelined=lambda on: None, write=sink.write)

        return SimpleNamespace(open=opened, posix_rename=lambda old, new: None)


class FakeLocal(SshTransport):
    """A LocalTransport whose commands pass here too, and whose files."""

    def __init__(self, steps: Steps, check: Callable[[], None]) -> None:
        node: Any = SimpleNamespace(role="master", label="master (i-here)")
        super().__init__(FakeConnection(steps, node), node, check)
        self._steps = steps

    def send(self, files: Mapping[str, bytes | Path], seconds: float = 0) -> None:
        for path in files:
            self.check()
            if self._steps.meet(f"master: write {path}").failed:
                raise IcomError(f"{self.name}: no such luck")


def connector(steps: Steps) -> Callable[..., FakeConnection]:
    """What to put in place of provisioning.ssh.connect."""

    def connect(login: Login, node: Node, keys: object = None) -> FakeConnection:
        return FakeConnection(steps, node)

    return connect

"""Processes of Python that need not import PyTorch first: forked off one that has.

A fresh process takes seconds to import what icom is made of, which is most of a short run. `start` gives a Popen whose
process is a fork of a template that has imported all that and computed nothing. It has its own environment, folder,
signals and streams, and runs what `python -m MODULE` or `python -c CODE` would.

Not for tests of starting up, nor where the environment decides what libraries do when they are imported
(`IMPORTED_WITH`): those start cold.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

IMPORTED_WITH = (
    *("HF_", "TRANSFORMERS_", "PYTHON", "LD_", "ONEDNN_", "ATEN_", "MKL_", "KMP_", "GOMP_", "OMP_", "WANDB_", "COMET_"),
    *("HOME", "XDG_", "MPL", "TORCH_"),
)
"""Variables that begin so are read once, when something is imported."""
BY_ICOM = {
    *("DIFFUSERS_VERBOSITY", "TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_TELEMETRY", "TORCH_CPP_LOG_LEVEL"),
    "COMET_OFFLINE_DIRECTORY",
}
"""icom sets these itself, in the tests' own process too."""

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, prctl(2)


_ENVIRONMENT: dict[str, str] = {}
"""What the template starts with: not what the test that needs it first has changed."""


def keep_environment() -> None:
    """Call it before the first test, when all that holds for all of them is set."""
    _ENVIRONMENT.update(os.environ)


def can_start(environment: Mapping[str, str]) -> bool:
    """Whether a fork of the template is what a fresh process with this environment would be."""
    both = environment.keys() | _ENVIRONMENT.keys()
    names = {name for name in both - BY_ICOM if environment.get(name) != _ENVIRONMENT.get(name)}
    return not any(name.startswith(IMPORTED_WITH) for name in names)


class WarmProcess(subprocess.Popen[str]):
    """A Popen (text, pipes or files) of a forked process; see the module."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        # Popen's private hook, the same from Python 3.10 to 3.13: (args, executable, preexec_fn, close_fds, pass_fds,
        # cwd, env, startupinfo, creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, …).
        cwd, env = rest[4], rest[5]
        p2cread, _, _, c2pwrite, _, errwrite = pipes = rest[9:15]
        request = {"argv": list(map(str, args[1:])), "cwd": os.fspath(cwd), "env": dict(env)}
        streams = [own if fd == -1 else fd for own, fd in enumerate((p2cread, c2pwrite, errwrite))]
        self.pid = _template().fork(request, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)


class _Template:
    """The process that forks. Its forks are orphans that this process adopts, so that it can wait for them."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs:
            words = [sys.executable, "-m", "tests.support.warm", str(theirs.fileno())]
            folder = Path(__file__).parents[2]
            self.process = subprocess.Popen(words, pass_fds=[theirs.fileno()], cwd=folder, env=_ENVIRONMENT)

    def fork(self, request: Mapping[str, Any], streams: Sequence[int]) -> int:
        """Pid of a new process that does what is requested, with these as its standard streams."""
        content = json.dumps(request).encode()
        # Only now: other orphans would stay zombies here, and hold up the end of the namespaces they were in.
        _adopt_orphans(True)
        try:
            socket.send_fds(self._ours, [len(content).to_bytes(4, "big")], list(streams))
            self._ours.sendall(content)
            answer = self._ours.recv(4, socket.MSG_WAITALL)
        finally:
            _adopt_orphans(False)
        assert len(answer) == 4, "the template has died"
        return int.from_bytes(answer, "big")

    def close(self) -> None:
        """Let it end, and wait for that."""
        self._ours.close()
        self.process.wait()


def _adopt_orphans(on: bool) -> None:
    ctypes.CDLL(None).prctl(_SUBREAPER, int(on), 0, 0, 0)


_TEMPLATE: list[_Template] = []


def close() -> None:
    """Let the template end, if there is one; at the end of a test session."""
    while _TEMPLATE:
        _TEMPLATE.pop().close()


def _template() -> _Template:
    if not _TEMPLATE:
        _TEMPLATE.append(_Template())
    return _TEMPLATE[0]


def _serve(requests: socket.socket) -> None:
    """Fork for each request, until the other end is gone."""
    # What a run imports sooner or later; nothing here computes or starts a thread.

    import icom.commands.demo
    import icom.commands.generate
    import icom.training.finetune
    import icom.training.train  # noqa: F401

    gc.freeze()  # a fork's collector would write to all pages, and so copy them

    while True:
        size, streams, _, _ = socket.recv_fds(requests, 4, 3, socket.MSG_WAITALL)
        if not size:
            return
        request = json.loads(requests.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
        receiver, sender = os.pipe()
        if (between := os.fork()) == 0:
            if (pid := os.fork()) == 0:
                os.close(receiver)
                os.close(sender)
                requests.close()
                _be(request, streams)
            os.write(sender, pid.to_bytes(4, "big"))
            os._exit(0)
        os.waitpid(between, 0)  # from now on the fork is the adopter's
        for fd in (*streams, sender):
            os.close(fd)
        requests.sendall(os.read(receiver, 4))
        os.close(receiver)


def _be(request: Mapping[str, Any], streams: Sequence[int]) -> NoReturn:
    """Become what was asked for."""
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.set_inheritable(number, True)
    for fd in streams:
        if fd > 2:
            os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    how, what, *arguments = request["argv"]
    sys.path[0] = str(Path.cwd()) if how == "-m" else ""
    code = 0
    try:
        if how == "-m":
            sys.argv = [what, *arguments]
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            sys.argv = ["-c", *arguments]
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    _finish(code)


def _finish(code: int) -> NoReturn:
    """Do what the interpreter does at its end, and exit."""
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # as `icom train` does before it imports PyTorch
    _serve(socket.socket(fileno=int(sys.argv[1])))

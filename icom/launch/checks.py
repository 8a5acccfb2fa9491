"""Before a start: ask all hosts at once, over the ssh that mpirun itself uses, and name everything that is wrong."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from icom.launch.probe import CODE, ICOM, MODEL, MPIRUN, OTHER_COMMIT, PICTURES, Answer, Request, from_line, read_answer
from icom.names import plain
from icom.parallel.alike import differences

SECONDS_PER_HOST = 120
"""Patience with a host. What takes longest is reading the model: 4 GB at 50 MB/s."""
_SECONDS_TO_LISTEN = 30

# No host key is accepted that was not known, nobody is asked for a password, and a dead line is noticed.
_SSH = (
    *("ssh", "-x", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
_NO_FOLDER = 66
_FOLDERS = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")

_SAME_COMMIT = "bring icom to the same commit there: git pull && make setup-master"
_FIXES = {
    ICOM: _SAME_COMMIT,
    CODE: _SAME_COMMIT,
    MODEL: "copy the model there (rsync -a), or fetch the same revision",
    PICTURES: "copy the pictures there (rsync -a --delete)",
    MPIRUN: "install the same MPI there",
}
_SSH_FIXES = (
    # ssh says the second one too when it says the first.
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "if the machine was set up anew: ssh-keygen -R {host}, then ssh {host}"),
    ("Host key verification failed", "connect by hand once, `ssh {host}`, and compare the fingerprint"),
    ("Permission denied", "ssh-copy-id {host}: mpirun cannot type a password"),
    ("Could not resolve", "correct the name, or give its HostName in ~/.ssh/config"),
)


@dataclass(frozen=True)
class Target:
    """A host to ask.

    Attributes:
        name: as in the hosts file.
        local: whether it is this machine, which is asked without ssh.
        ranks: processes it is to run.
    """

    name: str
    local: bool
    ranks: int


@dataclass(frozen=True)
class HostProblem:
    """A line of the table. One that does not stop the start is a warning."""

    host: str
    what: str
    fix: str
    stops: bool = True


def probe_command(target: Target, environment: Mapping[str, str]) -> list[str]:
    """What asks a host: the probe, in this folder and with this Python, over ssh unless it is this machine."""
    program = [sys.executable, "-m", "icom.launch.probe"]
    if target.local:
        return program
    if path := environment.get("PYTHONPATH"):  # mpirun passes it on
        program = ["env", f"PYTHONPATH={path}", *program]
    remote = f"cd {shlex.quote(str(Path.cwd()))} || exit {_NO_FOLDER}; {shlex.join(program)}"
    return [*_SSH, target.name, remote]


Reach = Callable[[Target, Mapping[str, str]], list[str]]
"""From a host and the environment to the command that runs the probe there."""


def check(
    targets: list[Target], request: Request, environment: Mapping[str, str], reach: Reach = probe_command
) -> list[HostProblem]:
    """Ask all hosts at once.

    Args:
        targets: the hosts; the first is asked to listen, the others to connect to it.
        request: the same for all.
        environment: of which the hosts get what mpirun would pass on and the answers depend on.
        reach: the command that runs the probe on a host.

    Returns:
        Problems in order of the hosts.
    """
    request = replace(request, environment={name: environment[name] for name in _FOLDERS if name in environment})
    conversation = _Conversation(len(targets), reach)
    with ThreadPoolExecutor(len(targets)) as pool:
        asked = [
            pool.submit(conversation.ask, target, replace(request, listens=number == 0), environment)
            for number, target in enumerate(targets)
        ]
        outcomes = [future.result() for future in asked]
    return compare([*zip(targets, outcomes, strict=True)])


def compare(outcomes: list[tuple[Target, Answer | HostProblem]]) -> list[HostProblem]:
    """What is wrong: on each host by itself, or in comparison with the first that answered; in their order."""
    answers = {target.name: outcome for target, outcome in outcomes if isinstance(outcome, Answer)}
    problems: list[HostProblem] = []
    for target, outcome in outcomes:
        if isinstance(outcome, Answer):
            problems += [HostProblem(target.name, what, fix) for what, fix in outcome.problems]
            problems += _differences(target.name, outcome, answers)
            problems += _too_few_cores(target, outcome)
        else:
            problems.append(outcome)
    return problems


def show_problems(problems: list[HostProblem]) -> None:
    """Print all problems of all hosts as one table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "host", "what is wrong", "what to do", box=None, pad_edge=False)
    for problem in problems:
        mark = "[red]✗" if problem.stops else "[yellow]!"
        # What a host said is part of it.
        table.add_row(mark, *(escape(plain(text)) for text in (problem.host, problem.what, problem.fix)))
    Console(stderr=True, highlight=False).print(table)


def _differences(host: str, answer: Answer, answers: Mapping[str, Answer]) -> Iterable[HostProblem]:
    """Against the first host that answered. What is missing has its own line already."""
    first, reference = next(iter(answers.items()))
    for one in differences({host: answer.versions}, reference.versions):
        if one.found and one.expected:
            fix = _FIXES.get(one.name, "make setup-master, there")
            yield HostProblem(host, f"{one.name} {one.found}, but {one.expected} on {first}", fix)
    for one in differences({host: answer.digests}, reference.digests):
        if one.found and one.expected:
            yield HostProblem(host, f"{one.name}: not the same as on {first}", _FIXES.get(one.name, "copy it there"))


def _too_few_cores(target: Target, answer: Answer) -> Iterable[HostProblem]:
    if answer.cores < target.ranks:
        what = f"{target.ranks} processes share {answer.cores} cores"
        yield HostProblem(target.name, what, "fewer processes there: host:N, or --ppn", stops=False)


class _Conversation:
    """The probes of all hosts, which wait for each other in two places: see icom.launch.probe."""

    def __init__(self, hosts: int, reach: Reach) -> None:
        self._reach = reach
        self._first_spoke = threading.Event()
        self._first_listens = False
        self._others_left = hosts - 1
        self._others_done = threading.Event()
        self._lock = threading.Lock()
        if hosts == 1:
            self._others_done.set()

    def ask(self, target: Target, request: Request, environment: Mapping[str, str]) -> Answer | HostProblem:
        """Run the probe on one host and hear it out."""
        try:
            return self._ask(target, request, environment)
        finally:
            if request.listens:
                self._first_spoke.set()
            else:
                with self._lock:
                    self._others_left -= 1
                    if not self._others_left:
                        self._others_done.set()

    def _ask(self, target: Target, request: Request, environment: Mapping[str, str]) -> Answer | HostProblem:
        # A file, because nobody reads it before the end: a pipe could fill.
        with tempfile.TemporaryFile("w+", errors="replace") as errors, contextlib.ExitStack() as stack:
            process = subprocess.Popen(
                self._reach(target, environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
            )
            assert process.stdin
            stack.enter_context(process)
            late = threading.Event()

            def cut_off() -> None:
                late.set()
                process.kill()

            timer = threading.Timer(SECONDS_PER_HOST, cut_off)
            timer.start()
            stack.callback(timer.cancel)
            try:
                answer = self._talk(process, request)
            except BrokenPipeError:
                answer = None
                with contextlib.suppress(BrokenPipeError):  # what could not be sent is still there
                    process.stdin.close()
            except ValueError as error:
                process.kill()
                return HostProblem(target.name, f"its answer is none ({error})", _SAME_COMMIT)
            timer.cancel()
            if answer:
                if request.listens:
                    self._others_done.wait()
                return answer
            process.wait()
            if late.is_set():
                what = f"no answer within {SECONDS_PER_HOST} s"
                return HostProblem(target.name, what, f"see what it is doing: ssh {target.name} uptime")
            errors.seek(0)
            return _explain(target, process.returncode, errors.read())

    def _talk(self, process: subprocess.Popen[str], request: Request) -> Answer | None:
        """None where the host hangs up before it has answered."""
        stdin, stdout = process.stdin, process.stdout
        assert stdin
        assert stdout
        stdin.write(json.dumps(asdict(request)) + "\n")
        stdin.flush()
        if not request.listens:
            self._first_spoke.wait(_SECONDS_TO_LISTEN)
            stdin.write(json.dumps(self._first_listens) + "\n")
            stdin.flush()
        for line in stdout:
            message = from_line(line)
            if message is None:
                continue
            if set(message) == {"listening"}:
                self._first_listens = bool(message["listening"])
                self._first_spoke.set()
                continue
            return read_answer(message)
        return None


def _explain(target: Target, code: int, errors: str) -> HostProblem:
    """Why there was no answer."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit code {code}"
    if code == _NO_FOLDER:
        return HostProblem(target.name, f"no folder {Path.cwd()}", "clone icom there, at the same place as here")
    if code == 255 and not target.local:
        fix = next(
            (fix for sign, fix in _SSH_FIXES if sign in errors), "is it switched on, and does `ssh {host}` work?"
        )
        return HostProblem(target.name, f"ssh: {last.removeprefix('ssh: ')}", fix.format(host=target.name))
    if code in (126, 127):
        what = f"no {sys.executable}"
        return HostProblem(
            target.name, what, f"make setup-master, there in {Path.cwd()}: the paths have to be the same"
        )
    if any(words in last for words in ("No module named", "cannot import name", OTHER_COMMIT)):
        return HostProblem(target.name, last, _SAME_COMMIT)
    return HostProblem(target.name, f"the check failed there: {last}", "repair that, there")

"""One host's answer to the questions before a start: `python -m icom.launch.probe`, run on each host over ssh.

Lines of JSON on stdin and stdout, those on stdout behind MARK, because a login shell may talk there too:

1. in: the request;
2. out, from the host that is to have rank 0: whether it listens now;
3. in, to the others: whether they shall connect to it;
4. out: the answer;
5. the first host listens until its stdin ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from icom import __version__, machine
from icom.config.captions import BUILT_IN
from icom.config.data import DataOptions
from icom.config.finetune import FinetuneConfig
from icom.config.train import TrainConfig
from icom.config.trainings import TrainingConfig
from icom.errors import IcomError
from icom.launch import digests, mpi

MARK = "icom-probe: "
PACKAGES = ("torch", "accelerate", "diffusers", "transformers")
OPTIONAL = ("oneccl_bind_pt", "intel-extension-for-pytorch")
"""Where one host has them and another not, the processes choose different backends."""
ICOM, PYTHON, MPIRUN = "icom", "Python", "mpirun"
"""Keys of `Answer.versions`, beside PACKAGES and OPTIONAL."""
CODE, PICTURES, MODEL = "icom's code", "pictures", "model"
"""Keys of `Answer.digests`, beside file names."""
OTHER_COMMIT = "icom of another commit, which does not understand the question"

_CONNECT_SECONDS = 5

T = TypeVar("T")
Problem = tuple[str, str]
"""What is wrong, and what to do."""


@dataclass(frozen=True)
class Contents:
    """What a run reads.

    Attributes:
        pictures: --train_data_dir.
        model: --pretrained_model_name_or_path.
        tokenizer: --tokenizer_name.
        revision: --revision.
        variant: --variant.
        files: further files.
        data: all options of where captioned pictures come from (`DataOptions`); None: a folder of pictures alone.
    """

    pictures: str
    model: str
    tokenizer: str | None
    revision: str | None
    variant: str | None
    files: list[str]
    data: dict[str, Any] | None = None

    @classmethod
    def of(cls, training: TrainingConfig, files: Iterable[str] = ()) -> Contents:
        """Of a training, and of a launcher's own `files`."""
        data = None
        named = [training.config]
        if isinstance(training, TrainConfig) and training.caption_templates != BUILT_IN:
            named.append(training.caption_templates)
        if isinstance(training, TrainConfig):
            named.append(training.prompts_file)
            named.append(training.concepts_list)
        if isinstance(training, FinetuneConfig):
            data = {field.name: getattr(training, field.name) for field in fields(DataOptions)}
            named += [training.idx_to_prompt, training.from_scratch if training.from_scratch != "model" else None]
        return cls(
            pictures=training.train_data_dir,
            model=training.pretrained_model_name_or_path,
            tokenizer=training.tokenizer_name,
            revision=training.revision,
            variant=training.variant,
            files=[*files, *filter(None, named)],
            data=data,
        )


@dataclass(frozen=True)
class Request:
    """What is asked of a host.

    Attributes:
        contents: what has to be the same on all.
        mpirun: path of mpirun.
        interface: that mpirun will be told to use; None: none.
        address: MASTER_ADDR.
        port: MASTER_PORT.
        listens: whether this host is to have rank 0.
        word: that the listener says, so that nobody takes another program for it.
        environment: what mpirun would pass on and matters here, such as HF_HOME.
    """

    contents: Contents
    mpirun: str
    interface: str | None
    address: str
    port: int
    listens: bool
    word: str
    environment: dict[str, str]


@dataclass(frozen=True)
class Answer:
    """What a host says of itself.

    Attributes:
        versions: of programs, which have to be equal on all hosts.
        digests: of contents, which have to be equal on all hosts; "" for what cannot be read.
        cores: that can compute at full speed.
        problems: (what is wrong, what to do), of this host alone.
    """

    versions: dict[str, str]
    digests: dict[str, str]
    cores: int
    problems: list[Problem]


def to_line(message: dict[str, Any]) -> str:
    """A message of the probe, as it stands on stdout."""
    return f"{MARK}{json.dumps(message)}\n"


def from_line(line: str) -> dict[str, Any] | None:
    """The message in a line of stdout; None in one that somebody else wrote.

    Raises:
        ValueError: a damaged message.
    """
    if not line.startswith(MARK):
        return None
    message = json.loads(line.removeprefix(MARK))
    if not isinstance(message, dict):
        raise ValueError("no message")
    return message


def read_answer(message: dict[str, Any]) -> Answer:
    """Check a message and make it an answer.

    Raises:
        ValueError: it is none.
    """
    if set(message) != _names(Answer):
        raise ValueError(f"has {', '.join(sorted(message))}")
    versions, digests_, cores, problems = (message[f.name] for f in fields(Answer))
    well = (
        all(_is_texts(some) for some in (versions, digests_))
        and isinstance(cores, int)
        and isinstance(problems, list)
        and all(isinstance(p, list) and len(p) == 2 and all(isinstance(text, str) for text in p) for p in problems)
    )
    if not well:
        raise ValueError("has values of other types")
    return Answer(versions, digests_, cores, [(what, fix) for what, fix in problems])


def _names(kind: type[Request | Contents | Answer]) -> set[str]:
    return {field.name for field in fields(kind)}


def _is_texts(some: Any) -> bool:
    return isinstance(some, dict) and all(isinstance(text, str) for text in some.values())


def main() -> None:
    """Answer one request."""
    asked = json.loads(sys.stdin.readline())
    if set(asked) != _names(Request) or set(asked["contents"]) != _names(Contents):
        sys.exit(OTHER_COMMIT)
    request = Request(**{**asked, "contents": Contents(**asked["contents"])})
    os.environ |= request.environment
    with ThreadPoolExecutor(1) as pool:
        # The slowest part, and hashing leaves Python's other threads alone.
        model = pool.submit(_attempt, _model, request.contents)
        with contextlib.ExitStack() as stack:
            problems = []
            if request.listens:
                problem = _listen(request, stack)
                problems += [problem] if problem else []
                _say({"listening": problem is None})
            versions, found = _versions()
            problems += found
            if Path(request.mpirun).is_file():
                versions[MPIRUN] = mpi.describe(Path(request.mpirun))
            else:
                problems.append((f"no {request.mpirun}", "install the same MPI there as here, at the same place"))
            contents, found = _contents(request.contents)
            problems += found
            problem = _no_interface(request.interface)
            problems += [problem] if problem else []
            if not request.listens and json.loads(sys.stdin.readline() or "false"):
                problem = _connect(request)
                problems += [problem] if problem else []
            contents[MODEL], problem = model.result()
            problems += [problem] if problem else []
            _say(asdict(Answer(versions, contents, machine.usable_cores(), problems)))
            if request.listens:
                sys.stdin.read()


def look(contents: Contents) -> Answer:
    """Answer for this machine without a conversation, on a launcher that starts something on all of them at once."""
    versions, problems = _versions()
    found, more = _contents(contents)
    found[MODEL], problem = _attempt(_model, contents)
    problems += more + ([problem] if problem else [])
    return Answer(versions, found, machine.usable_cores(), problems)


def notice_of(contents: Contents) -> str:
    """For the user: which data are not compared before the start; "" where all are."""
    why = digests.left_to_the_run(DataOptions(**contents.data)) if contents.data else ""
    if not why:
        return ""
    return f"icom: the data {contents.pictures} {why}: the processes compare them when they start, and nobody before."


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(to_line(message))
    sys.stdout.flush()


def _versions() -> tuple[dict[str, str], list[Problem]]:
    versions, problems = {ICOM: __version__, PYTHON: platform.python_version()}, []
    for package in (*PACKAGES, *OPTIONAL):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            if package in OPTIONAL:
                versions[package] = "none"
            else:
                problems.append((f"{package} is not installed", "make setup-master, there"))
    return versions, problems


def _contents(contents: Contents) -> tuple[dict[str, str], list[Problem]]:
    """All digests but the model's."""
    found, problems = {CODE: digests.code()}, []
    for name in contents.files:
        found[name], problem = _attempt(digests.file, Path(name))
        problems += [problem] if problem else []
    found[PICTURES], problem = _attempt(_pictures, contents)
    problems += [problem] if problem else []
    return found, problems


def _no_interface(name: str | None) -> Problem | None:
    there = [interface.name for interface in machine.interfaces()]
    if name is None or name in there:
        return None
    others = ", ".join(other for other in there if other != "lo")
    fix = f"mpirun wants the same name everywhere; there are {others}. Rename it there (ip link, netplan)"
    return f"no network interface {name}", fix


def _pictures(contents: Contents) -> str:
    return digests.pictures(contents.pictures) if contents.data is None else digests.data(DataOptions(**contents.data))


def _model(contents: Contents) -> str:
    return digests.model(contents.model, contents.tokenizer, contents.revision, contents.variant)


def _attempt(digest: Callable[[T], str], argument: T) -> tuple[str, Problem | None]:
    """A digest, or an empty one and why there is none."""
    try:
        return digest(argument), None
    except IcomError as error:
        # Our messages say what is wrong in the first sentence, and then what to do.
        what, _, fix = str(error).partition(". ")
        return "", (what, fix or "make it as on the other hosts")


def _listen(request: Request, stack: contextlib.ExitStack) -> Problem | None:
    """Listen where rank 0 will, for the time of the check."""
    listener = stack.enter_context(socket.socket(_family(request.address)))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((request.address, request.port))
        listener.listen()
    except OSError as error:
        what = f"cannot listen on {request.address} port {request.port}: {error.strerror}"
        return what, "free the port, or choose: MASTER_PORT=29600 icom launch …; MASTER_ADDR if the address is wrong"
    threading.Thread(target=_serve, args=(listener, request.word), daemon=True).start()
    return None


def _serve(listener: socket.socket, word: str) -> None:
    # Closing the listener ends accept, here with an error.
    with contextlib.suppress(OSError):
        while True:
            caller, _ = listener.accept()
            with caller:
                caller.settimeout(_CONNECT_SECONDS)
                caller.sendall(word.encode())
                # Whoever hangs up first keeps the port busy for a minute: let it be the other side.
                caller.recv(1)


def _connect(request: Request) -> Problem | None:
    """Connect to the first host as a rank would."""
    where = f"{request.address} port {request.port}, where rank 0 will be,"
    fix = (
        "let the hosts reach each other on all ports (firewall, security group), and see that this is the right network"
    )
    try:
        with socket.create_connection((request.address, request.port), timeout=_CONNECT_SECONDS) as connection:
            heard = b""
            while len(heard) < len(request.word) and (more := connection.recv(100)):
                heard += more
    except OSError as error:
        return f"{where} cannot be reached: {error.strerror or error}", fix
    if heard.decode(errors="replace") != request.word:
        return f"{where} leads to something else than the first host", fix
    return None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


if __name__ == "__main__":
    main()

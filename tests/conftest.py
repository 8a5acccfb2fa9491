"""Shared by all tests: run icom in this process or in its own, on the bundled model, with a cache of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.support import reaper, warm
from tests.support.command import ROOT, Result, train_arguments
from tests.support.hosts import missing
from tests.support.ranks import Ranks

# Nothing may look for the Hub: an address where nobody listens. Set before anything of Hugging Face is imported.
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
os.environ["HF_HUB_DISABLE_XET"] = "1"
# Processes take icom from here, wherever they stand: the environment's own may be another checkout.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
# The bundled model's layers are too small to share out: a second thread only waits, above all on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")


TOGETHER = {
    "tests/icom/data/test_ray.py",
    "tests/icom/launch/test_image.py",
    "tests/icom/launch/test_pods.py",
    "tests/icom/launch/test_slurm.py",
    "tests/icom/launch/test_training_on_hosts.py",
    "tests/provisioning/test_health.py",
    "tests/provisioning/test_train_on.py",
}
"""Files whose tests share hosts, a cluster or an image that take long to make, or look for what is left behind."""
REAPER = pytest.StashKey[tuple[str, "subprocess.Popen[bytes]"]]()
LEFT = pytest.StashKey[dict[int, str]]()
ENDS_WITHIN = 20
"""Seconds that processes may take to end by themselves after the last test."""


def pytest_configure(config: pytest.Config) -> None:
    """Whatever ends this run, all that it started ends: see tests/support/reaper.py."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # As a shell starts what goes to the background. What the tests start would ignore their Ctrl-C, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):  # pytest-xdist's; they carry the mark themselves
        return
    mark, outer = uuid.uuid4().hex, os.environ.pop(reaper.MARK, None)
    environment = dict(os.environ)
    os.environ[reaper.MARK] = mark if outer is None else f"{outer}:{mark}"
    words = [sys.executable, "-I", reaper.__file__, mark]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, env=environment, start_new_session=True)
    config.stash[REAPER] = mark, process


@pytest.hookimpl(wrapper=True, trylast=True)  # before the terminal's summary
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    """A process that outlives the tests fails the run, as a failed test does."""
    yield  # the workers end
    warm.close()
    if REAPER in session.config.stash:
        mark, _ = session.config.stash[REAPER]
        deadline = time.monotonic() + ENDS_WITHIN
        while (left := reaper.marked(mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        session.config.stash[LEFT] = left
        if left and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name what outlived the tests."""
    for pid, command in config.stash.get(LEFT, {}).items():
        terminalreporter.write_line(f"left behind by the tests, and killed: {pid} {command}", red=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let the reaper do its work, and wait for it."""
    if REAPER in config.stash:
        config.stash[REAPER][1].communicate()


class OneByOne(LoadScopeScheduling):
    """Deals out single tests, but all of a file in TOGETHER to one worker.

    Not xdist_group: pytest-xdist 3.8 writes its groups where pytest 9.2 no longer reads them.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if file in TOGETHER else nodeid


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneByOne:
    """How workers get their tests."""
    return OneByOne(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: with several workers nobody waits at the end for one that has just begun.

    The tests of a file in TOGETHER are one piece of work, and stay in the file's order.
    """

    def is_short(item: pytest.Item) -> bool:
        return item.nodeid.partition("::")[0] not in TOGETHER and item.get_closest_marker("long") is None

    items.sort(key=is_short)


@pytest.fixture(autouse=True, scope="session")
def _own_places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Caches of the tests, not of the person who runs them."""
    base = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ICOM_CACHE_DIR", str(base / "latents"))
        patch.setenv("HF_HOME", str(base / "huggingface"))
        patch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
        warm.keep_environment()
        yield


@pytest.fixture(scope="session")
def hosts_possible() -> None:
    """For what needs hosts in namespaces."""
    if lacking := missing():
        pytest.skip(f"hosts cannot be made on this machine: it lacks {', '.join(lacking)}")


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """Address of moto's server, which stands for AWS."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.moto_server"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout
    try:
        yield server.stdout.readline().strip()
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps process-wide state; each test starts without."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def icom(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run the command in this process: `icom("train", "--seed", "1")`."""

    def run(*arguments: str) -> Result:
        from icom.cli import main

        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([*arguments])
        captured = capfd.readouterr()
        if "accelerate" in sys.modules:
            from accelerate.state import AcceleratorState

            AcceleratorState._reset_state(reset_partial_state=True)
        code = stop.value.code
        return Result(code if isinstance(code, int) else 0, captured.out, captured.err)

    return run


@pytest.fixture
def train(icom: Callable[..., Result]) -> Callable[..., Result]:
    """Train in this process: `train(output_dir=tmp_path, seed=1)`."""
    return lambda **options: icom(*train_arguments(**options))


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    """Start processes that train: `ranks(3, seed=1)`; in `out`, below their own folders."""
    started: list[Ranks] = []

    def start(count: int, *, of: dict[int, dict[str, str]] | None = None, **options: object) -> Ranks:
        words = {name: options.pop(name) for name in ("folder", "secret", "late") if name in options}
        arguments = ["-m", "icom", *train_arguments(**({"output_dir": "out"} | options))]
        started.append(Ranks(words.pop("folder", tmp_path), count, *arguments, of=of, **words))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for group in started:
        group.end()

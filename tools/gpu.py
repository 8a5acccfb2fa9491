"""The tests that need an NVIDIA GPU, on a machine without network whose Python has a CUDA PyTorch: `make test-gpu`.

    python tools/gpu.py wheels wheels-gpu --python 3.12     where there is a network: what that Python may lack
    python tools/gpu.py test --wheels wheels-gpu            there: says what it found, and runs the tests
    python tools/gpu.py run --wheels wheels-gpu -- -m icom bench --backend cuda     there: anything else

Standard library alone, so that it starts anywhere. PyTorch and what it brings are never carried: a CUDA build has
gigabytes. Of the rest the folder gets what the environment that runs `wheels` has; the others take out of it what their
Python lacks, and change nothing in that Python.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = (
    *("accelerate", "diffusers", "huggingface-hub", "jinja2", "matplotlib", "numpy", "omegaconf>=2.4", "pillow"),
    *("prodigyopt", "psutil", "pytest", "pytest-timeout", "pytest-xdist", "rich", "safetensors", "schedulefree"),
    *("tqdm", "transformers", "tyro"),
)
"""What icom and these tests import, beside torch."""
OF_TORCH = re.compile(r"torch|triton|nvidia-|cuda-|cu-|sympy|mpmath|networkx|setuptools")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
TESTS = ("tests/icom/backends/test_gpu.py", "tests/icom/backends/test_backends.py")
CARRIED = ROOT / ".cache/gpu-packages"
LATEST_END = 30
"""Seconds that the tests get to write their report when their time is up."""


def main(words: Sequence[str]) -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python tools/gpu.py", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    wheels = commands.add_parser("wheels", help="make the folder")
    wheels.add_argument("folder", type=Path)
    wheels.add_argument("--python", default="3.12", help="version of the Python on the machine with the GPU")
    wheels.add_argument("--leave_out", nargs="*", default=[], help="packages that it has for sure")
    test = commands.add_parser("test", help="run the tests")
    test.add_argument("--wheels", type=Path, help="the folder, where something is missing")
    test.add_argument("--reports", type=Path, help="folder for JUnit's XML")
    test.add_argument("--minutes", type=float, default=9.5, help="the tests end then, and report what they have")
    test.add_argument("--processes", type=int, default=4, help="tests at a time")
    test.add_argument("rest", nargs="*", help="words for pytest, after --")
    run = commands.add_parser("run", help="run Python with what was brought in")
    run.add_argument("--wheels", type=Path, help="the folder, where something is missing")
    run.add_argument("rest", nargs="+", help="words for Python, after --")
    options = parser.parse_args(words)
    if options.command == "wheels":
        return make_wheels(options.folder, options.python, options.leave_out)
    print(*what_is_there(), sep="\n", flush=True)
    shutil.rmtree(CARRIED, ignore_errors=True)
    if options.wheels is not None and (problem := bring_in(options.wheels)):
        print(problem)
        return 1
    if options.command == "run":
        return subprocess.run([sys.executable, *options.rest], env=environment(), check=False).returncode
    return run_tests(options.reports, options.minutes, options.processes, options.rest)


# ---------------------------------------------------------------- where there is a network


def make_wheels(folder: Path, version: str, leave_out: Iterable[str]) -> int:
    """Download what this environment has of NEEDED and its dependencies, built for another Python."""
    without = {_plain(name) for name in leave_out}
    pinned = [f"{name}=={found}" for name, found in closure(NEEDED, version).items() if name not in without]
    folder.mkdir(parents=True, exist_ok=True)
    target = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", version]
    places = [word for name in PLATFORMS for word in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), *target, *places, *pinned]
    code = subprocess.run(command, check=False).returncode
    size = sum(file.stat().st_size for file in folder.glob("*.whl")) / 2**20
    print(f"{folder}: {len(list(folder.glob('*.whl')))} wheels for Python {version}, {size:.1f} MiB")
    return code


def closure(names: Iterable[str], version: str) -> dict[str, str]:
    """The packages and all that they need under a version of Python, but for torch's: name -> version here."""
    from packaging.requirements import Requirement

    conditions = {"python_version": version, "python_full_version": f"{version}.0", "extra": ""}
    found: dict[str, str] = {}
    left = [Requirement(name) for name in names]
    while left:
        name = _plain(left.pop().name)
        if name in found or OF_TORCH.match(name):
            continue
        package = importlib.metadata.distribution(name)
        found[name] = package.version
        needs = [Requirement(text) for text in package.requires or ()]
        left += [need for need in needs if need.marker is None or need.marker.evaluate(conditions)]
    return dict(sorted(found.items()))


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# ---------------------------------------------------------------- where there is a GPU


def environment() -> dict[str, str]:
    """Variables with which Python finds icom, and what was brought in."""
    paths = [str(CARRIED), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def run_tests(reports: Path | None, minutes: float, processes: int, rest: Sequence[str]) -> int:
    """Run the tests, and end them in time."""
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // processes))}
    # Other versions of libraries may warn of other things, which is no news of the GPU.
    command = [sys.executable, "-m", "pytest", "-v", "-rfEsP", "-W", "default", "--durations=20", *TESTS, *rest]
    if processes > 1:
        command += ["-n", str(processes)]
    if reports is not None:
        reports.mkdir(parents=True, exist_ok=True)
        command += [f"--junitxml={reports / 'test-gpu.xml'}"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment() | threads)
    try:
        return process.wait(minutes * 60)
    except subprocess.TimeoutExpired:
        print(f"\n{minutes:g} minutes are over (--minutes): what has not run yet will not", flush=True)
        process.send_signal(signal.SIGINT)  # pytest reports then what it has
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LATEST_END)
        process.kill()
        process.wait()
        return 1


def what_is_there() -> list[str]:
    """A line each for the GPU, its driver, Python, PyTorch, and the packages."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        cards = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "none"
    except OSError:
        cards = "none: there is no nvidia-smi"
    of_torch = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"
    said = subprocess.run([sys.executable, "-c", of_torch], capture_output=True, text=True, check=False)
    torch = said.stdout.strip() or (said.stderr.strip().splitlines() or ["it cannot be started"])[-1]
    there = {_plain(package.metadata["Name"]): package.version for package in importlib.metadata.distributions()}
    names = [re.split(r"[<>=]", name)[0] for name in NEEDED]
    return [
        f"GPUs: {cards}",
        f"Python {platform.python_version()} ({sys.executable}), {len(os.sched_getaffinity(0))} cores",
        f"PyTorch, its CUDA, whether it sees a GPU: {torch}",
        f"packages: {', '.join(f'{name} {there[name]}' for name in names if name in there)}",
        f"missing: {', '.join(name for name in names if name not in there) or 'none'}",
    ]


def bring_in(wheels: Path) -> str | None:
    """Unpack what this Python lacks, or has too old, beside it.

    Returns:
        What is wrong, where it cannot be done.
    """
    offline = [sys.executable, "-m", "pip", "install", "--no-index", "--find-links", str(wheels)]
    asked = subprocess.run(
        [*offline, "--dry-run", "--quiet", "--report", "-", *NEEDED], capture_output=True, text=True, check=False
    )
    if asked.returncode == 0:
        chosen = [one["metadata"] for one in json.loads(asked.stdout)["install"]]
        lacking = [f"{package['name']}=={package['version']}" for package in chosen]
    else:  # what has nothing to do with icom may be wrong with that Python: time on a GPU is not to be lost for it
        print(f"pip cannot tell what is too old:\n{asked.stderr.strip()}\nonly what is not there at all is taken")
        there = {_plain(package.metadata["Name"]) for package in importlib.metadata.distributions()}
        carried = [file.name.split("-")[:2] for file in sorted(wheels.glob("*.whl"))]
        lacking = [f"{name}=={version}" for name, version in carried if _plain(name) not in there]
    print(f"taken from {wheels}: {', '.join(lacking) or 'nothing'}", flush=True)
    if lacking:
        unpack = [*offline, "--quiet", "--no-deps", "--target", str(CARRIED), *lacking]
        done = subprocess.run(unpack, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{wheels} cannot be unpacked:\n{done.stderr.strip()}"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

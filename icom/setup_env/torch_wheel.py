"""Which torch is installed, and from where: the CPU build, never CUDA's by accident."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from icom.setup_env.common import CONSTRAINTS, NETWORK_ERRORS, ROOT, SetupError, ask, call, last_lines, reason, say
from icom.setup_env.environment import Environment, python_version

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS = 4.0
# From this version on, pip reads the metadata alone in a dry run; an older one downloads the wheels.
REPORTING_PIP = (23, 3)
GPU_PACKAGE = re.compile(r"(nvidia|cuda)[-_.]|triton$", re.IGNORECASE)
PYPROJECT = ROOT / "pyproject.toml"


def pip(env: Environment) -> list[str | Path]:
    """The start of every pip command."""
    return [env.python, "-s", "-m", "pip", "--disable-pip-version-check", "--no-input"]


def torch_pin() -> str:
    """`torch==VERSION` from constraints.txt, the one place that says it."""
    for line in CONSTRAINTS.read_text().splitlines():
        if line.startswith("torch=="):
            return line.strip()
    raise SetupError(f"{CONSTRAINTS} has no line torch==VERSION")


def torch_requirement(python: Path, extras: Iterable[str]) -> str:
    """The torch to install: the pinned one, unless a chosen extra fixes another."""
    optional = read_project(python).get("optional-dependencies", {})
    for extra in extras:
        if extra not in optional:
            raise SetupError(f"there is no extra {extra!r}; there are: {', '.join(sorted(optional))}")
        for requirement in optional[extra]:
            if re.match(r"torch\s*==", requirement):
                return str(requirement)
    return torch_pin()


def read_project(python: Path) -> dict[str, Any]:
    """pyproject.toml's table `project`, read with `python`, which has pip.

    The standard library reads TOML only from Python 3.11 on; pip carries a reader for 3.10.
    """
    code = (
        "import json, sys\n"
        "try: import tomllib\n"
        "except ImportError: from pip._vendor import tomli as tomllib\n"
        "with open(sys.argv[1], 'rb') as f: print(json.dumps(tomllib.load(f)['project']))"
    )
    answer = ask([python, "-I", "-c", code, PYPROJECT])
    if answer.returncode:
        raise SetupError(f"cannot read {PYPROJECT}: {last_lines(answer.stderr, 1)}")
    project: dict[str, Any] = json.loads(answer.stdout)
    return project


def torch_suits(python: Path, requirement: str) -> bool:
    """Whether the installed torch, of whatever build, is the required version."""
    code = "from importlib.metadata import version; print(version('torch'))"
    answer = ask([python, "-I", "-c", code])
    wanted = requirement.partition("==")[2].strip()
    installed = answer.stdout.strip().partition("+")[0]
    if wanted.endswith(".*"):
        return f"{installed}.".startswith(wanted[:-1])
    return installed == wanted


def install_torch(built: Environment, env: Mapping[str, str], requirement: str) -> None:
    """Install the CPU build of torch, or say why that is not possible."""
    index, why = torch_index(env)
    say(f"{requirement} from {index or 'where pip is configured to look'} ({why})")
    if index:
        # --no-deps: PyTorch's indexes hold old copies of torch's dependencies; icom's own install
        # takes them from the usual place.
        call([*pip(built), "install", "--no-deps", "--index-url", index, requirement])
        return
    if env.get("ICOM_ALLOW_CUDA_TORCH") != "1":
        refuse_cuda(built, requirement)
    call([*pip(built), "install", requirement])


def torch_index(env: Mapping[str, str], cpu_index: str = CPU_INDEX) -> tuple[str | None, str]:
    """The index to take torch from (None: pip's own configuration decides), and why."""
    given = env.get("TORCH_INDEX_URL")
    if given:
        return given, "TORCH_INDEX_URL"
    problem = probe(f"{cpu_index}/torch/")
    if problem is None:
        return cpu_index, "PyTorch's CPU builds"
    return None, f"PyTorch's CPU index does not answer: {problem}"


def probe(url: str, seconds: float = PROBE_SECONDS) -> str | None:
    """None if `url` answers in time, else what is wrong with it."""
    result: list[str | None] = []

    def fetch() -> None:
        try:
            with urllib.request.urlopen(url, timeout=seconds):
                result.append(None)
        except (*NETWORK_ERRORS, ValueError) as error:
            result.append(reason(error))

    # A thread, because urllib's timeout leaves out the name look-up, which may take minutes.
    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else f"no answer within {seconds:g} s"


def refuse_cuda(built: Environment, requirement: str) -> None:
    """Stop if pip would install torch's CUDA build, which a CPU machine has no use for."""
    update_pip(built)
    answer = ask([*pip(built), "install", "--dry-run", "--quiet", "--report", "-", requirement])
    if answer.returncode:
        raise SetupError(
            f"pip finds no {requirement} for Python {python_version(built.python)}:\n"
            f"{last_lines(answer.stderr)}\n"
            "TORCH_INDEX_URL=... names another index to take torch from"
        )
    names = sorted(item["metadata"]["name"] for item in json.loads(answer.stdout)["install"])
    unwanted = [name for name in names if GPU_PACKAGE.match(name)]
    if unwanted:
        raise SetupError(
            f"pip would install the CUDA build of torch, with {len(unwanted)} packages such as "
            f"{', '.join(unwanted[-3:])}: some 3 GB to download and 7 GB on the disk, all of it useless "
            "on a CPU. Nothing was installed. Either\n"
            "  - name an index that has the CPU build: TORCH_INDEX_URL=https://... (a mirror of "
            f"{CPU_INDEX}),\n"
            "  - or, if that is what you want, allow it: ICOM_ALLOW_CUDA_TORCH=1"
        )


def update_pip(built: Environment) -> None:
    """Bring pip to a version whose dry run reports without downloading."""
    code = "import pip; print(pip.__version__)"
    version = ask([built.python, "-I", "-c", code]).stdout.strip()
    if tuple(map(int, re.findall(r"\d+", version)[:2])) >= REPORTING_PIP:
        return
    minimum = ".".join(map(str, REPORTING_PIP))
    answer = ask([*pip(built), "install", "--quiet", "--upgrade", f"pip>={minimum}"])
    if answer.returncode:
        # Not fatal: where there is no newer pip to be had, the wheels are mostly local files.
        say(f"pip {version} stays, there is no newer one here; looking for torch may take longer")

"""Builds and enters the environment that icom runs in; the logic behind the Makefile.

This file runs before anything is installed: standard library only. `make` starts it as
`python3 -I icom/setup_env.py COMMAND` (-I keeps icom/ itself off the import path, so that no
module of ours can hide one of Python's).

Settings come from the environment, where make puts what is given on its command line:

ENV_MANAGER            conda or venv; default: conda where there is one, else venv
VENV                   folder of the venv; default .venv
EXTRAS                 extras of pyproject.toml to install as well, comma separated (aws,ipex,...)
TORCH_INDEX_URL        the index to take torch from; default: PyTorch's CPU index, if it answers
ICOM_ALLOW_CUDA_TORCH  1 accepts a torch that brings the CUDA packages along
TORCH_VERSION          for `constraints`: move the pin of torch to this version
CONDA_PREFIX_DIR       where install-miniconda installs; default ~/miniforge3
CONDA_INSTALLER_URL    what it installs; default: the latest Miniforge
HF_ENDPOINT            the Hugging Face Hub or a mirror of it
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MIN_PYTHON = (3, 10)
ENV_NAME = "diffuser_icom"
ENV_FILE = ROOT / "environment.yml"
CONSTRAINTS = ROOT / "constraints.txt"
PYPROJECT = ROOT / "pyproject.toml"
STAMP = "icom-setup.json"  # inside the environment: it goes when the environment goes

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS = 4.0
# From this version on, pip reads the metadata alone in a dry run; an older one downloads the wheels.
REPORTING_PIP = (23, 3)
GPU_PACKAGE = re.compile(r"(nvidia|cuda)[-_.]|triton$", re.IGNORECASE)

# Extras whose pins (an old torch, Intel's own index) cannot live with the others.
UNPINNED_EXTRAS = ("ipex", "ccl")
# `make constraints` resolves once for each of these.
PINNED_PYTHONS = ("3.10", "3.11", "3.12", "3.13")

PICTURES = "sd-concepts-library/dicoo/resolve/main/concept_images/{}.jpeg"
PICTURE_COUNT = 5
PICTURE_FOLDER = "dicoo"

# What hosts in tests need besides Python packages: command -> Debian's package.
TEST_TOOLS = {"sshd": "openssh-server", "ip": "iproute2", "mpirun.mpich": "mpich", "mpirun.openmpi": "openmpi-bin"}

NETWORK_ERRORS = (OSError, http.client.HTTPException)  # urllib.error.URLError is an OSError


class SetupError(Exception):
    """What went wrong and what to do about it, in words for the user."""


class Environment(NamedTuple):
    """An environment to install into: a venv's or conda environment's folder."""

    manager: str  # "conda" or "venv"
    prefix: Path
    conda: str = ""  # the conda, mamba or micromamba that made it

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.prefix / "bin" / "python"

    def variables(self, env: Mapping[str, str]) -> dict[str, str]:
        """`env` as it would be after activation."""
        changed = {k: v for k, v in env.items() if k not in ("PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")}
        changed["PATH"] = f"{self.prefix / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
        changed["VIRTUAL_ENV" if self.manager == "venv" else "CONDA_PREFIX"] = str(self.prefix)
        # Unlike a venv, a conda environment would import what lies in ~/.local.
        changed["PYTHONNOUSERSITE"] = "1"
        return changed

    def how_to_enter(self) -> str:
        """What to type before `icom` and `accelerate` commands: a sentence with a line for bash, zsh or sh."""
        return f"to type icom commands in this shell: {self.activation()}"

    def activation(self) -> str:
        """The line for a shell. It has to work in one that has never heard of conda, as after install-miniconda."""
        if self.manager == "venv":
            return f"source {shlex.quote(str(self.prefix / 'bin' / 'activate'))}"
        name = Path(self.conda).name
        # `activate` is a function of the shell, which `conda init` would define in shells started later.
        hook = "shell hook --shell posix" if name in ("mamba", "micromamba") else "shell.posix hook"
        define = f'eval "$({shlex.quote(self.conda)} {hook})"'
        return f"{define} && {name} activate {shlex.quote(str(self.prefix))}"


def say(message: str) -> None:
    """One line of progress; flushed, so that it stays in order with what the tools print."""
    print(f"icom setup: {message}", flush=True)


def call(command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> None:
    """Run a command in the open; it must succeed."""
    words = [str(word) for word in command]
    try:
        code = subprocess.run(words, cwd=ROOT, env=env, check=False).returncode
    except OSError as error:
        raise SetupError(f"cannot run {words[0]}: {error.strerror}") from None
    if code:
        raise SetupError(f"this command failed (exit code {code}): {shlex.join(words)}")


def ask(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Run a command for its output; exit code 127 when it cannot be started."""
    words = [str(word) for word in command]
    try:
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError as error:
        return subprocess.CompletedProcess(words, 127, "", str(error))


def last_lines(text: str, count: int = 3) -> str:
    """The end of a tool's error output, where the reason stands."""
    return "\n".join(text.strip().splitlines()[-count:])


# ---------------------------------------------------------------- which environment


def conda_prefix(env: Mapping[str, str]) -> Path:
    """Where install-miniconda puts a conda, and where one is looked for besides PATH."""
    return Path(env.get("CONDA_PREFIX_DIR") or "~/miniforge3").expanduser()


def find_conda(env: Mapping[str, str]) -> str | None:
    """The conda, mamba or micromamba to use, if there is one."""
    for name in ("conda", "mamba", "micromamba"):
        found = shutil.which(name, path=env.get("PATH"))
        if found:
            return found
    # A conda that was installed but never added to PATH by `conda init`.
    for place in (env.get("CONDA_EXE"), env.get("MAMBA_EXE"), str(conda_prefix(env) / "bin" / "conda")):
        if place and os.access(place, os.X_OK):
            return place
    return None


def choose_manager(env: Mapping[str, str]) -> tuple[str, str | None, str]:
    """Which manager builds the environment, the conda to call if it is conda, and why."""
    forced = env.get("ENV_MANAGER", "")
    if forced not in ("", "conda", "venv"):
        raise SetupError(f"ENV_MANAGER={forced}: it takes conda or venv")
    if forced == "venv":
        return "venv", None, "ENV_MANAGER=venv asks for it"
    conda = find_conda(env)
    if conda:
        return "conda", conda, "ENV_MANAGER=conda asks for it" if forced else f"found {conda}"
    if forced:
        raise SetupError(
            "ENV_MANAGER=conda, but no conda, mamba or micromamba is on PATH: run "
            "`make install-miniconda` first, or leave ENV_MANAGER out to get a venv"
        )
    return "venv", None, "no conda, mamba or micromamba here"


def conda_env_prefix(conda: str) -> Path | None:
    """The folder of our conda environment, if it exists."""
    listing = ask([conda, "env", "list", "--json"])
    if listing.returncode:
        raise SetupError(f"`{conda} env list --json` failed: {last_lines(listing.stderr)}")
    for prefix in json.loads(listing.stdout)["envs"]:
        if Path(prefix).name == ENV_NAME:
            return Path(prefix)
    return None


def venv_prefix(env: Mapping[str, str]) -> Path:
    """The folder of our venv."""
    return ROOT / (env.get("VENV") or ".venv")


def python_version(python: Path) -> str | None:
    """`3.11.7`, or None where there is no interpreter that works."""
    answer = ask([python, "-I", "-S", "-c", "import platform; print(platform.python_version())"])
    return answer.stdout.strip() if answer.returncode == 0 else None


def build_conda(conda: str, prefix: Path | None) -> Environment:
    """Create or update the conda environment from environment.yml."""
    verb = "create" if prefix is None else "update"
    # conda, mamba and micromamba each have their own --yes; the variables work with all of them.
    env = {**os.environ, "CONDA_ALWAYS_YES": "1", "MAMBA_ALWAYS_YES": "1"}
    command = [conda, "env", verb]
    if Path(conda).name == "micromamba":  # has `env create` in recent versions only
        command = [conda, "create" if prefix is None else "install"]
    try:
        call([*command, "-n", ENV_NAME, "-f", str(ENV_FILE)], env)
    except SetupError as error:
        raise SetupError(f"{error}\n`ENV_MANAGER=venv` does without conda") from None
    prefix = conda_env_prefix(conda)
    if prefix is None:
        raise SetupError(f"{conda} reported success, but `{conda} env list` shows no {ENV_NAME}")
    return Environment("conda", prefix, conda)


def build_venv(prefix: Path) -> Environment:
    """Create the venv; rebuild one whose Python is broken or not the chosen one."""
    made = Environment("venv", prefix)
    if prefix.exists() and any(prefix.iterdir()) and not (prefix / "pyvenv.cfg").exists():
        raise SetupError(f"{prefix} exists and is not a venv: remove it, or choose another with VENV=folder")
    if not venv_matches(made):
        if importlib.util.find_spec("ensurepip") is None:
            raise SetupError(
                f"{sys.executable} cannot make a venv with pip in it. Debian, Ubuntu: "
                "apt-get install python3-venv; or choose another with PYTHON=..."
            )
        call([sys.executable, "-m", "venv", "--clear", prefix])
    return made


def venv_matches(venv: Environment) -> bool:
    """Whether the venv works and has the chosen Python's minor version."""
    version = python_version(venv.python)
    return version is not None and version.split(".")[:2] == platform.python_version().split(".")[:2]


# ---------------------------------------------------------------- whether anything is to do


def stamp_key(python: str) -> str:
    """A hash of all that decides what is installed, but for the extras."""
    digest = hashlib.sha256(python.encode())
    for path in (PYPROJECT, CONSTRAINTS, ENV_FILE):
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def installed_extras(env: Environment) -> tuple[bool, set[str]]:
    """Whether the last set-up finished and nothing has changed since, and the extras it installed."""
    try:
        stamp = json.loads((env.prefix / STAMP).read_text())
        extras = set(stamp["extras"])
    except (OSError, ValueError, KeyError, TypeError):
        return False, set()
    version = python_version(env.python)
    return version is not None and stamp.get("key") == stamp_key(version), extras


def wanted_extras(env: Mapping[str, str], more: Iterable[str]) -> set[str]:
    """The extras from the command line and from EXTRAS."""
    return {name for name in [*more, *re.split(r"[,\s]+", env.get("EXTRAS", ""))] if name}


def ensure(env: Mapping[str, str], more_extras: Iterable[str], explain: bool = False) -> Environment:
    """The environment, built or brought up to date first if need be."""
    manager, conda, why = choose_manager(env)
    prefix = conda_env_prefix(conda) if conda else venv_prefix(env)
    where = f"conda environment {ENV_NAME}" if conda else f"venv {prefix}"
    if explain:
        say(f"{where} ({why})")
    wanted = wanted_extras(env, more_extras)
    have: set[str] = set()
    if prefix is not None:
        current = Environment(manager, prefix, conda or "")
        fresh, have = installed_extras(current)
        if fresh and wanted <= have and (conda or venv_matches(current)):
            if explain:
                say("up to date, nothing to do")
                say(current.how_to_enter())
            return current
    if not explain:
        say(f"{where} ({why})")
    # What an earlier set-up added stays: `make single-node-test` must not undo `make test`.
    extras = sorted(wanted | have)
    if prefix is not None:
        (prefix / STAMP).unlink(missing_ok=True)  # an interrupted set-up is not a finished one
    built = build_conda(conda, prefix) if conda else build_venv(venv_prefix(env))
    install(built, env, extras)
    key = stamp_key(python_version(built.python) or "")
    (built.prefix / STAMP).write_text(json.dumps({"key": key, "extras": extras}) + "\n")
    say("done")
    if explain:
        say(built.how_to_enter())
    return built


# ---------------------------------------------------------------- what goes into it


def pip(env: Environment) -> list[str | Path]:
    """The start of every pip command."""
    return [env.python, "-s", "-m", "pip", "--disable-pip-version-check", "--no-input"]


def install(built: Environment, env: Mapping[str, str], extras: Sequence[str]) -> None:
    """Install torch, then icom with its dependencies as constraints.txt pins them."""
    requirement = torch_requirement(built.python, extras)
    if torch_suits(built.python, requirement):
        say(f"{requirement} is installed already")
    else:
        install_torch(built, env, requirement)
    target = f".[{','.join(extras)}]" if extras else "."
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        lines = CONSTRAINTS.read_text().splitlines()
        # The chosen torch is in place by now and may differ from the pin (extra ipex).
        kept = [requirement, *(line for line in lines if not line.startswith("torch=="))]
        constraints.write_text("\n".join(kept) + "\n")
        call([*pip(built), "install", "--constraint", constraints, "--editable", target])


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


def reason(error: Exception) -> str:
    """A network error in a few words."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__


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


# ---------------------------------------------------------------- the other chores


def install_conda(env: Mapping[str, str]) -> None:
    """Install a conda (Miniforge), unless there is one."""
    existing = find_conda(env)
    if existing:
        say(f"{existing} is here already, nothing to do")
        return
    prefix = conda_prefix(env)
    if prefix.exists():
        raise SetupError(f"{prefix} exists but holds no conda: remove it, or give CONDA_PREFIX_DIR=folder")
    installer = f"Miniforge3-{platform.system().replace('Darwin', 'MacOSX')}-{platform.machine()}.sh"
    url = (
        env.get("CONDA_INSTALLER_URL")
        or f"https://github.com/conda-forge/miniforge/releases/latest/download/{installer}"
    )
    say(f"downloading {url}")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "installer.sh")
        try:
            script.write_bytes(download(url))
        except NETWORK_ERRORS as error:
            raise SetupError(
                f"cannot download {url}: {reason(error)}. CONDA_INSTALLER_URL=... names another "
                "installer; `make setup-master` works without conda too"
            ) from None
        verify(script, url)
        call(["bash", script, "-b", "-p", prefix])
    say(f"installed {prefix}; `make setup-master` finds it there")


def verify(script: Path, url: str) -> None:
    """Check the download against the .sha256 file that lies beside it, where there is one."""
    try:
        expected = download(f"{url}.sha256").decode().split()[0].lower()
    except (*NETWORK_ERRORS, UnicodeDecodeError, IndexError):
        say("there is no .sha256 file beside the installer: it could not be verified")
        return
    found = hashlib.sha256(script.read_bytes()).hexdigest()
    if found != expected:
        raise SetupError(f"{url} is damaged: sha256 is {found}, expected {expected}. Nothing was installed")


def download(url: str) -> bytes:
    """The bytes at `url`, all of them or an exception."""
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            body: bytes = response.read()
            return body
    except ValueError as error:  # not a URL
        raise urllib.error.URLError(str(error)) from None


def download_pictures(env: Mapping[str, str]) -> None:
    """Fetch ICOM's five training pictures from the Hub into ./dicoo: all of them or none."""
    folder = ROOT / PICTURE_FOLDER
    names = [f"{i}.jpeg" for i in range(PICTURE_COUNT)]
    if all((folder / name).exists() for name in names):
        say(f"{folder} has the {PICTURE_COUNT} pictures already")
        return
    hub = (env.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=f".{PICTURE_FOLDER}-") as temporary:
        for i, name in enumerate(names):
            url = f"{hub}/{PICTURES.format(i)}"
            try:
                picture = download(url)
            except NETWORK_ERRORS as error:
                raise SetupError(
                    f"cannot download {url}: {reason(error)}. --train_data_dir=bundled trains on "
                    "pictures that need no download, HF_ENDPOINT=... names a mirror"
                ) from None
            if not picture.startswith(b"\xff\xd8"):
                raise SetupError(f"{url} answered with something that is not a JPEG picture (a log-in page?)")
            Path(temporary, name).write_bytes(picture)
        folder.mkdir(exist_ok=True)
        for name in names:
            Path(temporary, name).replace(folder / name)
    say(f"{PICTURE_COUNT} pictures are in {folder}")


def install_test_tools(env: Mapping[str, str]) -> None:
    """Install what hosts in tests need where apt-get may; else say what is missing. Never fails: other tests run."""
    path = os.pathsep.join([env.get("PATH", os.defpath), "/usr/sbin", "/sbin"])  # sbin is not in everybody's PATH
    missing = {command: package for command, package in TEST_TOOLS.items() if shutil.which(command, path=path) is None}
    if not missing:
        return
    why = "that takes root on Debian or Ubuntu"
    if os.geteuid() == 0 and shutil.which("apt-get", path=path):
        say(f"installing {', '.join(missing.values())} for hosts in tests (Debian starts its sshd where systemd runs)")
        quiet = {**env, "DEBIAN_FRONTEND": "noninteractive"}
        try:
            call(["apt-get", "-qq", "update"], quiet)
            call(["apt-get", "-qq", "install", "--yes", "--no-install-recommends", *missing.values()], quiet)
        except SetupError as error:
            why = str(error)
        else:
            return
    say(f"tests on several hosts are skipped: no {', '.join(missing)} here, and could not install them ({why})")


def refresh_constraints(env: Mapping[str, str]) -> None:
    """Write constraints.txt: the newest direct dependencies that install together, per Python."""
    torch = f"torch=={env['TORCH_VERSION']}" if env.get("TORCH_VERSION") else torch_pin()
    pins: dict[str, dict[str, str]] = {}  # distribution -> Python -> version
    with tempfile.TemporaryDirectory() as folder:
        venv = Environment("venv", Path(folder, "venv"))
        call([sys.executable, "-m", "venv", venv.prefix])
        update_pip(venv)
        direct = direct_requirements(read_project(venv.python))
        for version in PINNED_PYTHONS:
            say(f"resolving for Python {version}")
            # pip resolves for another Python than its own only for wheels and into a folder.
            answer = ask(
                [
                    *pip(venv),
                    "install",
                    "--dry-run",
                    "--quiet",
                    "--ignore-installed",
                    "--report",
                    "-",
                    "--python-version",
                    version,
                    "--only-binary",
                    ":all:",
                    "--target",
                    folder,
                    torch,
                    *direct,
                ]
            )
            if answer.returncode:
                raise SetupError(f"no solution for Python {version}:\n{last_lines(answer.stderr, 8)}")
            for item in json.loads(answer.stdout)["install"]:
                metadata = item["metadata"]
                found = metadata["version"].partition("+")[0]
                pins.setdefault(canonical(metadata["name"]), {})[version] = found
    names = sorted({canonical(requirement) for requirement in direct})
    head = (
        "# Written by `make constraints`: the versions that icom is tested with. Only direct dependencies;\n"
        "# the one place that says which torch is installed.\n"
    )
    lines = [line for name in names for line in pin_lines(name, pins[name])]
    CONSTRAINTS.write_text(head + "\n".join(lines) + "\n")
    say(f"wrote {CONSTRAINTS.name}: {len(names)} packages")


def direct_requirements(project: Mapping[str, Any]) -> list[str]:
    """The requirements of icom and of its extras, but for those that cannot be pinned with the rest."""
    groups = [project["dependencies"]]
    optional = project.get("optional-dependencies", {})
    groups += [optional[extra] for extra in optional if extra not in UNPINNED_EXTRAS]
    everything = {requirement for group in groups for requirement in group}
    return sorted(one for one in everything if canonical(one) != project["name"])  # icom[trackers]


def canonical(requirement: str) -> str:
    """The name in a requirement, in the spelling that all tools agree on."""
    name = re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def pin_lines(name: str, versions: Mapping[str, str]) -> list[str]:
    """`name==version`, with markers where Pythons differ. `versions`: Python -> version, oldest first."""
    pythons = list(versions)
    starts = [i for i, python in enumerate(pythons) if i == 0 or versions[python] != versions[pythons[i - 1]]]
    lines = []
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        bounds = [f'python_version >= "{pythons[start]}"'] if start else []
        bounds += [f'python_version < "{pythons[end]}"'] if end else []
        marker = f" ; {' and '.join(bounds)}" if bounds else ""
        lines.append(f"{name}=={versions[pythons[start]]}{marker}")
    return lines


def run(env: Mapping[str, str], extras: Iterable[str], command: Sequence[str]) -> None:
    """Show a command and become it, inside the environment."""
    built = ensure(env, extras)
    print(f"+ {shlex.join(command)}", flush=True)
    variables = built.variables(env)
    try:
        os.execvpe(command[0], list(command), variables)
    except OSError as error:
        raise SetupError(f"cannot run {command[0]}: {error.strerror}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line that the Makefile uses."""
    parser = argparse.ArgumentParser(prog="setup_env.py", description="Build and enter icom's environment.")
    commands = parser.add_subparsers(dest="command", required=True)
    setup, enter = commands.add_parser("setup"), commands.add_parser("run")
    for command in (setup, enter):
        command.add_argument("--extra", action="append", default=[], help="install this extra as well")
    enter.add_argument("words", nargs="+", help="the command to run in the environment, after --")
    for name in ("install-conda", "pictures", "constraints", "test-tools"):
        commands.add_parser(name)
    options = parser.parse_args(arguments)
    env = os.environ
    try:
        # install-conda brings a newer Python with it.
        if sys.version_info < MIN_PYTHON and options.command != "install-conda":
            raise SetupError(
                f"{sys.executable} is Python {platform.python_version()}; icom needs "
                f"{'.'.join(map(str, MIN_PYTHON))} or newer: give one with PYTHON=..."
            )
        if options.command == "setup":
            ensure(env, options.extra, explain=True)
        elif options.command == "run":
            run(env, options.extra, options.words)
        elif options.command == "install-conda":
            install_conda(env)
        elif options.command == "pictures":
            download_pictures(env)
        elif options.command == "test-tools":
            install_test_tools(env)
        else:
            refresh_constraints(env)
    except SetupError as error:
        print(f"icom setup: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

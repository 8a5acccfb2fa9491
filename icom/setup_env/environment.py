"""Which environment icom is set up in, and making it: conda's or a venv."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from icom.setup_env.common import ROOT, SetupError, ask, call, last_lines

ENV_NAME = "diffuser_icom"
ENV_FILE = ROOT / "environment.yml"


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

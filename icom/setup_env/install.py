"""Installs into the environment what is not there yet, and runs commands in it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from icom.setup_env.common import CONSTRAINTS, SetupError, call, say
from icom.setup_env.environment import (
    ENV_FILE,
    ENV_NAME,
    Environment,
    build_conda,
    build_venv,
    choose_manager,
    conda_env_prefix,
    python_version,
    venv_matches,
    venv_prefix,
)
from icom.setup_env.torch_wheel import PYPROJECT, install_torch, pip, torch_requirement, torch_suits

STAMP = "icom-setup.json"  # inside the environment: it goes when the environment goes


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


def run(env: Mapping[str, str], extras: Iterable[str], command: Sequence[str]) -> None:
    """Show a command and become it, inside the environment."""
    built = ensure(env, extras)
    print(f"+ {shlex.join(command)}", flush=True)
    variables = built.variables(env)
    try:
        os.execvpe(command[0], list(command), variables)
    except OSError as error:
        raise SetupError(f"cannot run {command[0]}: {error.strerror}") from None

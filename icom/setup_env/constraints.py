"""`make constraints`: the newest versions that install together."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from icom.setup_env.common import CONSTRAINTS, SetupError, ask, call, last_lines, say
from icom.setup_env.environment import Environment
from icom.setup_env.torch_wheel import pip, read_project, torch_pin, update_pip

# Extras whose pins (an old torch, Intel's own index) cannot live with the others.
UNPINNED_EXTRAS = ("ipex", "ccl")
# `make constraints` resolves once for each of these.
PINNED_PYTHONS = ("3.10", "3.11", "3.12", "3.13")


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
            wanted = "install --dry-run --quiet --ignore-installed --report - --only-binary :all:".split()
            wanted += ["--python-version", version, "--target", folder, torch, *direct]
            answer = ask([*pip(venv), *wanted])
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

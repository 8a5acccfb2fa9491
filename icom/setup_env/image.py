"""`make image` and `make push`: builds the Dockerfile with docker, podman or buildah, whichever is there."""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from icom.setup_env.common import ROOT, SetupError, ask, call, say
from icom.setup_env.environment import venv_prefix

IMAGE = "icom:cpu"
TOOLS = ("docker", "podman", "buildah")
# Settings that the Dockerfile takes under the same name.
BUILD_ARGUMENTS = ("BASE", "EXTRAS", "ICOM_ALLOW_CUDA_TORCH", "TORCH_INDEX_URL")


def build_image(env: Mapping[str, str]) -> None:
    """Build the image that IMAGE names."""
    tool, image = find_tool(env), env.get("IMAGE") or IMAGE
    arguments = {name: env[name] for name in BUILD_ARGUMENTS if env.get(name)}
    arguments["REVISION"] = revision()
    pythons = [Path(sys.executable), venv_prefix(env) / "bin" / "python"]
    with tempfile.TemporaryDirectory() as folder:
        words = [tool, "build", "--tag", image, *shlex.split(env.get("BUILD_OPTIONS", ""))]
        for name, value in arguments.items():
            words += ["--build-arg", f"{name}={value}"]
        for name, file in secrets(pip_settings(pythons), env, Path(folder)).items():
            words += ["--secret", f"id={name},src={file}"]
        say(f"{image} with {tool}")
        # Docker's older builder knows no secrets.
        call([*words, ROOT], {**os.environ, "DOCKER_BUILDKIT": "1"})
    size = ask([tool, "images", "--format", "{{.Size}}", image]).stdout.strip()
    say(f"{image} is built: {size or 'of unknown size'}. Try it: {tool} run --rm {image} icom demo")


def push_image(env: Mapping[str, str]) -> None:
    """Push the image that IMAGE names to its registry; build it first where there is none."""
    image = env.get("IMAGE") or ""
    if "/" not in image:
        raise SetupError(
            "where to? `make push IMAGE=REGISTRY/NAME:TAG`, such as IMAGE=registry.example.com/team/icom:cpu"
        )
    tool = find_tool(env)
    if not ask([tool, "images", "--quiet", image]).stdout.strip():
        build_image(env)
    call([tool, "push", *shlex.split(env.get("PUSH_OPTIONS", "")), image])
    say(f"pushed {image}")


def find_tool(env: Mapping[str, str]) -> str:
    """The program to build with: the first that works here, or the one that CONTAINER_TOOL names."""
    wanted = env.get("CONTAINER_TOOL")
    problems = []
    for tool in (wanted,) if wanted else TOOLS:
        if shutil.which(tool, path=env.get("PATH")) is None:
            problems.append(f"no {tool}")
            continue
        # docker is a client, whose daemon may not run, or not for this user.
        answer = ask([tool, "info"])
        if answer.returncode == 0:
            return tool
        problems.append(f"{tool} does not work ({(answer.stderr or answer.stdout).strip().splitlines()[-1]})")
    raise SetupError(
        f"{'; '.join(problems)}. An image is built by docker, podman or buildah: install one of them (Debian, Ubuntu: "
        "apt-get install buildah), or name one that works: CONTAINER_TOOL=..."
    )


def revision() -> str:
    """The commit that the image is built from; empty where there is no git."""
    commit = ask(["git", "rev-parse", "HEAD"]).stdout.strip()
    changed = ask(["git", "status", "--porcelain"]).stdout.strip()
    return f"{commit}-changed" if commit and changed else commit


def pip_settings(pythons: Iterable[Path]) -> dict[str, str]:
    """What pip is told on this machine, by its files and variables, such as a mirror to load from.

    Args:
        pythons: the first that has pip is asked.
    """
    words = "-m pip --disable-pip-version-check config list".split()
    answers = (ask([python, *words]) for python in pythons)
    answer = next((answer for answer in answers if answer.returncode == 0), None)
    settings: dict[str, str] = {}
    # In the order of rising precedence; each line is NAME='VALUE', quoted as Python quotes it.
    for section in ("global.", "install.", ":env:."):
        for line in answer.stdout.splitlines() if answer else ():
            name, _, value = line.partition("=")
            if name.startswith(section):
                settings[name.removeprefix(section)] = str(ast.literal_eval(value))
    return settings


def secrets(pip: Mapping[str, str], env: Mapping[str, str], folder: Path) -> dict[str, Path]:
    """The files that a build needs and an image must not keep: a pip.conf, and the certificates to trust.

    Args:
        pip: from `pip_settings`.
        env: where SSL_CERT_FILE may name such certificates.
        folder: to write in.
    """
    found = {}
    settings = {name: value for name, value in pip.items() if name not in ("cert", "cache-dir")}
    certificates = pip.get("cert") or env.get("SSL_CERT_FILE")
    if certificates and Path(certificates).is_file():
        found["ca.pem"] = Path(certificates)
        settings["cert"] = "/run/secrets/ca.pem"
    if settings:
        found["pip.conf"] = folder / "pip.conf"
        found["pip.conf"].touch(mode=0o600)  # a mirror's address may hold a password
        lines = [f"{name} = {value}".replace("\n", "\n    ") for name, value in settings.items()]
        found["pip.conf"].write_text("\n".join(["[global]", *lines, ""]))
    return found

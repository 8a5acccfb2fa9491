"""A small stand-in for a clone of icom that `make` sets up without a network, and a web server on loopback."""

from __future__ import annotations

import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.command import ROOT

JPEG = b"\xff\xd8\xff\xe0 a picture"
TORCH = "9.0"


# A build backend of a few lines, because setuptools would have to be downloaded.
BACKEND = """
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(folder + "/icom-0.1.0-py3-none-any.whl", "w") as wheel:
        for name, text in FILES.items():
            wheel.writestr(name, text)
    return "icom-0.1.0-py3-none-any.whl"
"""


def wheel_files(name: str, version: str, requires: tuple[str, ...] = (), extras: str = "") -> dict[str, str]:
    """The files of a wheel that holds nothing but its metadata and an empty module."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", extras]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    return {
        f"{name.replace('-', '_')}_module.py": "",
        f"{info}/METADATA": "\n".join(line for line in lines if line) + "\n",
        f"{info}/WHEEL": tags,
        f"{info}/RECORD": "",
    }


def make_wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> Path:
    """A wheel that pip installs."""
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in wheel_files(name, version, requires).items():
            wheel.writestr(file, text)
    return path


def closed_port() -> int:
    """A port of this machine where nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Clone:
    """A small stand-in for a clone of icom: our set-up, with dependencies that need no network."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wheels = folder.parent / "wheels"
        self.tools = folder.parent / "tools"
        for place in (folder, folder / "icom", folder / "provisioning", folder / "tests", self.tools):
            place.mkdir(parents=True, exist_ok=True)
        for name in ("Makefile", "environment.yml", "icom/__init__.py"):
            shutil.copy(ROOT / name, folder / name)
        shutil.copytree(
            ROOT / "icom/setup_env", folder / "icom/setup_env", ignore=shutil.ignore_patterns("__pycache__")
        )
        (folder / "constraints.txt").write_text(f"torch=={TORCH}\n")
        files = wheel_files("icom", "0.1.0", ("torch", "gadget; extra == 'dev'"), "Provides-Extra: dev")
        (folder / "backend.py").write_text(f"FILES = {files!r}\n{BACKEND}")
        (folder / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
            '[project]\nname = "icom"\nversion = "0.1.0"\ndependencies = ["torch"]\n'
            '[project.optional-dependencies]\ndev = ["gadget"]\n'
        )
        make_wheel(self.wheels, "gadget", "1.0")
        # Nothing of the machine's own: no conda, no pip configuration, and no way out by https, so
        # that PyTorch's index is out of reach wherever the tests run.
        self.env = {
            "PATH": os.pathsep.join([str(self.tools), "/usr/bin", "/bin"]),
            "PYTHON": sys.executable,
            "HOME": str(folder.parent),
            "https_proxy": f"http://127.0.0.1:{closed_port()}",
            "no_proxy": "127.0.0.1",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": self.wheels.as_uri(),
            "PIP_NO_CACHE_DIR": "1",
            "ENV_MANAGER": "",
        }

    def make(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run make as a user would."""
        command = ["make", "--no-print-directory", *words]
        settings = {**self.env, **env}
        return subprocess.run(command, cwd=self.folder, env=settings, capture_output=True, text=True, check=False)

    def installed(self, prefix: str | Path = ".venv") -> set[str]:
        """The `name-version` of what is in an environment."""
        folders = (self.folder / prefix).glob("lib/python3*/site-packages/*.dist-info")
        return {folder.name.removesuffix(".dist-info") for folder in folders}

    def add_conda(self, name: str = "conda", folder: Path | None = None) -> tuple[Path, Path]:
        """A stand-in conda: makes real environments, writes down how it was called, activates as the real one does.

        That is: by a function of the shell, which only its hook defines; the program itself refuses to `activate`.

        Args:
            name: conda, mamba or micromamba.
            folder: where the program is; by default one that is in PATH.

        Returns:
            The file with its calls, and the folder of the environment that it makes.
        """
        log, prefix = self.folder.parent / "conda.log", self.folder.parent / "envs" / "diffuser_icom"
        hook = ["shell.posix", "hook"] if name == "conda" else ["shell", "hook", "--shell", "posix"]
        script = (folder or self.tools) / name
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(
            f"""#!{sys.executable}
import json, os, subprocess, sys
with open({str(log)!r}, "a") as f: f.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1:] == {hook!r}:
    print('{name}() {{ [ "$1" = activate ] && PATH="$2/bin:$PATH" && export PATH CONDA_PREFIX="$2"; }}')
elif "activate" in sys.argv:
    sys.exit("CondaError: Run 'conda init' before 'conda activate'")
elif "list" in sys.argv:
    print(json.dumps({{"envs": [{str(prefix)!r}] if os.path.exists({str(prefix)!r}) else []}}))
elif "create" in sys.argv:
    subprocess.run([sys.executable, "-m", "venv", {str(prefix)!r}], check=True)
"""
        )
        script.chmod(0o755)
        return log, prefix


@contextmanager
def server(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A web server for `folder` on loopback: its address and the paths asked for so far."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *args: object) -> None:
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}", asked
        finally:
            running.shutdown()
            thread.join()

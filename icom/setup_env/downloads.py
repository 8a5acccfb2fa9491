"""What `make` fetches besides the environment: a conda, pictures, what tests need."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from icom.setup_env.common import NETWORK_ERRORS, ROOT, SetupError, call, download, reason, say
from icom.setup_env.environment import conda_prefix, find_conda

PICTURES = "sd-concepts-library/dicoo/resolve/main/concept_images/{}.jpeg"
PICTURE_COUNT = 5
PICTURE_FOLDER = "dicoo"
# What hosts in tests need besides Python packages: command -> Debian's package.
TEST_TOOLS = {
    "sshd": "openssh-server",
    "ip": "iproute2",
    "mpirun.mpich": "mpich",
    "mpirun.openmpi": "openmpi-bin",
    "sbatch": "slurm-wlm",
    "munged": "munge",
    "gcc": "gcc",
    "/usr/include/stdio.h": "libc6-dev",
    "/usr/include/slurm/spank.h": "libslurm-dev",
    **{name: name for name in ("buildah", "catatonit", "docker-registry", "mmdebstrap", "podman", "runc")},
}
"""Command, or file, and Debian's package that has it."""
BROWSER = {"chromium-headless-shell": "chromium-headless-shell"}
"""Likewise, to open pages in: 96 MB to fetch, 306 MB on the disk. Ubuntu has none: what else is missing does not wait
for it."""


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


def _is_there(tool: str, path: str) -> bool:
    return Path(tool).exists() if tool.startswith("/") else shutil.which(tool, path=path) is not None


def install_test_tools(env: Mapping[str, str]) -> None:
    """Install what tests need where apt-get may; else say what is missing. Never fails: other tests run."""
    _install(TEST_TOOLS, "tests on several hosts", env)
    _install(BROWSER, "tests in a browser", env)


def _install(tools: Mapping[str, str], whose: str, env: Mapping[str, str]) -> None:
    path = os.pathsep.join([env.get("PATH", os.defpath), "/usr/sbin", "/sbin"])  # sbin is not in everybody's PATH
    missing = {tool: package for tool, package in tools.items() if not _is_there(tool, path)}
    if not missing:
        return
    why = "that takes root on Debian or Ubuntu"
    if os.geteuid() == 0 and shutil.which("apt-get", path=path):
        sshd = " (Debian starts its sshd where systemd runs)" if "sshd" in missing else ""
        say(f"installing {', '.join(missing.values())} for {whose}{sshd}")
        quiet = {**env, "DEBIAN_FRONTEND": "noninteractive"}
        try:
            call(["apt-get", "-qq", "update"], quiet)
            call(["apt-get", "-qq", "install", "--yes", "--no-install-recommends", *missing.values()], quiet)
        except SetupError as error:
            why = str(error)
        else:
            return
    say(f"{whose} are skipped: no {', '.join(missing)} here, and could not install them ({why})")

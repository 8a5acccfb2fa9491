"""Put the project and its environment on a node, and prove there that it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from provisioning import project
from provisioning.cluster import Node
from provisioning.progress import Progress
from provisioning.ssh import send, step

FOLDER = "icom"
"""The project on a node, in the home folder of its user."""
DONE = f"{FOLDER}/.installed"
"""Holds the digest of what was installed and has passed its tests."""
_ARCHIVE = ".icom.tar.gz"
_INSTALL_SECONDS = 3600

# The environment stays: an update of the project keeps what has not changed.
UNPACK = (
    "{ [ ! -e runs/lock ] || flock -n runs/lock true || "
    "{ echo 'A training runs here, from the files that are to be replaced. Wait for its end.' >&2; false; }; } && "
    f"rm -rf {FOLDER}.new && mkdir {FOLDER}.new && tar -xzf {_ARCHIVE} -C {FOLDER}.new && rm {_ARCHIVE} && "
    f"{{ [ ! -d {FOLDER}/.venv ] || mv {FOLDER}/.venv {FOLDER}.new/; }} && "
    f"rm -rf {FOLDER} && mv {FOLDER}.new {FOLDER}"
)
# What make setup-master itself needs, and mpirun where PyPI has none. A fresh image looks for updates in the
# background: installing waits for its lock by itself, `update` does not.
_TOOLS = r"""
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }
get() { as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=600 "$@"; }
mpi=$([ "$(uname -m)" = x86_64 ] || command -v mpirun >/dev/null || echo mpich)
if [ -z "$mpi" ] && command -v make >/dev/null && python3 -c 'import ensurepip' 2>/dev/null; then exit 0; fi
if command -v apt-get >/dev/null; then
  for attempt in $(seq 60); do get update && break; sleep 10; done
  get install --yes --no-install-recommends make python3-venv $mpi
elif command -v dnf >/dev/null; then
  as_root dnf -q -y install make python3.11 $mpi
else
  echo 'This image has no make or no venv for Python, and neither apt-get nor dnf to get them.' >&2
  exit 1
fi
"""
_CONDA = f"make -s -C {FOLDER} install-miniconda || echo 'no conda can be had here: a venv does as well'"
_SETUP = {
    False: f"make -s -C {FOLDER} setup-master EXTRAS=mpi",
    # Its build for CUDA brings CUDA's libraries along; the image has the driver.
    True: f"make -s -C {FOLDER} setup-master EXTRAS=mpi TORCH_INDEX_URL=https://download.pytorch.org/whl/cu130",
}
_DOCTOR = f"make -s -C {FOLDER} run CMD='icom doctor'"
_TRAINING = f"make -s -C {FOLDER} single-node-test && rm -rf {FOLDER}/textual_inversion_output"


def install(connection: Any, node: Node, gpus: int, check: Callable[[], None], progress: Progress) -> None:
    """Install icom on a node, unless this very content is there already and has passed its tests.

    Args:
        connection: an open one to the node.
        node: which one that is.
        gpus: of the nodes of the cluster; with some, PyTorch comes with CUDA.
        check: called before each step; what it raises stops.
        progress: told what is going on.

    Raises:
        IcomError: the step that failed, and the node's last lines.
        UsageError: there is no repository here to install from.
    """
    wanted = project.digest()
    if step(connection, node, f"cat {DONE} 2>/dev/null || true", check).strip() == wanted:
        return
    with progress.doing(node.role, "getting icom's files"):
        send(connection, node, _ARCHIVE, project.archive(), check)
        step(connection, node, UNPACK, check)
    steps = (
        ("make, venv", _TOOLS),
        ("conda", _CONDA),
        ("make setup-master", _SETUP[gpus > 0]),
        ("icom doctor", _DOCTOR),
        ("make single-node-test", _TRAINING),
    )
    for what, command in steps:
        with progress.doing(node.role, what) as show_line:
            step(connection, node, command, check, _INSTALL_SECONDS, show_line)
    step(connection, node, f"echo {wanted} > {DONE}", check)

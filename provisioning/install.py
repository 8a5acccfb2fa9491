"""Put the project and its environment on a node, and prove there that it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from provisioning import project
from provisioning.cluster import Node
from provisioning.progress import Progress
from provisioning.script import Script, script
from provisioning.ssh import send, step

FOLDER = "icom"
"""The project on a node, in the home folder of its user."""
DONE = f"{FOLDER}/.installed"
"""Holds the digest of what was installed and has passed its tests."""
_ARCHIVE = ".icom.tar.gz"
_INSTALL_SECONDS = 3600

_CUDA = " TORCH_INDEX_URL=https://download.pytorch.org/whl/cu130"
"""Its build for CUDA brings CUDA's libraries along; the image has the driver."""


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
        step(connection, node, script("unpack_project", _ARCHIVE, FOLDER), check)
    steps: tuple[tuple[str, str | Script], ...] = (
        ("make, venv", script("install_tools")),
        ("conda", script("install_conda", FOLDER)),
        ("make setup-master", f"make -s -C {FOLDER} setup-master EXTRAS=mpi" + (_CUDA if gpus else "")),
        ("icom doctor", f"make -s -C {FOLDER} run CMD='icom doctor'"),
        ("make single-node-test", script("try_training", FOLDER)),
    )
    for what, command in steps:
        with progress.doing(node.role, what) as show_line:
            step(connection, node, command, check, _INSTALL_SECONDS, show_line)
    step(connection, node, f"echo {wanted} > {DONE}", check)

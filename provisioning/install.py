"""Put the project and its environment on a node, and prove there that it trains."""

from __future__ import annotations

from provisioning import project
from provisioning.progress import Progress
from provisioning.script import Script, script
from provisioning.ssh import SshTransport

FOLDER = "icom"
"""The project on a node, in the home folder of its user."""
DONE = f"{FOLDER}/.installed"
"""Holds the digest of what was installed and has passed its tests."""
_ARCHIVE = ".icom.tar.gz"
_INSTALL_SECONDS = 3600

_CUDA = " TORCH_INDEX_URL=https://download.pytorch.org/whl/cu130"
"""Its build for CUDA brings CUDA's libraries along; the image has the driver."""


def install(node: SshTransport, role: str, gpus: int, progress: Progress) -> None:
    """Install icom on a node, unless this very content is there already and has passed its tests.

    Args:
        node: the way there.
        role: of the node.
        gpus: of the nodes of the cluster; with some, PyTorch comes with CUDA.
        progress: told what is going on.

    Raises:
        IcomError: the step that failed, and the node's last lines.
        UsageError: there is no repository here to install from.
    """
    wanted = project.digest()
    if node.run(f"cat {DONE} 2>/dev/null || true").strip() == wanted:
        return
    with progress.doing(role, "getting icom's files"):
        node.send({_ARCHIVE: project.archive()})
        node.run(script("unpack_project", _ARCHIVE, FOLDER))
    steps: tuple[tuple[str, str | Script], ...] = (
        ("make, venv", script("install_tools")),
        ("conda", script("install_conda", FOLDER)),
        ("make setup-master", f"make -s -C {FOLDER} setup-master EXTRAS=mpi" + (_CUDA if gpus else "")),
        ("icom doctor", f"make -s -C {FOLDER} run CMD='icom doctor'"),
        ("make single-node-test", script("try_training", FOLDER)),
    )
    for what, command in steps:
        with progress.doing(role, what) as show_line:
            node.run(command, seconds=_INSTALL_SECONDS, on_line=show_line)
    node.send({DONE: f"{wanted}\n".encode()})

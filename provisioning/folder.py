"""The folder of a cluster on this computer: its ssh key, the host keys of its nodes, an ssh config.

It holds what only this computer has to know: losing it loses the way in, nothing else. No decision rests on it.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from icom import names
from icom.errors import UsageError
from icom.files import write_atomically
from icom.names import Malformed
from provisioning.cluster import MASTER, Cluster, Node, resource_name
from provisioning.hostkeys import make_key
from provisioning.sshfiles import host_block, known_host


@dataclass(frozen=True)
class ClusterFolder:
    """The folder of one cluster on this computer."""

    path: Path

    @property
    def key(self) -> Path:
        """Private half of the cluster's own ssh key."""
        return self.path / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """Host keys of the cluster's nodes, under their instance ids."""
        return self.path / "known_hosts"

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F`."""
        return self.path / "ssh_config"

    def client_key(self) -> str:
        """Public half of the cluster's ssh key, which is made now if there is none.

        Raises:
            UsageError: others can read the private half.
        """
        self._make()
        if not self.key.exists():
            made = make_key()
            write_private(self.key, made.private.encode())
            write_atomically(self.key.with_suffix(".pub"), f"{made.public} icom\n".encode(), "$ICOM_CLUSTERS_DIR")
        return self.key.with_suffix(".pub").read_text().strip()

    def has_client_key(self, cluster: Cluster) -> bool:
        """Whether the ssh key here is that of the cluster's key pair, whatever comment either has."""
        public_key = cluster.key["PublicKey"] if cluster.key else ""
        public = self.key.with_suffix(".pub")
        return self.key.exists() and public.exists() and public.read_text().split()[:2] == public_key.split()[:2] != []

    def remember(self, aliases: list[str], public_key: str) -> None:
        """Record a host key under names (instance ids, or run and role while there is no id yet).

        Raises:
            Malformed: a name is none, or the key; nothing was written.
        """
        added = known_host(aliases, public_key)
        self._make()
        before = self.known_hosts.read_text() if self.known_hosts.exists() else ""
        write_atomically(self.known_hosts, f"{before}{added}".encode(), "$ICOM_CLUSTERS_DIR")

    def host_keys(self, name: str) -> list[str]:
        """The keys that are recorded under a name, oldest first."""
        lines = self.known_hosts.read_text().splitlines() if self.known_hosts.exists() else []
        split = [line.partition(" ") for line in lines]
        return [key for aliases, _, key in split if name in aliases.split(",")]

    def host_key(self, name: str) -> str | None:
        """The oldest key that is recorded under a name."""
        return next(iter(self.host_keys(name)), None)

    def forget(self, name: str, public_key: str) -> None:
        """Remove the record of one key under one name."""
        lines = self.known_hosts.read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.strip() != f"{name} {public_key}"]
        write_atomically(self.known_hosts, "".join(kept).encode(), "$ICOM_CLUSTERS_DIR")

    def adopt(self, node: Node) -> bool:
        """Record a node's key under its id; whether it is known here.

        A call of icom provision that was killed right after it launched the node has recorded it by run and role.
        """
        if self.host_key(node.id):
            return True
        if key := self.host_key(name_before_launch(node.run, node.role)):
            self.remember([node.id], key)
            return True
        return False

    def write_ssh_config(self, nodes: tuple[Node, ...], user: str, identity: Path) -> None:
        """A config for `ssh -F` and Include with one Host per node, that trusts the recorded keys and nothing else.

        Raises:
            Malformed: a role, an address, the user or a path is none that ssh could be told; nothing was written.
        """
        more: dict[str, Path | str] = {
            "IdentityFile": identity,
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": self.known_hosts,
            "GlobalKnownHostsFile": "/dev/null",
        }
        blocks = [host_block(ssh_names(self.path.name, node.role), node.address, node.id, more, user) for node in nodes]
        write_atomically(self.ssh_config, "\n".join(blocks).encode(), "$ICOM_CLUSTERS_DIR")

    def update_addresses(self, nodes: tuple[Node, ...]) -> None:
        """Put new addresses into the ssh config: public ones change with every start."""
        lines = self.ssh_config.read_text().splitlines(keepends=True)
        places = {names.line("  HostKeyAlias", names.word(node.id)): node for node in nodes if node.address}
        for number, line in enumerate(lines):
            if line in places and lines[number - 1].startswith("  HostName "):
                lines[number - 1] = names.line("  HostName", names.address(places[line].address))
        write_atomically(self.ssh_config, "".join(lines).encode(), "$ICOM_CLUSTERS_DIR")

    def remove(self) -> None:
        """Delete the folder, keys included."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.key.exists() and self.key.stat().st_mode & 0o077:
            raise UsageError(f"Others can read the private key {self.key}. Close it: chmod 600 {self.key}")


def ssh_names(cluster: str, role: str) -> list[str]:
    """What ssh calls a node: icom-NAME-worker-1; the master also answers to icom-NAME. Distinct across clusters.

    Raises:
        Malformed: it is no role of a node.
    """
    name = resource_name(cluster)
    return [f"{name}-{names.role(role)}", *([name] if role == MASTER else [])]


def clusters_folder() -> Path:
    """$ICOM_CLUSTERS_DIR, else $XDG_DATA_HOME/icom/clusters, else ~/.local/share/icom/clusters; absolute.

    Raises:
        UsageError: ssh cannot be told of files there.
    """
    own = os.environ.get("ICOM_CLUSTERS_DIR")
    data = Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "icom" / "clusters"
    folder = (Path(own).expanduser() if own else data).absolute()
    try:
        names.ssh_path(folder)
    except Malformed as error:
        raise UsageError(f"{error} $ICOM_CLUSTERS_DIR, or $XDG_DATA_HOME, says where clusters' keys are.") from None
    return folder


def folder_of(account: str, region: str, cluster: str) -> ClusterFolder:
    """The folder of a cluster below `clusters_folder`."""
    return ClusterFolder(clusters_folder() / names.account(account) / names.word(region) / names.word(cluster))


def places_of(cluster: str) -> list[tuple[str, str]]:
    """(account, region) of the clusters of this name that this computer has made."""
    found = clusters_folder().glob(f"*/*/{cluster}/ssh_config")
    return sorted((path.parts[-4], path.parts[-3]) for path in found)


SSH_CONFIGS = "*/*/*/ssh_config"
"""Where the ssh configs of all clusters are, below `clusters_folder`: as deep as `folder_of` makes them."""


def name_before_launch(run: str, role: str) -> str:
    """What stands for the instance id in known_hosts before EC2 has told it."""
    return f"{run}.{role}"


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, from its first moment on; whole or not at all."""
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)

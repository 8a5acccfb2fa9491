"""Keys that are made here: the ssh key of a cluster, and the first host key of each node; the cluster's folder.

A node's first host key reaches it through its user data, so that the very first connection can be verified. The
folder holds what only this computer has to know: losing it loses the way in, nothing else. No decision rests on it.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from icom.errors import UsageError
from icom.files import write_atomically
from provisioning.cluster import MASTER, Node, resource_name


@dataclass(frozen=True)
class KeyPair:
    """An ed25519 key pair in OpenSSH's formats."""

    private: str
    public: str
    """`ssh-ed25519 AAAA…`, without a comment."""


def make_key() -> KeyPair:
    """A new key pair from the system's random numbers."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return KeyPair(private.decode(), public.decode())


@dataclass(frozen=True)
class Folder:
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
            _write_private(self.key, made.private)
            write_atomically(self.key.with_suffix(".pub"), f"{made.public} icom\n".encode(), "$ICOM_CLUSTERS_DIR")
        return self.key.with_suffix(".pub").read_text().strip()

    def has_key(self, public_key: str) -> bool:
        """Whether the cluster's ssh key here is this one, whatever comment either has."""
        public = self.key.with_suffix(".pub")
        return self.key.exists() and public.exists() and public.read_text().split()[:2] == public_key.split()[:2] != []

    def remember(self, names: list[str], public_key: str) -> None:
        """Record a host key under names (instance ids, or run and role while there is no id yet)."""
        self._make()
        before = self.known_hosts.read_text() if self.known_hosts.exists() else ""
        content = f"{before}{','.join(names)} {public_key}\n"
        write_atomically(self.known_hosts, content.encode(), "$ICOM_CLUSTERS_DIR")

    def host_keys(self, name: str) -> list[str]:
        """The keys that are recorded under a name, oldest first."""
        lines = self.known_hosts.read_text().splitlines() if self.known_hosts.exists() else []
        split = [line.partition(" ") for line in lines]
        return [key for names, _, key in split if name in names.split(",")]

    def host_key(self, name: str) -> str | None:
        """The oldest key that is recorded under a name."""
        return next(iter(self.host_keys(name)), None)

    def forget(self, name: str, public_key: str) -> None:
        """Remove the record of one key under one name."""
        lines = self.known_hosts.read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.strip() != f"{name} {public_key}"]
        write_atomically(self.known_hosts, "".join(kept).encode(), "$ICOM_CLUSTERS_DIR")

    def settle(self, node: Node) -> bool:
        """Record a node's key under its id; whether it is known here.

        A call of icom provision that was killed right after it launched the node has recorded it by run and role.
        """
        if self.host_key(node.id):
            return True
        if key := self.host_key(unborn_name(node.run, node.role)):
            self.remember([node.id], key)
            return True
        return False

    def write_ssh_config(self, nodes: tuple[Node, ...], user: str, identity: Path) -> None:
        """A config for `ssh -F` and Include with one Host per node, that trusts the recorded keys and nothing else."""
        blocks = []
        for node in nodes:
            blocks.append(
                f"Host {' '.join(ssh_names(self.path.name, node.role))}\n"
                f"  HostName {node.address}\n"
                f"  HostKeyAlias {node.id}\n"
                f"  User {user}\n"
                f'  IdentityFile "{identity}"\n'
                "  IdentitiesOnly yes\n"
                f'  UserKnownHostsFile "{self.known_hosts}"\n'
                "  GlobalKnownHostsFile /dev/null\n"
                "  StrictHostKeyChecking yes\n"
                "  BatchMode yes\n"
                "  ConnectTimeout 10\n"
                "  ServerAliveInterval 15\n"
                "  ServerAliveCountMax 4\n"
            )
        write_atomically(self.ssh_config, "\n".join(blocks).encode(), "$ICOM_CLUSTERS_DIR")

    def update_addresses(self, nodes: tuple[Node, ...]) -> None:
        """Put new addresses into the ssh config: public ones change with every start."""
        text = self.ssh_config.read_text()
        for node in nodes:
            text = re.sub(rf"HostName \S+(\s+HostKeyAlias {node.id}\s)", rf"HostName {node.address}\1", text)
        write_atomically(self.ssh_config, text.encode(), "$ICOM_CLUSTERS_DIR")

    def remove(self) -> None:
        """Delete the folder, keys included."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.key.exists() and self.key.stat().st_mode & 0o077:
            raise UsageError(f"Others can read the private key {self.key}. Close it: chmod 600 {self.key}")


def ssh_names(cluster: str, role: str) -> list[str]:
    """What ssh calls a node: icom-NAME-worker-1; the master also answers to icom-NAME. Distinct across clusters."""
    name = resource_name(cluster)
    return [f"{name}-{role}", *([name] if role == MASTER else [])]


def clusters_folder() -> Path:
    """$ICOM_CLUSTERS_DIR, else $XDG_DATA_HOME/icom/clusters, else ~/.local/share/icom/clusters; absolute."""
    own = os.environ.get("ICOM_CLUSTERS_DIR")
    data = Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "icom" / "clusters"
    return (Path(own).expanduser() if own else data).absolute()


def folder_of(account: str, region: str, cluster: str) -> Folder:
    """The folder of a cluster below `clusters_folder`."""
    return Folder(clusters_folder() / account / region / cluster)


def places_of(cluster: str) -> list[tuple[str, str]]:
    """(account, region) of the clusters of this name that this computer has made."""
    found = clusters_folder().glob(f"*/*/{cluster}/ssh_config")
    return sorted((path.parts[-4], path.parts[-3]) for path in found)


SSH_CONFIGS = "*/*/*/ssh_config"
"""Where the ssh configs of all clusters are, below `clusters_folder`: as deep as `folder_of` makes them."""


def unborn_name(run: str, role: str) -> str:
    """What stands for the instance id in known_hosts before EC2 has told it."""
    return f"{run}.{role}"


def _write_private(path: Path, text: str) -> None:
    """Create a file that only its owner can read, from its first moment on."""
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)

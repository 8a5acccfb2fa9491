"""Hosts that accept ssh, all on this machine, for tests of what runs on several.

`with cluster(3) as hosts:` makes them and takes them away. A host is a set of Linux namespaces (network, processes,
mounts, hostname, IPC) on a bridge that nothing else is connected to. It sees the machine's files, but has its own
hostname, address, /tmp, home folder, /dev/shm, /run, /etc/hosts and users, its own processes, and its own sshd with its
own host key. `ssh NAME` works between all of them as it does between machines that know each other: the key is in
~/.ssh, and the other hosts' keys are in known_hosts.

Nothing can stay behind. Every namespace lives as long as a process that reads a pipe whose other end this process
holds: when the block is left, or when this process dies of whatever, the kernel ends all that ran in it and takes its
mounts, links and files (which are in memory) along.

A host with `own_root` stands for a machine that was just started: its disk is its own (tests/support/disk.py), it can
do whatever it likes to its files, and nobody has set up ssh on it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count as counting
from pathlib import Path
from typing import IO, overload

from tests.support import disk
from tests.support.namespaces import PATH, ClusterError, Command, Space, call, check, without_interruption

# RFC 2544 sets these addresses aside for tests of networks. The bridge is connected to nothing, so that two clusters
# may use them at the same time.
NETWORK = "198.18.0.{}"
FIRST_ADDRESS = 11
INTERFACE = "eth0"
HOME = Path("/run/home")
_SSH = Path("/run/ssh")  # sshd's files
_COMMANDS = ("bash", "ip", "mount", "nsenter", "ssh", "ssh-keygen", "sshd", "unshare")
_NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--mount-proc")

# What a host does first.
_INIT = r"""
set -eu
name=$1 home=$2 users=$3 shadow=$4
shift 4
hostname "$name"
mount -t tmpfs -o mode=0700 tmpfs /mnt
for folder in "$@"; do  # those that a private /tmp would hide
    mkdir -p "/mnt/tmp$folder"
    mount --rbind "$folder" "/mnt/tmp$folder"
done
mkdir -p /mnt/tmp/tmp
chmod 1777 /mnt/tmp/tmp
mount --rbind /mnt/tmp/tmp /tmp
mkdir /mnt/cgroup
mount --rbind /sys/fs/cgroup /mnt/cgroup
mount -t sysfs sysfs /sys  # this network's interfaces
mount --rbind /mnt/cgroup /sys/fs/cgroup
umount -l /mnt
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=0755 tmpfs /run
mkdir -p -m 0700 "$home/.ssh" /run/ssh
mkdir /run/sshd
echo "$users" > /run/passwd
echo "$shadow" > /run/shadow
echo "127.0.0.1 localhost" > /run/hosts
for file in passwd shadow hosts; do
    chmod 0644 "/run/$file"
    mount --bind "/run/$file" "/etc/$file"
done
ip link set lo up
"""


def missing() -> list[str]:
    """What this machine lacks to make hosts; empty when nothing."""
    found = [f"the command {name}" for name in _COMMANDS if shutil.which(name, path=PATH) is None]
    if found:
        return found
    if os.geteuid() != 0:
        return ["the user root"]
    attempt = subprocess.run(["unshare", *_NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return [] if attempt.returncode == 0 else [f"the right to make namespaces ({attempt.stderr.strip()})"]


@dataclass(frozen=True)
class HostKey:
    """An ed25519 key pair, as ssh-keygen writes it."""

    private: str
    public: str

    @classmethod
    def new(cls, comment: str = "") -> HostKey:
        """A fresh pair."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "key")
            call(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)])
            return cls(path.read_text(), path.with_suffix(".pub").read_text().strip())


@dataclass
class Host:
    """One host of a cluster.

    Attributes:
        name: its hostname, known to the others.
        address: its IPv4 address, known to the others under `name`.
        key: of its sshd.
        home: root's home folder.
    """

    name: str
    address: str
    key: HostKey
    home: Path
    _space: Space
    _switch: Space
    _port: str

    def command(
        self, words: Sequence[str | Path], env: Mapping[str, str] | None = None, folder: str | Path | None = None
    ) -> list[str]:
        """The words that run `words` on this host when run on the machine.

        Args:
            words: command and arguments.
            env: the whole environment; the default is this process's without what points to its user's own. HOME is
                the host's own either way.
            folder: working directory as the host sees it; its home where there is none.
        """
        kept = os.environ if env is None else env
        dropped = () if env is not None else ("SSH_AUTH_SOCK", "TMPDIR", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR")
        variables = {name: value for name, value in kept.items() if name not in dropped} | {"HOME": str(self.home)}
        return [
            *("nsenter", f"--target={self._space.pid}", "--mount", "--uts", "--ipc", "--net"),
            f"--pid=/proc/{self._space.pid}/ns/pid_for_children",
            # The signal may be blocked here, see without_interruption.
            *(
                "env",
                "-i",
                "--default-signal=INT",
                f"--chdir={folder or self.home}",
                *(f"{name}={value}" for name, value in variables.items()),
            ),
            *map(str, words),
        ]

    def start(
        self,
        words: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        folder: str | Path | None = None,
        output: int | IO[str] = subprocess.PIPE,
        errors: int | IO[str] = subprocess.STDOUT,
    ) -> Command:
        """Start a command on this host, as `command` explains; it dies with the host."""
        entering = self.command(words, env, folder)
        with without_interruption():
            started = Command(
                entering,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C is for who made the host, which then ends it
            )
            self._space.commands.append(started)
        return started

    def run(
        self,
        words: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        folder: str | Path | None = None,
        timeout: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host to its end, as `command` explains; output and errors apart.

        Raises:
            subprocess.TimeoutExpired: after `timeout` seconds, if there is one; the command was killed.
        """
        with self.start(words, env, folder, errors=subprocess.PIPE) as started:
            output, errors = started.communicate(timeout=timeout)
        return subprocess.CompletedProcess([*map(str, words)], started.returncode, output, errors)

    def path(self, inside: str | Path) -> Path:
        """Where the machine sees a file of this host: `path("/tmp/x")`, `path(HOME / "y")`."""
        return Path(f"/proc/{self._space.pid}/root", *Path(inside).parts[1:])

    def processes(self, pattern: str = "") -> list[int]:
        """The machine's pids of this host's processes whose command line contains the regular expression."""
        space = _namespace(f"{self._space.pid}/ns/pid_for_children")
        found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return sorted(
            pid for pid in found if _namespace(f"{pid}/ns/pid") == space and re.search(pattern, _command_line(pid))
        )

    def start_sshd(self) -> None:
        """Accept ssh. Returns when it does."""
        self._call([shutil.which("sshd", path=PATH) or "sshd", "-f", _SSH / "config", "-E", _SSH / "log"])

    def kill_sshd(self) -> list[int]:
        """SIGKILL for sshd: the one that listens and those of all sessions. What they started goes on. Gives pids."""
        pids = self.processes(r"^(\S*/)?sshd\b")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return pids

    def save(self, folder: str | Path) -> None:
        """Keep what the disk of a host with `own_root` holds in a new folder, for `Cluster.add(image=folder)`."""
        disk.save(self._space.pid, Path(folder))

    def link_down(self) -> None:
        """Pull the cable: what is sent is lost, without an error."""
        self._set_link("down")

    def link_up(self) -> None:
        """Plug the cable in again."""
        self._set_link("up")

    def _call(self, words: Sequence[str | Path]) -> None:
        check(self.run(words, {"PATH": PATH}))

    def _set_link(self, state: str) -> None:
        call(["nsenter", f"--target={self._switch.pid}", "--net", "ip", "link", "set", self._port, state])


@dataclass
class Cluster(Sequence[Host]):
    """Hosts in the order they came; made by `cluster`."""

    _switch: Space
    _stack: ExitStack
    _show: tuple[Path, ...]  # folders below /tmp that hosts without `own_root` share with the machine
    _see: tuple[Path, ...]  # folders that the others can read
    _client: HostKey = field(default_factory=lambda: HostKey.new("test cluster"))
    _hosts: list[Host] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=counting)

    def __len__(self) -> int:
        return len(self._hosts)

    @overload
    def __getitem__(self, index: int) -> Host: ...

    @overload
    def __getitem__(self, index: slice) -> list[Host]: ...

    def __getitem__(self, index: int | slice) -> Host | list[Host]:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def add(
        self,
        name: str | None = None,
        key: HostKey | None = None,
        *,
        address: str | None = None,
        own_root: bool = False,
        image: str | Path | None = None,
    ) -> Host:
        """One more host, which accepts ssh and which all others know.

        Args:
            name: default node1, node2, … by place.
            key: of its sshd; default a new one.
            address: default the next in the network.
            own_root: whether it has a root file system of its own. Its home is /root then. The names of all hosts are
                known on it, as from a name server, but it has no keys and no sshd runs.
            image: a disk that `Host.save` kept, to start from; implies `own_root`.
        """
        number = next(self._numbers)
        name = name or f"node{number}"
        address = address or NETWORK.format(FIRST_ADDRESS + number)
        if own_root or image:
            arguments = [name, str(image or ""), *map(str, self._see)]
            space = Space.make(self._stack, _NAMESPACES, disk.INIT, *arguments)
            home = Path("/root")
        else:
            users = "\n".join(_home(line) for line in Path("/etc/passwd").read_text().splitlines())
            # An account that is locked may not log in, not even with a key.
            arguments = [name, str(HOME), users, "root:*:1::::::", *map(str, self._show)]
            space = Space.make(self._stack, _NAMESPACES, _INIT, *arguments)
            home = HOME
        host = Host(name, address, key or HostKey.new(name), home, space, self._switch, f"port{number}")
        self._connect(host, f"plug{number}")
        if home == HOME:
            self._let_in(host)
        self._hosts.append(host)
        self._introduce()
        return host

    def remove(self, host: Host) -> None:
        """Power a host off and take it away: everything on it ends, its disk is gone."""
        self._hosts.remove(host)
        host._space.close()

    def _let_in(self, host: Host) -> None:
        """Run sshd on it, for everybody who has the hosts' key."""
        files = {
            _SSH / "host_key": host.key.private,
            _SSH / "config": textwrap.dedent(f"""\
                ListenAddress {host.address}
                HostKey {_SSH / "host_key"}
                PidFile none
                UsePAM no
                PermitRootLogin prohibit-password
                PasswordAuthentication no
                KbdInteractiveAuthentication no
                """),
            HOME / ".ssh/authorized_keys": self._client.public + "\n",
            HOME / ".ssh/id_ed25519": self._client.private,
        }
        for file, content in files.items():
            path = host.path(file)
            path.touch(mode=0o600)
            path.write_text(content)
        host.start_sshd()

    def _connect(self, host: Host, plug: str) -> None:
        switch = ["nsenter", f"--target={self._switch.pid}", "--net"]
        # Fixed by the address: others remember it, and a host may come back.
        hardware = "02:00:" + ":".join(f"{int(part):02x}" for part in host.address.split("."))
        pair = ["type", "veth", "peer", "name", plug, "address", hardware, "netns", str(host._space.pid)]
        call([*switch, "ip", "link", "add", host._port, *pair])
        call([*switch, "ip", "link", "set", host._port, "master", "switch", "up"])
        for words in (
            f"ip link set {plug} name {INTERFACE}",
            f"ip address add {host.address}/24 dev {INTERFACE}",
            f"ip link set {INTERFACE} up",
        ):
            host._call(words.split())

    def _introduce(self) -> None:
        """Tell all hosts of each other."""
        names = "".join(f"{host.address} {host.name}\n" for host in self)
        keys = "".join(f"{host.name},{host.address} {host.key.public}\n" for host in self)
        config = "".join(f"Host {host.name}\n  HostName {host.address}\n" for host in self)
        config += "Host *\n  User root\n  StrictHostKeyChecking yes\n"
        for host in self:
            host.path("/run/hosts").write_text(f"127.0.0.1 localhost\n{names}")
            if host.home != HOME:
                continue
            host.path(HOME / ".ssh/known_hosts").write_text(keys)
            host.path(HOME / ".ssh/config").write_text(config)


@contextmanager
def cluster(count: int, show: Iterable[str | Path] = ()) -> Iterator[Cluster]:
    """Hosts node0, node1, … that know each other and accept ssh; gone afterwards.

    Args:
        count: how many; `Cluster.add` makes more.
        show: folders below /tmp that all hosts but those with `own_root` see. The current folder and Python's own are
            among them anyway; the rest of /tmp is not, each host having one of its own.

    Raises:
        ClusterError: something is `missing`, or making a host failed.
    """
    if lacking := missing():
        raise ClusterError(f"cannot make hosts on this machine: it lacks {', '.join(lacking)}")
    needed = {Path(folder).resolve() for folder in (Path.cwd(), sys.prefix, sys.base_prefix)}
    shown = needed | {Path(folder).resolve() for folder in show}
    below = tuple(sorted(folder for folder in shown if folder.is_relative_to("/tmp")))
    with ExitStack() as stack:
        switch = Space.make(stack, ["--net"], "set -e\nip link add switch type bridge\nip link set switch up\n")
        hosts = Cluster(switch, stack, below, tuple(sorted(needed)))
        for _ in range(count):
            hosts.add()
        yield hosts


def _home(line: str) -> str:
    """A line of /etc/passwd, with root's home where each host has its own."""
    fields = line.split(":")
    return ":".join([*fields[:5], str(HOME), "/bin/sh"]) if fields[0] == "root" else line


def _namespace(entry: str) -> str:
    try:
        return str(Path("/proc", entry).readlink())
    except OSError:  # it has ended
        return ""


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it has ended
        return ""

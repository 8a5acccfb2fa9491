"""The environment of a run on several machines, in one place: what is the same everywhere, what each host decides.

What the user has set stays as it is, wherever it is set and also where it is empty: `LD_PRELOAD= icom launch …`
preloads nothing.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from icom import machine
from icom.config.launch import Flavour
from icom.errors import IcomError, UsageError
from icom.launch.hosts import LOCAL_NAMES, Host
from icom.launch.mpi import Mpi, path_for
from icom.parallel.environment import CCL_ENVIRONMENT
from icom.parallel.place import DEFAULT_PORT, has_ccl, is_loopback

_PORTS_TO_TRY = 100

YOURS = "set by you"

INTERFACES: dict[Flavour, tuple[str, ...]] = {
    "intel": ("I_MPI_HYDRA_IFACE",),
    "mpich": ("HYDRA_IFACE",),
    "openmpi": ("OMPI_MCA_oob_tcp_if_include", "OMPI_MCA_btl_tcp_if_include"),
}
"""How each mpirun is told its interface; it then wants one of that name on every host."""

_SSH_SECONDS = 10

_LIBRARY_FOLDERS = (
    *("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib"),
    "/opt/intel/oneapi/compiler/latest/lib",
)
"""Where distributions and Intel put libraries; the environment's own `lib` comes first."""

_PRELOADS = (
    # The full library or the minimal one: either, not both. The plain .so is the development package's.
    ("libtcmalloc.so.4", "libtcmalloc_minimal.so.4", "libtcmalloc.so", "libtcmalloc_minimal.so"),
    ("libiomp5.so",),
)


@dataclass(frozen=True)
class Variable:
    """One variable, and why it has that value; `hidden` is shown instead of a value that nobody may see."""

    name: str
    value: str
    why: str
    hidden: str = ""


@dataclass(frozen=True)
class Master:
    """Where rank 0 will listen, and how this machine reaches the others.

    Attributes:
        address: MASTER_ADDR.
        port: MASTER_PORT.
        interface: this machine's towards the others; None where there are no others.
        towards: the host that `interface` leads to, for the explanation.
        why_address: how `address` was found.
        why_port: how `port` was found.
    """

    address: str
    port: int
    interface: str | None
    towards: str
    why_address: str
    why_port: str


def is_this_machine(name: str) -> bool:
    """Whether a name of the hosts file is this machine.

    Raises:
        IcomError: the name leads nowhere.
    """
    if name in LOCAL_NAMES or name == socket.gethostname():
        return True
    number = ipaddress.ip_address(resolve(name))
    own = {address for interface in machine.interfaces() for address in interface.ipv4 + interface.ipv6}
    return number.is_loopback or str(number) in own


@functools.cache
def resolve(name: str) -> str:
    """The address (a number) behind a name as ssh understands it, HostName in ~/.ssh/config included.

    Raises:
        IcomError: there is no ssh, or the name leads nowhere.
    """
    try:
        # Prints the configuration that it would use, and connects to nothing.
        done = subprocess.run(
            ["ssh", "-G", name], capture_output=True, check=False, text=True, timeout=_SSH_SECONDS, errors="replace"
        )
    except FileNotFoundError:
        raise IcomError(
            "There is no `ssh` here, through which mpirun starts the hosts. Install openssh-client."
        ) from None
    except subprocess.TimeoutExpired:
        raise IcomError(f"`ssh -G {name}` does not end. Look at ~/.ssh/config (Match exec).") from None
    if done.returncode:
        raise IcomError(f"ssh refuses its own configuration: {done.stderr.strip()}")
    options = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    real = options.get("hostname", name)
    try:
        return str(socket.getaddrinfo(real, 9, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise IcomError(
            f"The host {name} cannot be found: {error.strerror or error}. Correct the name in the hosts file, or tell "
            "its address with `HostName` in ~/.ssh/config or in /etc/hosts."
        ) from None


def find_master(hosts: Sequence[Host], environment: Mapping[str, str]) -> Master:
    """Where rank 0 will listen: on the first host, at its address on the way to the others.

    Args:
        hosts: those that get processes, in order; none: this machine, with others behind the default route.
        environment: the user's; MASTER_ADDR and MASTER_PORT there are obeyed.

    Raises:
        IcomError: a host leads nowhere.
        UsageError: MASTER_ADDR leads the others to themselves, or MASTER_PORT is no port.
    """
    others = [host.name for host in hosts if not is_this_machine(host.name)]
    if len(hosts) - len(others) > 1:
        names = ", ".join(host.name for host in hosts if host.name not in others)
        raise UsageError(f"In the hosts file, {names} are all this machine. For more processes on it write NAME:2.")
    first_is_here = not hosts or hosts[0].name not in others
    if hosts and not others:
        address, interface, towards, why = "127.0.0.1", None, "", "all processes are on this machine"
    elif hosts:
        towards = others[0]
        number = resolve(towards)
        interface, source = machine.interface_towards(number), machine.source_address(number)
        if interface is None or source is None:
            raise IcomError(f"This machine has no route to {towards} ({number}). Connect it to that network.")
        address = source if first_is_here else resolve(hosts[0].name)
        why = f"this machine's address on {interface}, towards {towards}" if first_is_here else f"{hosts[0].name}'s"
    else:
        towards, interface = "", machine.interface_towards()
        found = next((i.ipv4 for i in machine.interfaces() if i.name == interface), ())
        if not found:
            raise IcomError("There is no default route to tell this machine's address by. Give --hosts FILE.")
        address, why = found[0], f"this machine's address on {interface}, which has the default route"
    address, why = environment.get("MASTER_ADDR", address), YOURS if "MASTER_ADDR" in environment else why
    if (others or not hosts) and is_loopback(address):
        raise UsageError(
            f"MASTER_ADDR={address} would send every host to itself: rank 0 is on the first host alone. Unset it, or "
            "give that host's address in the network of the others."
        )
    given = environment.get("MASTER_PORT")
    if given is None:
        port, why_port = _free_port(address) if first_is_here else (DEFAULT_PORT, "the usual one")
    elif given.isascii() and given.isdigit() and 0 < int(given) < 2**16:
        port, why_port = int(given), YOURS
    else:
        raise UsageError(f"MASTER_PORT={given} is no port. Unset it, or give a number from 1 to 65535.")
    return Master(address, port, interface, towards, why, why_port)


def _free_port(address: str) -> tuple[int, str]:
    """The usual port, or the next free one, of an address of this machine; and why."""
    for port in range(DEFAULT_PORT, DEFAULT_PORT + _PORTS_TO_TRY):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                continue
        return port, "the usual one" if port == DEFAULT_PORT else f"the first free one after {DEFAULT_PORT}"
    # None free, or no address of this machine: the check before the start tells which.
    return DEFAULT_PORT, "the usual one"


def cluster_variables(mpi: Mpi, master: Master, environment: Mapping[str, str]) -> list[Variable]:
    """What is the same on all hosts.

    Args:
        mpi: the mpirun that starts them.
        master: from `find_master`.
        environment: the user's, which goes first.
    """
    wanted = [
        Variable("MASTER_ADDR", master.address, master.why_address),
        Variable("MASTER_PORT", str(master.port), master.why_port),
    ]
    if mpi.flavour == "intel" and mpi.mpirun.parent == Path(sys.executable).parent:
        root = str(mpi.mpirun.parent.parent)
        wanted.append(Variable("I_MPI_ROOT", root, "where PyPI's impi-rt lies, which does not know it"))
    if master.interface:
        why = f"mpirun's own connections: the interface towards {master.towards or 'the default route'}"
        wanted += [Variable(name, master.interface, why) for name in INTERFACES[mpi.flavour]]
    ccl = has_ccl()
    if mpi.flavour == "intel" or ccl:
        wanted.append(Variable("FI_PROVIDER", "tcp", "libfabric's way that works on every network"))
    if ccl:
        wanted += [
            Variable(name, value, "oneCCL without MPI, for small sums") for name, value in CCL_ENVIRONMENT.items()
        ]
    wanted.append(Variable("KMP_BLOCKTIME", "1", "ms that libiomp5's threads spin when idle; no effect without it"))
    path = path_for(mpi.mpirun, environment)
    if path != environment.get("PATH"):
        why = "accelerate and mpirun's helpers come from here"
        return [*_unless_set(wanted, environment), Variable("PATH", path, why)]
    return _unless_set(wanted, environment)


def host_variables(
    environment: Mapping[str, str], local_rank: int, local_size: int, root: Path = machine.ROOT
) -> list[Variable]:
    """What each host decides for itself; called there, by icom.launch.on_host.

    Args:
        environment: of the process, as mpirun started it; it goes first.
        local_rank: this process's number among those on this host.
        local_size: how many those are.
        root: where /proc, /sys and the libraries lie.
    """
    cores = len(machine.cores_of_rank(local_rank, local_size, root))
    why = "physical cores" if local_size == 1 else f"physical cores, shared by {local_size} processes"
    of_slurm = environment.get("SLURM_CPUS_PER_TASK", "") if "SLURM_STEP_NUM_TASKS" in environment else ""
    if of_slurm.isdecimal() and 0 < int(of_slurm) < cores:  # where Slurm does not bind, the other cores are others'
        cores, why = int(of_slurm), "Slurm's --cpus-per-task"
    wanted = [Variable("OMP_NUM_THREADS", str(cores), why)]
    preloads = [file for names in _PRELOADS if (file := _find_library(names, root))]
    if preloads:
        wanted.append(Variable("LD_PRELOAD", ":".join(map(str, preloads)), "found on this host"))
    return _unless_set(wanted, environment)


def _unless_set(wanted: list[Variable], environment: Mapping[str, str]) -> list[Variable]:
    return [Variable(v.name, environment[v.name], YOURS) if v.name in environment else v for v in wanted]


def _find_library(names: tuple[str, ...], root: Path) -> Path | None:
    folders = [Path(sys.prefix) / "lib", *(root / folder.lstrip("/") for folder in _LIBRARY_FOLDERS)]
    return next((folder / name for name in names for folder in folders if (folder / name).is_file()), None)

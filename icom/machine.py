"""Facts about this machine, read from /proc and /sys: CPUs, NUMA nodes, cgroup limits, memory, disks, networks.

Standard library only, and no torch: what is decided here (threads, CPUs of a rank) has to stand before torch loads,
because an OpenMP runtime may pin the main thread as soon as it is there. The files are described in the kernel's
documentation: filesystems/proc, admin-guide/cputopology, admin-guide/cgroup-v1 and -v2. Every reader takes the `root`
below which /proc and /sys lie.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import platform
import shutil
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

ROOT = Path("/")

_CGROUP_NO_LIMIT = 2**60
"""Bytes; from here on a cgroup v1 memory limit means "none" (the kernel writes 2^63 minus a page)."""


@dataclass(frozen=True)
class Cpu:
    """A logical CPU, as the scheduler counts them.

    Attributes:
        number: N of /sys/devices/system/cpu/cpuN.
        socket: physical package.
        core: physical core; CPUs of one core (hyperthreads) have equal ones, no two cores of the machine do.
        node: NUMA node; 0 where the kernel tells none.
    """

    number: int
    socket: int
    core: tuple[int, int, int]
    node: int


@dataclass(frozen=True)
class Limits:
    """What the cgroups around this process allow; None: no limit.

    Attributes:
        cpus: CPU time per time (1.5: one and a half CPUs).
        memory: bytes.
        memory_left: bytes that may still be taken, file cache that can be dropped included.
    """

    cpus: float | None = None
    memory: int | None = None
    memory_left: int | None = None


@dataclass(frozen=True)
class Memory:
    """Bytes that this process may have in total, and that it can still get without swapping."""

    total: int
    available: int


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        name: for instance eth0.
        up: switched on and connected.
        loopback: leads to this machine only.
        ipv4: its addresses.
        ipv6: its addresses, link-local ones included.
    """

    name: str
    up: bool
    loopback: bool
    ipv4: tuple[str, ...]
    ipv6: tuple[str, ...]


def cpu_model(root: Path = ROOT) -> str:
    """The CPU's name, from /proc/cpuinfo; where that has none (Arm), what Python knows."""
    return _cpuinfo("model name", root) or platform.processor() or platform.machine()


def cpu_flags(root: Path = ROOT) -> frozenset[str]:
    """The first CPU's flags in the kernel's spelling (avx512_bf16, amx_tile …), from /proc/cpuinfo."""
    return frozenset(_cpuinfo("flags", root).split())


def _cpuinfo(key: str, root: Path) -> str:
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def online_cpus(root: Path = ROOT) -> list[int]:
    """Numbers of the CPUs that the kernel schedules on, from /sys/devices/system/cpu/online."""
    return parse_cpu_list(_read(root / "sys/devices/system/cpu/online")) or list(range(os.cpu_count() or 1))


def allowed_cpus(root: Path = ROOT) -> list[int]:
    """Numbers of the online CPUs that the main thread may run on.

    What sched_getaffinity tells of it, from Cpus_allowed_list in /proc/self/status, which may name absent CPUs too.
    """
    for line in _read(root / "proc/self/status").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            allowed = set(parse_cpu_list(line.split(":", 1)[1]))
            return [number for number in online_cpus(root) if number in allowed]
    return sorted(os.sched_getaffinity(0))


def parse_cpu_list(text: str) -> list[int]:
    """The kernel's list format: "0-2,8" is [0, 1, 2, 8]."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
    return sorted(numbers)


def numa_nodes(root: Path = ROOT) -> dict[int, list[int]]:
    """NUMA node -> its online CPUs, from /sys/devices/system/node. Nodes without CPUs (memory only) are left out."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    nodes = {int(f.name.removeprefix("node")): parse_cpu_list(_read(f / "cpulist")) for f in folders}
    return {node: cpus for node, cpus in sorted(nodes.items()) if cpus} or {0: online_cpus(root)}


def cpus(root: Path = ROOT) -> list[Cpu]:
    """The allowed CPUs with their places, from /sys/devices/system/cpu/cpuN/topology."""
    node_of = {number: node for node, members in numa_nodes(root).items() for number in members}
    found = []
    for number in allowed_cpus(root):
        topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
        package, die, core = (_number(topology / name) for name in ("physical_package_id", "die_id", "core_id"))
        # Core numbers begin anew in each package, and on some CPUs in each die. Without any, each CPU is a core.
        place = (package or 0, die or 0, number if core is None else core)
        found.append(Cpu(number, package or 0, place, node_of.get(number, 0)))
    return found


def physical_cores(root: Path = ROOT) -> list[Cpu]:
    """The first allowed CPU of every physical core, in order of NUMA node and number.

    A second hyperthread shares the first one's multipliers: matrix products gain nothing from it.
    """
    first_of_core: dict[tuple[int, int, int], Cpu] = {}
    for cpu in cpus(root):
        first_of_core.setdefault(cpu.core, cpu)
    return sorted(first_of_core.values(), key=lambda cpu: (cpu.node, cpu.number))


def usable_cores(root: Path = ROOT) -> int:
    """How many threads can compute at full speed: allowed physical cores, bounded by the CPU quota; at least 1."""
    return len(cores_of_rank(0, 1, root))


def cores_of_rank(local_rank: int, local_size: int, root: Path = ROOT) -> list[int]:
    """The CPUs, one per physical core, that one of this machine's processes should use.

    1. Ranks share what the container (the cgroup's cpuset) allows. A narrower affinity was set by somebody: if it is
       so small that every rank can have as many cores to itself, a launcher such as mpirun has shared them out
       already, and the rank takes them all; else the ranks share these. (So `taskset` with few CPUs around a launcher
       is taken for a launcher's doing; let the launcher pin instead.)
    2. With as many ranks as NUMA nodes, or a multiple, each rank stays inside one node; with a divisor, each has
       whole nodes. Else every rank gets an even, contiguous part.
    3. A CPU quota is shared by the ranks: each takes no more CPUs than its part of it.
    4. Everyone gets at least one CPU, if need be one that others use too.

    Args:
        local_rank: 0 … local_size - 1, among the processes on this machine.
        local_size: how many those are.
        root: where /proc and /sys lie.

    Raises:
        ValueError: local_rank is not in that range.
    """
    if not 0 <= local_rank < local_size:
        raise ValueError(f"local rank {local_rank} of {local_size}")
    cores = physical_cores(root)
    whole = set(_container_cpus(root))
    pinned = {cpu.number for cpu in cpus(root)} < whole
    if not (pinned and len(cores) * local_size <= _count_cores(whole, root)):
        cores = _share(cores, local_rank, local_size)
    quota = cgroup_limits(root).cpus
    most = len(cores) if quota is None else max(1, int(quota / local_size))
    return [cpu.number for cpu in cores[:most]]


def _share(cores: list[Cpu], rank: int, ranks: int) -> list[Cpu]:
    by_node: dict[int, list[Cpu]] = {}
    for cpu in cores:
        by_node.setdefault(cpu.node, []).append(cpu)
    nodes = list(by_node.values())
    if ranks % len(nodes) == 0 and min(map(len, nodes)) >= ranks // len(nodes):
        per_node = ranks // len(nodes)
        return _even_part(nodes[rank // per_node], rank % per_node, per_node)
    if len(nodes) % ranks == 0:
        return [cpu for node in _even_part(nodes, rank, ranks) for cpu in node]
    return _even_part(cores, rank, ranks)


def _even_part(items: list[T], part: int, parts: int) -> list[T]:
    first, end = part * len(items) // parts, (part + 1) * len(items) // parts
    return items[first : max(end, first + 1)]


def _container_cpus(root: Path) -> list[int]:
    """The online CPUs that the innermost cgroup with a cpuset allows."""
    online = online_cpus(root)
    for folder in _cgroup_folders("cpuset", root):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):  # v2, v1
            if members := set(parse_cpu_list(_read(folder / name))):
                return [number for number in online if number in members]
    return online


def _count_cores(numbers: set[int], root: Path) -> int:
    """Physical cores among CPUs that this process may not be allowed to use."""
    siblings = {frozenset(_siblings(number, root)) & numbers for number in numbers}
    return len(siblings)


def _siblings(number: int, root: Path) -> list[int]:
    return parse_cpu_list(_read(root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")) or [number]


def cgroup_limits(root: Path = ROOT) -> Limits:
    """The tightest limits on the way from this process's cgroup up to the root, in v1 and v2 hierarchies.

    Looked for where systemd and containers mount them, below /sys/fs/cgroup. A container sees its own cgroup as the
    root there while /proc/self/cgroup may still name the host's path: folders that do not exist are passed over.
    """
    quotas, limits, left = [], [], []
    for folder in _cgroup_folders("cpu", root):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        quota = quota or _read(folder / "cpu.cfs_quota_us").strip()
        period = period or _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period):  # "max" (v2) and "-1" (v1) are no limits
            quotas.append(int(quota) / int(period))
    for folder in _cgroup_folders("memory", root):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is not None and limit < _CGROUP_NO_LIMIT:
            used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
            statistics = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            # What is used counts cached files; the kernel drops the inactive ones before it refuses memory.
            droppable = int(statistics.get("total_inactive_file") or statistics.get("inactive_file") or 0)
            limits.append(limit)
            left.append(max(0, limit - max(0, used - droppable)))
    return Limits(min(quotas, default=None), min(limits, default=None), min(left, default=None))


def _cgroup_folders(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's cgroups that may hold the controller's files, innermost first."""
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # v2; `unified` where v1 and v2 stand side by side
            base = mounts / "unified" if (mounts / "unified").is_dir() else mounts
        elif controller in controllers.split(","):
            base = next((m for m in (mounts / controllers, mounts / controller) if m.is_dir()), mounts)
        else:
            continue
        inner = base / path.strip("/")
        yield from (f for f in (inner, *inner.parents) if f.is_relative_to(base) and ".." not in f.parts)


def memory(root: Path = ROOT) -> Memory:
    """Of the machine (/proc/meminfo) or of the cgroup, whichever is less; bytes.

    Raises:
        OSError: there is no /proc/meminfo.
    """
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    kibibytes = {words[0].rstrip(":"): int(words[1]) for words in lines}
    total, available = kibibytes["MemTotal"] * 1024, kibibytes["MemAvailable"] * 1024
    limits = cgroup_limits(root)
    total = min(total, total if limits.memory is None else limits.memory)
    return Memory(total, min(available, available if limits.memory_left is None else limits.memory_left))


def nearest_existing(folder: Path) -> Path:
    """The folder itself, or the first of its parents that exists (as whatever it is)."""
    absolute = Path.cwd() / folder
    return next(place for place in (absolute, *absolute.parents) if place.exists())


def free_disk(folder: Path) -> int:
    """Bytes that this user can still write to the disk that the folder is, or would be, on."""
    return shutil.disk_usage(nearest_existing(folder)).free


_SIOCGIFCONF, _SIOCGIFFLAGS = 0x8912, 0x8913  # netdevice(7)
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
_IFREQ = 40
"""Bytes of a struct ifreq on 64-bit Linux: 16 of name, then here a sockaddr_in, whose address is 4 bytes further."""


def interfaces(root: Path = ROOT) -> list[Interface]:
    """The network interfaces of this network namespace, in the kernel's order.

    IPv4 addresses come from SIOCGIFCONF, which also tells secondary ones, IPv6 addresses from /proc/net/if_inet6.
    """
    ipv4: dict[str, list[str]] = {}
    ipv6: dict[str, list[str]] = {}
    for line in _read(root / "proc/net/if_inet6").splitlines():
        address, *_, name = line.split()
        ipv6.setdefault(name, []).append(str(ipaddress.IPv6Address(bytes.fromhex(address))))
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        table = array.array("B", bytes(_IFREQ * 1024))
        start, _ = table.buffer_info()
        answer = fcntl.ioctl(any_socket, _SIOCGIFCONF, struct.pack("@iP", len(table), start))
        entries = table.tobytes()[: struct.unpack("@iP", answer)[0]]
        for offset in range(0, len(entries), _IFREQ):
            entry = entries[offset : offset + _IFREQ]
            name = entry[:16].split(b"\0")[0].decode().split(":")[0]  # eth0:1 is a second address of eth0
            ipv4.setdefault(name, []).append(socket.inet_ntoa(entry[20:24]))
        for _, name in socket.if_nameindex():
            request = struct.pack("16s24x", name.encode())
            (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request), 16)
            up = bool(flags & _IFF_UP and flags & _IFF_RUNNING)
            addresses = tuple(ipv4.get(name, ())), tuple(ipv6.get(name, ()))
            found.append(Interface(name, up, bool(flags & _IFF_LOOPBACK), *addresses))
    return found


def interface_towards(address: str | None = None, root: Path = ROOT) -> str | None:
    """The interface that packets to `address` leave from: what I_MPI_HYDRA_IFACE and GLOO_SOCKET_IFNAME need.

    The one that owns the source address of the route; for an address of this machine, the one that owns it. Nothing
    is sent. Without an address: the interface of the default route (IPv4).

    Args:
        address: name or number of another machine.
        root: where /proc lies.

    Returns:
        Its name; None without such a route, or where the name does not resolve.
    """
    if address is None:
        return _default_interface(root)
    source = source_address(address)
    return next((i.name for i in interfaces(root) if source in i.ipv4 + i.ipv6), None)


def source_address(address: str) -> str | None:
    """This machine's address on the route to `address` (a name or number). Nothing is sent.

    Returns:
        The number; None without such a route, or where the name does not resolve.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # of a datagram socket: chooses the route, sends nothing
            return str(probe.getsockname()[0]).split("%")[0]
    except OSError:
        return None


def _default_interface(root: Path) -> str | None:
    up, refused = 0x1, 0x200  # RTF_UP, RTF_REJECT
    routes = []
    for line in _read(root / "proc/net/route").splitlines()[1:]:
        name, target, _, flags, _, _, metric, mask = line.split()[:8]
        if int(target, 16) == int(mask, 16) == 0 and int(flags, 16) & up and not int(flags, 16) & refused:
            routes.append((int(metric), name))
    return min(routes)[1] if routes else None


def _read(path: Path) -> str:
    """A file's text; nothing where it is absent or not for us: what the kernel does not tell sets no limit."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    try:
        return int(_read(path))
    except ValueError:
        return None

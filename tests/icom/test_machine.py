"""Facts about the machine: on made-up /proc and /sys trees, and against other tools' truth on the real ones.

Guards icom.machine.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from icom import machine
from tests.support.command import ROOT

CGROUP_V2 = {"proc/self/cgroup": "0::/kubepods/pod1/main\n"}


def tree(root: Path, files: Mapping[str, object]) -> Path:
    """Write the files below root."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}")
    return root


def xeon(root: Path, allowed: str = "0-15", sockets: int = 2, cores: int = 4) -> Path:
    """Sockets of so many cores with two hyperthreads, numbered as on real ones: all first threads, then all second.

    Each socket is a NUMA node.
    """
    half = sockets * cores
    files: dict[str, object] = {
        "sys/devices/system/cpu/online": f"0-{2 * half - 1}\n",
        # A virtual machine's mask names CPUs that could be plugged in.
        "proc/self/status": f"Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t{allowed}\n",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) 8488C\nflags\t\t: fpu amx_bf16 amx_tile\n\n",
        "proc/meminfo": "MemTotal: 65536000 kB\nMemFree: 1 kB\nMemAvailable: 32768000 kB\nHugePages_Total: 0\n",
    }
    for number in range(2 * half):
        first = number % half
        topology = f"sys/devices/system/cpu/cpu{number}/topology"
        files[f"{topology}/physical_package_id"] = f"{first // cores}\n"
        files[f"{topology}/core_id"] = f"{first % cores * 2}\n"  # gaps, and the same numbers in each socket
        files[f"{topology}/thread_siblings_list"] = f"{first},{first + half}\n"
    for node in range(sockets):
        first = node * cores
        cpus = f"{first}-{first + cores - 1},{first + half}-{first + half + cores - 1}\n"
        files[f"sys/devices/system/node/node{node}/cpulist"] = cpus
    return tree(root, files)


def ranks(root: Path, size: int) -> list[list[int]]:
    return [machine.cores_of_rank(rank, size, root) for rank in range(size)]


def test_two_sockets_with_hyperthreads(tmp_path: Path) -> None:
    root = xeon(tmp_path, allowed="0-127")
    assert machine.cpu_model(root) == "Intel(R) Xeon(R) 8488C"
    assert machine.cpu_flags(root) == {"fpu", "amx_bf16", "amx_tile"}
    assert machine.allowed_cpus(root) == list(range(16))
    assert machine.numa_nodes(root) == {0: [0, 1, 2, 3, 8, 9, 10, 11], 1: [4, 5, 6, 7, 12, 13, 14, 15]}
    assert [cpu.number for cpu in machine.physical_cores(root)] == list(range(8))
    assert [cpu.socket for cpu in machine.physical_cores(root)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert machine.usable_cores(root) == 8


def test_core_numbers_that_begin_anew_in_each_die(tmp_path: Path) -> None:
    topology = "sys/devices/system/cpu/cpu{}/topology/{}"
    files: dict[str, object] = {"sys/devices/system/cpu/online": "0-1", "proc/self/status": "Cpus_allowed_list: 0-1"}
    for number in (0, 1):
        files |= {topology.format(number, name): 0 for name in ("physical_package_id", "core_id")}
        files[topology.format(number, "die_id")] = number
    assert machine.usable_cores(tree(tmp_path, files)) == 2


def test_no_topology_at_all(tmp_path: Path) -> None:
    """Some sandboxes show none: each CPU counts as a core, on one node."""
    root = tree(tmp_path, {"sys/devices/system/cpu/online": "0-3\n", "proc/self/status": "Cpus_allowed_list:\t1-3\n"})
    assert machine.usable_cores(root) == 3
    assert machine.numa_nodes(root) == {0: [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("allowed", "cores"),
    [
        ("0,8", [0]),  # both hyperthreads of one core
        ("8-11", [8, 9, 10, 11]),  # second hyperthreads only: each is the first that is allowed
        ("0-3,8-11", [0, 1, 2, 3]),
        ("3-4", [3, 4]),
    ],
)
def test_affinity_subset(tmp_path: Path, allowed: str, cores: list[int]) -> None:
    root = xeon(tmp_path, allowed)
    assert [cpu.number for cpu in machine.physical_cores(root)] == cores
    assert machine.usable_cores(root) == len(cores)


def test_ranks_stay_inside_their_node(tmp_path: Path) -> None:
    root = xeon(tmp_path)
    assert ranks(root, 1) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert ranks(root, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ranks(root, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ranks(root, 3) == [[0, 1], [2, 3, 4], [5, 6, 7]]
    with pytest.raises(ValueError, match="2 of 2"):
        machine.cores_of_rank(2, 2, root)


def test_nodes_whose_cpus_interleave(tmp_path: Path) -> None:
    """Sockets that take turns in numbering: a contiguous part of the numbers would lie in both nodes."""
    files: dict[str, object] = {"sys/devices/system/cpu/online": "0-3", "proc/self/status": "Cpus_allowed_list: 0-3"}
    files |= {"sys/devices/system/node/node0/cpulist": "0,2", "sys/devices/system/node/node1/cpulist": "1,3"}
    root = tree(tmp_path, files)
    assert ranks(root, 2) == [[0, 2], [1, 3]]
    assert ranks(root, 3) == [[0], [2], [1, 3]]


def test_fewer_ranks_than_nodes_get_whole_nodes(tmp_path: Path) -> None:
    """Node 0 is short of two cores; an even part of the cores would cut through node 2."""
    root = xeon(tmp_path, allowed="2-15,18-31", sockets=4)
    tree(root, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpuset.cpus.effective": "2-15,18-31"})
    assert ranks(root, 2) == [[2, 3, 4, 5, 6, 7], list(range(8, 16))]


def test_more_ranks_than_cores_share(tmp_path: Path) -> None:
    root = xeon(tmp_path, sockets=1, cores=2)
    assert ranks(root, 3) == [[0], [0], [1]]


def test_what_a_launcher_pinned_is_not_split_again(tmp_path: Path) -> None:
    root = xeon(tmp_path, allowed="4-7,12-15")
    assert machine.cores_of_rank(1, 2, root) == [4, 5, 6, 7]
    assert machine.cores_of_rank(0, 2, root) == [4, 5, 6, 7]
    # Three ranks cannot have four of eight cores each: they share these.
    assert ranks(root, 3) == [[4], [5], [6, 7]]


def test_what_a_container_allows_is_split(tmp_path: Path) -> None:
    """A cpuset narrows all ranks alike, though it looks to a process just like a launcher's pinning."""
    root = xeon(tmp_path, allowed="0-3")
    tree(root, CGROUP_V2 | {"sys/fs/cgroup/cpuset.cpus.effective": "0-3\n"})
    assert ranks(root, 2) == [[0, 1], [2, 3]]
    (root / "sys/fs/cgroup/cpuset.cpus.effective").unlink()
    tree(root, {"proc/self/cgroup": "3:cpuset:/docker/1\n", "sys/fs/cgroup/cpuset/cpuset.effective_cpus": "0-3\n"})
    assert ranks(root, 2) == [[0, 1], [2, 3]]


def test_cgroup_v2_takes_the_tightest_on_the_way_up(tmp_path: Path) -> None:
    files = CGROUP_V2 | {
        "sys/fs/cgroup/kubepods/pod1/main/cpu.max": "max 100000\n",
        "sys/fs/cgroup/kubepods/pod1/cpu.max": "350000 100000\n",
        "sys/fs/cgroup/kubepods/cpu.max": "600000 100000\n",
        "sys/fs/cgroup/kubepods/pod1/main/memory.max": 8 * 2**30,
        "sys/fs/cgroup/kubepods/pod1/main/memory.current": 3 * 2**30,
        "sys/fs/cgroup/kubepods/pod1/main/memory.stat": f"anon 5\ninactive_file {2**30}\n",
        "sys/fs/cgroup/kubepods/pod1/memory.max": "max\n",
        "sys/fs/cgroup/kubepods/memory.max": 9 * 2**30,
        "sys/fs/cgroup/kubepods/memory.current": 8 * 2**30,
    }
    root = tree(xeon(tmp_path), files)
    assert machine.cgroup_limits(root) == machine.Limits(3.5, 8 * 2**30, 2**30)
    assert machine.memory(root) == machine.Memory(8 * 2**30, 2**30)
    assert machine.usable_cores(root) == 3
    assert ranks(root, 2) == [[0], [4]]


def test_cgroup_v1_nested(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/a/b\n4:cpu,cpuacct:/a/b\n1:name=systemd:/x\n",
        "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": 9223372036854771712,
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": 4 * 2**30,
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": 3 * 2**30,
        "sys/fs/cgroup/memory/a/memory.stat": f"inactive_file 1\ntotal_inactive_file {2**30}\n",
    }
    root = tree(xeon(tmp_path), files)
    assert machine.cgroup_limits(root) == machine.Limits(0.5, 4 * 2**30, 2 * 2**30)
    assert machine.usable_cores(root) == 1
    assert ranks(root, 2) == [[0], [4]]
    (root / "sys/fs/cgroup/memory/a/memory.limit_in_bytes").unlink()
    assert machine.cgroup_limits(root) == machine.Limits(0.5, None, None)  # v1's number for "unlimited"


def test_container_that_sees_its_cgroup_as_the_root(tmp_path: Path) -> None:
    """/proc/self/cgroup names the host's path, or one above the visible root."""
    for path in ("/docker/0123", "/../../system.slice", "/"):
        files = {"proc/self/cgroup": f"0::{path}\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}
        assert machine.cgroup_limits(tree(tmp_path, files)).cpus == 2


def test_no_cgroup_no_limit(tmp_path: Path) -> None:
    root = xeon(tmp_path)
    assert machine.cgroup_limits(root) == machine.Limits(None, None, None)
    assert machine.memory(root) == machine.Memory(65536000 * 1024, 32768000 * 1024)


def test_default_route(tmp_path: Path) -> None:
    """The lowest metric wins; a rejecting default, one that is down, and routes to networks do not count."""
    head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
    rows = {
        "wlan0": "00000000 0101A8C0 0003 0 0 600 00000000",
        "eth1": "00000000 0101A8C0 0003 0 0 100 00000000",
        "down0": "00000000 0101A8C0 0002 0 0 0 00000000",
        "no0": "00000000 00000000 0201 0 0 0 00000000",
        "net0": "00000000 0101A8C0 0003 0 0 0 000000FF",
        "eth0": "0000A8C0 00000000 0001 0 0 0 0000FFFF",
    }
    route = head + "".join(f"{name}\t{row.replace(' ', chr(9))}\t0\t0\t0\n" for name, row in rows.items())
    assert machine.interface_towards(root=tree(tmp_path, {"proc/net/route": route})) == "eth1"
    assert machine.interface_towards(root=tree(tmp_path, {"proc/net/route": head})) is None


# The truth, as others tell it.


def test_cpus_are_those_of_lscpu() -> None:
    if not shutil.which("lscpu"):
        pytest.skip("lscpu is not installed")
    told = subprocess.run(["lscpu", "-p=CPU,CORE,SOCKET,NODE"], capture_output=True, check=True, text=True).stdout
    rows = [line.split(",") for line in told.splitlines() if not line.startswith("#")]
    allowed = os.sched_getaffinity(0)
    ours = machine.cpus()
    theirs = {int(cpu): (int(socket), int(node or 0)) for cpu, _, socket, node in rows if int(cpu) in allowed}
    assert {cpu.number: (cpu.socket, cpu.node) for cpu in ours} == theirs
    assert len({cpu.core for cpu in ours}) == len({core for cpu, core, _, _ in rows if int(cpu) in allowed})


def test_allowed_cpus_in_a_process_that_is_restricted() -> None:
    """The child restricts itself, as taskset would, then asks both us and the kernel."""
    only = max(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, [{only}]); from icom import machine as m; "
        "print(m.allowed_cpus(), sorted(os.sched_getaffinity(0)), m.usable_cores(), m.cores_of_rank(0, 1))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True)
    assert done.stdout == f"[{only}] [{only}] 1 [{only}]\n"
    assert machine.allowed_cpus() == sorted(os.sched_getaffinity(0))


def test_memory_and_disk_are_those_of_the_kernel(tmp_path: Path) -> None:
    memory = machine.memory()
    assert 0 < memory.available <= memory.total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    disk = os.statvfs(tmp_path)
    assert machine.free_disk(tmp_path / "not" / "there") == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.05)


def test_interfaces_are_those_of_ip() -> None:
    if not shutil.which("ip"):
        pytest.skip("iproute2 is not installed")
    told = json.loads(subprocess.run(["ip", "-j", "addr"], capture_output=True, check=True, text=True).stdout)
    theirs = {
        row["ifname"]: ("LOOPBACK" in row["flags"], {address["local"] for address in row["addr_info"]}) for row in told
    }
    assert {i.name: (i.loopback, {*i.ipv4, *i.ipv6}) for i in machine.interfaces()} == theirs
    for row in told:
        if row["operstate"] in ("UP", "DOWN"):
            assert {i.name: i.up for i in machine.interfaces()}[row["ifname"]] is (row["operstate"] == "UP")


def test_interface_towards_an_address_is_that_of_the_route() -> None:
    assert machine.interface_towards("127.0.0.1") == "lo"
    assert machine.interface_towards("no-such-host.invalid") is None
    for interface in machine.interfaces():
        for address in interface.ipv4:
            assert machine.interface_towards(address) == interface.name
    default = machine.interface_towards()
    if default:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("203.0.113.1", 9))  # an address of documentation: the default route
            source = probe.getsockname()[0]
        assert source in next(i for i in machine.interfaces() if i.name == default).ipv4
        assert machine.interface_towards("203.0.113.1") == default


def test_no_torch_is_loaded() -> None:
    code = "import sys, icom.machine; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

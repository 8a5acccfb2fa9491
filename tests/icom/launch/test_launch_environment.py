"""What a run on several machines finds in its environment: from the network, from each host, from the user.

Guards icom.launch.environment and on_host.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from icom import machine
from icom.errors import IcomError, UsageError
from icom.launch.environment import (
    Master,
    Variable,
    cluster_variables,
    find_master,
    host_variables,
    is_this_machine,
    resolve,
)
from icom.launch.hosts import Host
from icom.launch.mpi import Mpi
from tests.support.command import ROOT

NETWORKS = """
ip link set lo up
ip link add net0 type veth peer name net1
ip address add 198.18.1.11/24 dev net0
ip link set net0 up
ip link set net1 up
ip route add default via 198.18.1.1
"""
"""A machine with one network, which has a default route."""


def in_network(code: str, **environment: str) -> str:
    """Run Python code in a network namespace with NETWORKS; its output."""
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
    if not shutil.which("ip") or subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no network namespaces here")
    script = f'{NETWORKS}\nexec "$@"'
    done = subprocess.run(
        [*unshare, "sh", "-euc", script, "sh", sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def values(variables: list[Variable]) -> dict[str, str]:
    """Name -> value."""
    return {variable.name: variable.value for variable in variables}


# Where rank 0 listens.


def test_master_address_is_the_one_that_the_others_reach() -> None:
    """Whatever the first host is called; the port is free where that can be known."""
    code = """
        import json, socket
        from icom.launch.environment import find_master
        from icom.launch.hosts import Host

        hosts = lambda *names: [Host(name, None, i + 1) for i, name in enumerate(names)]
        busy = socket.create_server(("198.18.1.11", 29500))
        found = {}
        for names in (["localhost", "198.18.1.12"], ["198.18.1.11", "198.18.1.12"], ["198.18.1.12", "198.18.1.13"],
                      ["198.18.1.12"], ["localhost"], []):
            master = find_master(hosts(*names), {})
            found[" ".join(names)] = [master.address, master.port, master.interface]
        print(json.dumps(found))
    """
    assert json.loads(in_network(code)) == {
        "localhost 198.18.1.12": ["198.18.1.11", 29501, "net0"],
        "198.18.1.11 198.18.1.12": ["198.18.1.11", 29501, "net0"],
        "198.18.1.12 198.18.1.13": ["198.18.1.12", 29500, "net0"],
        "198.18.1.12": ["198.18.1.12", 29500, "net0"],
        "localhost": ["127.0.0.1", 29500, None],
        "": ["198.18.1.11", 29501, "net0"],
    }


@pytest.mark.parametrize(
    ("environment", "said"),
    [({"MASTER_ADDR": "127.0.0.1"}, "to itself"), ({"MASTER_PORT": "0"}, "no port"), ({"MASTER_PORT": "x"}, "no port")],
)
def test_master_that_cannot_work_is_refused(environment: dict[str, str], said: str) -> None:
    code = f"""
        from icom.errors import UsageError
        from icom.launch.environment import find_master
        from icom.launch.hosts import Host

        try:
            find_master([Host("localhost", None, 1), Host("198.18.1.12", None, 2)], {environment})
        except UsageError as error:
            print(error)
    """
    assert said in in_network(code)


def test_users_master_goes_first() -> None:
    master = find_master([Host("localhost", None, 1)], {"MASTER_ADDR": "some.name", "MASTER_PORT": "31000"})
    assert (master.address, master.port) == ("some.name", 31000)


def test_this_machine_under_two_names_is_refused() -> None:
    with pytest.raises(UsageError, match=r"localhost, 127.0.0.2 are all this machine"):
        find_master([Host("localhost", None, 1), Host("127.0.0.2", None, 2)], {})


def test_own_names_are_known() -> None:
    own = [address for interface in machine.interfaces() for address in interface.ipv4]
    assert all(is_this_machine(name) for name in ("localhost", socket.gethostname(), *own))
    assert not is_this_machine("203.0.113.7")  # of documentation


def test_names_that_only_sshs_configuration_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh takes the configuration of the user in the password database, not of $HOME: another one by option."""
    config = tmp_path / "config"
    config.write_text("Host only-ssh-knows\n  HostName 203.0.113.9\n")
    ssh = shutil.which("ssh")
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nexec {ssh} -F {config} "$@"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert resolve("only-ssh-knows") == "203.0.113.9"
    with pytest.raises(IcomError, match=r"nowhere-to-be-found.invalid cannot be found.*HostName"):
        resolve("nowhere-to-be-found.invalid")


# The same everywhere.

MASTER = Master("198.18.1.11", 29500, "net0", "b", "because", "because")


def test_each_mpi_gets_its_own_variables() -> None:
    def of(mpi: Mpi, **environment: str) -> dict[str, str]:
        return values(cluster_variables(mpi, MASTER, environment))

    prefix = Path(sys.executable).parent
    pypi = of(Mpi("intel", prefix / "mpirun", ""))
    assert pypi["I_MPI_HYDRA_IFACE"] == "net0"
    assert pypi["I_MPI_ROOT"] == str(prefix.parent)
    assert "I_MPI_ROOT" not in of(Mpi("intel", Path("/opt/intel/mpi/bin/mpirun"), ""))
    assert of(Mpi("mpich", Path("/usr/bin/mpirun"), ""))["HYDRA_IFACE"] == "net0"
    open_mpi = of(Mpi("openmpi", Path("/usr/bin/mpirun"), ""))
    assert open_mpi["OMPI_MCA_oob_tcp_if_include"] == open_mpi["OMPI_MCA_btl_tcp_if_include"] == "net0"
    for found in (pypi, open_mpi):
        assert (found["MASTER_ADDR"], found["MASTER_PORT"], found["KMP_BLOCKTIME"]) == ("198.18.1.11", "29500", "1")
        assert not any(name.startswith("CCL_") for name in found)
    assert (
        of(Mpi("intel", prefix / "mpirun", ""), I_MPI_HYDRA_IFACE="ib0", KMP_BLOCKTIME="")["I_MPI_HYDRA_IFACE"] == "ib0"
    )


def test_what_the_user_set_stays_and_says_so() -> None:
    found = cluster_variables(Mpi("mpich", Path("/usr/bin/mpirun"), ""), MASTER, {"HYDRA_IFACE": "", "PATH": "/bin"})
    by_name = {variable.name: variable for variable in found}
    assert by_name["HYDRA_IFACE"] == Variable("HYDRA_IFACE", "", "set by you")
    assert by_name["PATH"].value == f"{Path(sys.executable).parent}:/bin"


def test_mpirun_finds_its_own_helpers_first() -> None:
    """Intel's mpirun takes mpiexec.hydra from PATH, where another MPI's may lie."""
    found = values(cluster_variables(Mpi("intel", Path("/opt/mpi/bin/mpirun"), ""), MASTER, {"PATH": "/usr/bin:/bin"}))
    assert found["PATH"].split(":") == [str(Path(sys.executable).parent), "/opt/mpi/bin", "/usr/bin", "/bin"]


def test_oneccl_is_set_up_where_its_bindings_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "oneccl_bindings_for_pytorch.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = values(cluster_variables(Mpi("openmpi", Path("/usr/bin/mpirun"), ""), MASTER, {}))
    assert found["CCL_ATL_TRANSPORT"] == "ofi"
    assert found["FI_PROVIDER"] == "tcp"


# Each host's own.


def test_threads_are_the_cores_of_this_host_shared_by_its_processes() -> None:
    for size in (1, 2):
        threads = values(host_variables({}, 0, size))["OMP_NUM_THREADS"]
        assert int(threads) == len(machine.cores_of_rank(0, size))
    assert values(host_variables({"OMP_NUM_THREADS": "99"}, 0, 1))["OMP_NUM_THREADS"] == "99"


def test_only_libraries_that_are_there_are_preloaded(tmp_path: Path) -> None:
    def preloaded(**environment: str) -> str | None:
        return values(host_variables(environment, 0, 1, tmp_path)).get("LD_PRELOAD")

    online = tmp_path / "sys/devices/system/cpu/online"
    online.parent.mkdir(parents=True)
    online.write_text("0\n")
    assert preloaded() is None
    folder = tmp_path / "usr/lib/x86_64-linux-gnu"
    folder.mkdir(parents=True)
    for name in ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"):
        (folder / name).touch()
        assert preloaded() == str(folder / name)
    other = tmp_path / "opt/intel/oneapi/compiler/latest/lib/libiomp5.so"
    other.parent.mkdir(parents=True)
    other.touch()
    assert preloaded() == f"{folder / 'libtcmalloc.so.4'}:{other}"
    assert preloaded(LD_PRELOAD="") == ""


def test_on_host_sets_them_and_becomes_the_command() -> None:
    code = "import json, os, shutil; print(json.dumps([dict(os.environ), shutil.which('accelerate')]))"
    place = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    environment = {"PATH": os.defpath, "MASTER_ADDR": "127.0.0.1", **place}
    command = [sys.executable, "-m", "icom.launch.on_host", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found, accelerate = json.loads(done.stdout)
    assert int(found["OMP_NUM_THREADS"]) == len(machine.cores_of_rank(1, 2))
    assert accelerate == str(Path(sys.executable).parent / "accelerate")
    kept = subprocess.run(
        command, cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "77"}, capture_output=True, text=True, check=True
    )
    assert json.loads(kept.stdout)[0]["OMP_NUM_THREADS"] == "77"


def test_on_host_gives_the_commands_exit_code_or_says_what_is_missing() -> None:
    def run(*command: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "icom.launch.on_host", *command]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)

    assert run("sh", "-c", "exit 5").returncode == 5
    missing = run("no-such-program")
    assert missing.returncode == 1
    assert missing.stderr.startswith("icom: Cannot start no-such-program")


def test_no_torch_is_loaded() -> None:
    """Each process of a run starts with this, and becomes another."""
    code = "import sys, icom.launch.on_host; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

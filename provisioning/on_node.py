"""What `icom provision` runs on the nodes themselves, in icom's environment there: `python -m provisioning.on_node`.

Knows nothing of AWS and of ssh. Prints for provisioning/health.py, which reads it over the connection.
"""

from __future__ import annotations

import importlib
import json
import platform
import shlex
import sys
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from icom import machine
from icom.errors import IcomError
from icom.files import write_atomically
from icom.parallel.place import DEFAULT_PORT
from icom.parallel.secret import SECRET, new_secret

MARK = "icom-node: "
"""Before the lines that are for us: a shell's start files may talk too."""
PACKAGES = ("torch", "accelerate", "diffusers", "transformers", "safetensors", "icom")
"""What the training imports, and what has to be equal on all nodes."""
PYTHON = "Python"
PROFILE = ".config/icom/environment.sh"
"""In the home folder of every node; login shells read it."""

_PROJECT = Path(__file__).parent.parent
_READ_PROFILE = f"[ ! -f ~/{PROFILE} ] || . ~/{PROFILE}"
_PROFILE_HEAD = (
    "# Written by icom provision, which replaces it. Login shells read it. What is set already stays.\n"
    "export PYTHONNOUSERSITE=1\n"  # as `make run` has it: conda's Python would import what lies in ~/.local
)


@dataclass(frozen=True)
class Facts:
    """What a node says of itself.

    Attributes:
        versions: package -> version, of those that can be imported; and Python's.
        broken: package -> why it cannot be imported.
        cpu_flags: those of AMX.
        kernel: its release.
        interfaces: address of another node -> the interface towards it; None without a route.
        gpus: that PyTorch can use.
    """

    versions: dict[str, str]
    broken: dict[str, str]
    cpu_flags: list[str]
    kernel: str
    interfaces: dict[str, str | None]
    gpus: int = 0


def read_facts(line: str) -> Facts:
    """Check what a node says of itself.

    Raises:
        ValueError: it is nothing that `main` prints.
    """
    said = json.loads(line)
    if not isinstance(said, dict) or set(said) != {field.name for field in fields(Facts)}:
        raise ValueError("other facts than were asked for")
    found = Facts(**said)
    flags, texts = found.cpu_flags, [found.versions, found.broken]
    ways = found.interfaces.items() if isinstance(found.interfaces, dict) else [(0, 0)]
    if not (
        all(isinstance(some, dict) and all(isinstance(text, str) for text in some.values()) for some in texts)
        and (isinstance(flags, list) and all(isinstance(flag, str) for flag in flags))
        and (isinstance(found.kernel, str) and type(found.gpus) is int)
        and all(isinstance(to, str) and (way is None or isinstance(way, str)) for to, way in ways)
    ):
        raise ValueError("facts of other types")
    return found


def facts(others: list[str]) -> Facts:
    """Look at this node.

    Args:
        others: private addresses of the other nodes.
    """
    versions, broken = {PYTHON: platform.python_version()}, {}
    for package in PACKAGES:
        try:
            importlib.import_module(package)
            versions[package] = metadata.version(package)
        except Exception as error:  # a broken package can raise anything
            broken[package] = f"{type(error).__name__}: {error}".splitlines()[0]
    amx = sorted(flag for flag in machine.cpu_flags() if flag.startswith("amx_"))
    interfaces = {address: machine.interface_towards(address) for address in others}
    return Facts(versions, broken, amx, platform.release(), interfaces, _gpus())


def _gpus() -> int:
    try:
        import torch
    except Exception:  # told among the packages
        return 0
    return torch.cuda.device_count()


def accelerate_config(number: int, count: int, address: str, gpus: int) -> dict[str, Any]:
    """What plain `accelerate launch` reads on a node.

    mpirun calls it once on each node. On CPUs, or with one GPU, each call makes one process, which mpirun numbers; with
    several GPUs it is one of `count` torchruns, each with `gpus` processes.

    Args:
        number: of this node, 0 for the master.
        count: how many nodes there are.
        address: the master's, private.
        gpus: of each node.
    """
    import yaml

    file = "multi_cpu.yaml" if gpus == 0 else "single_gpu.yaml" if gpus == 1 else "multi_gpu.yaml"
    config = yaml.safe_load((_PROJECT / "accelerate_configs" / file).read_text())
    assert isinstance(config, dict)
    config["num_processes"] = count * max(gpus, 1)
    if count > 1:
        # Accelerate puts this address in place of MASTER_ADDR where there is more than one machine, and only there.
        config |= {"num_machines": count, "machine_rank": number}
        config |= {"main_process_ip": address, "main_process_port": DEFAULT_PORT}
    return config


def profile(number: int, address: str, hosts: str) -> str:
    """Lines for login shells: the environment's programs, and on the master, where mpirun is called, all it needs.

    Args:
        number: of this node, 0 for the master.
        address: the master's, private.
        hosts: path of the hosts file.

    Raises:
        IcomError: there is no mpirun, or no way to a host.
    """
    from icom.launch.environment import cluster_variables, find_master
    from icom.launch.hosts import read_hosts
    from icom.launch.mpi import find_mpi, path_for

    if number > 0:
        return f'{_PROFILE_HEAD}export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"\n'
    mpi = find_mpi("auto")
    # Not the port that is free now: the profile is for later.
    given = {"MASTER_ADDR": address, "MASTER_PORT": str(DEFAULT_PORT), "PATH": ""}
    lines = [f'export PATH={shlex.quote(path_for(mpi.mpirun, given))}"$PATH"']  # which ends with a colon
    for variable in cluster_variables(mpi, find_master(read_hosts(hosts), given), given):
        if variable.name != "PATH":
            name, value = variable.name, shlex.quote(variable.value)
            lines.append(f'[ -n "${{{name}+set}}" ] || export {name}={value}')
    # Made here, so that it has never been on another computer or on a command line; mpirun hands it on to the ranks.
    lines.append(f'[ -n "${{{SECRET}+set}}" ] || export {SECRET}={new_secret()}')
    return _PROFILE_HEAD + "\n".join(lines) + "\n"


def give_environment(number: int, count: int, address: str, gpus: int, home: Path) -> None:
    """Write Accelerate's default configuration and the profile of this node; again replaces them.

    Args:
        number: as for `accelerate_config`.
        count: the same.
        address: the same.
        gpus: the same.
        home: of the user who trains.

    Raises:
        IcomError: as `profile`; or a file cannot be written.
    """
    import yaml
    from huggingface_hub.constants import HF_HOME  # as Accelerate finds it, without importing torch

    config = yaml.safe_dump(accelerate_config(number, count, address, gpus), sort_keys=False)
    for path, text, mode in (
        (Path(HF_HOME, "accelerate", "default_config.yaml"), config, 0o644),
        (home / PROFILE, profile(number, address, str(home / "hosts")), 0o600),  # the master's has the cluster's secret
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode(), "HOME", mode)
    _read_by_login_shells(home)


def _read_by_login_shells(home: Path) -> None:
    # bash reads the first alone where it is there, the other shells the second alone.
    for name in (".bash_profile", ".profile"):
        file = home / name
        before = file.read_text() if file.exists() else ""
        if (file.exists() or name == ".profile") and _READ_PROFILE not in before.splitlines():
            with file.open("a") as end:  # it may be a link to somewhere
                end.write(("\n" if before and not before.endswith("\n") else "") + _READ_PROFILE + "\n")


def main(words: list[str]) -> None:
    """`environment NUMBER COUNT ADDRESS GPUS`, or `facts ADDRESS…`, whose answer is a line of JSON behind MARK."""
    task, *arguments = words
    if task == "environment":
        number, count, address, gpus = arguments
        give_environment(int(number), int(count), address, int(gpus), Path.home())
    else:
        print(MARK + json.dumps(asdict(facts(arguments))), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except IcomError as error:
        print(f"icom: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

"""Where this process stands among those that a launcher started: rank, world size, local rank, master address.

Read from the environment alone, so that it is known before anything is connected. Each launcher has its own spelling:

- torchrun and `accelerate launch` for several processes: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE;
- Hydra (Intel MPI, MPICH): PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS;
- Open MPI: OMPI_COMM_WORLD_RANK, …_SIZE, …_LOCAL_RANK, …_LOCAL_SIZE;
- Slurm's srun: SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE, SLURM_STEP_NODELIST;
- Kubernetes' Indexed Job: JOB_COMPLETION_INDEX, beside a WORLD_SIZE;
- Kubeflow's Trainer: PET_NODE_RANK, PET_NNODES, PET_NPROC_PER_NODE, PET_MASTER_ADDR, PET_MASTER_PORT.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from icom.config.training import CollectivesName
from icom.errors import UsageError

DEFAULT_PORT = 29500
"""torchrun's and Accelerate's."""

CCL_BINDINGS = "oneccl_bindings_for_pytorch"
"""Importing it registers the torch.distributed backend `ccl`."""

_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Intel MPI or MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
}
"""Launcher -> names of rank, world size, local rank, local size."""

_TRAINER, _INDEXED_JOB = "Kubeflow's Trainer", "Indexed Job"
_OF_TRAINER = ("PET_NODE_RANK", "PET_NNODES", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OF_INDEXED_JOB = ("JOB_COMPLETION_INDEX", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_PROCESSES, _MASTER = "PET_NPROC_PER_NODE", ("PET_MASTER_ADDR", "PET_MASTER_PORT")
POD_VARIABLES = (*_OF_TRAINER[:2], _PROCESSES, *_MASTER, _OF_INDEXED_JOB[0])
"""They tell a pod's place among pods, and not a process's where there are several in one."""


@dataclass(frozen=True)
class Place:
    """One process among several.

    Attributes:
        rank: 0 … world_size - 1.
        world_size: how many processes there are.
        local_rank: 0 … local_size - 1, among those on this machine.
        local_size: how many those are.
        launcher: who said so; "none" for a process on its own.
        master_address: where rank 0 listens; None if nobody said.
        master_port: and at which port.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "none"
    master_address: str | None = None
    master_port: int = DEFAULT_PORT


SINGLE_PROCESS = Place()
"""Of a process that nobody started together with others."""


def find_place(environment: Mapping[str, str]) -> Place:
    """This process's place, from the variables of the launcher that started it.

    Where several launchers left theirs, they have to agree, with two exceptions: torchrun may be started by another
    launcher, once per machine, and then its own numbers hold; and mpirun may use srun to reach the machines, so that
    Slurm's numbers count only where there are no others, or where they say the same. What Kubernetes tells of the pod
    counts where no launcher started this process in it.

    Raises:
        UsageError: numbers that contradict each other, are incomplete or are none.
    """
    launchers = _launchers(environment)
    if _TRAINER in launchers:
        environment = {**environment, **{n.removeprefix("PET_"): environment[n] for n in _MASTER if n in environment}}
    found = {
        launcher: numbers
        for launcher, names in launchers.items()
        if (numbers := _numbers(environment, launcher, names))
    }
    slurm = _slurm(environment)
    if "torchrun" in found and "TORCHELASTIC_RUN_ID" in environment:
        found = {"torchrun": found["torchrun"]}
    elif slurm and all(numbers[:2] == slurm[:2] for numbers in found.values()):
        found = {"Slurm": slurm}  # srun speaks PMI too, but does not tell the local rank with it
    if not found:
        return Place(master_port=_port(environment))
    launcher, numbers = next(iter(found.items()))
    for other, others in found.items():
        if others != numbers:
            raise UsageError(
                f"The environment says two things about this process: {_said(launcher, numbers)}; "
                f"{_said(other, others)}. One of them is left over from something else: unset its variables, or start "
                "with one launcher."
            )
    rank, world_size, local_rank, local_size = numbers
    address = environment.get("MASTER_ADDR")
    if address is None and launcher == "Slurm":
        address = first_of_nodelist(environment.get("SLURM_STEP_NODELIST", ""))
    if address is None and local_size == world_size:
        address = "127.0.0.1"
    if world_size > local_size and (address is None or is_loopback(address)):
        problem = "MASTER_ADDR is not set" if address is None else f"MASTER_ADDR is {address}"
        raise UsageError(
            f"{world_size} processes on several machines ({launcher}), but {problem}: the others cannot find rank 0. "
            "`icom launch mpirun --hosts hosts` sets it; for a call of mpirun's own: eval \"$(icom launch env --hosts "
            'hosts)", or main_process_ip with num_machines in the accelerate configuration.'
        )
    return Place(rank, world_size, local_rank, local_size, launcher, address, _port(environment))


def choose_collectives(wanted: CollectivesName, device_default: str) -> tuple[str, str]:
    """Which torch.distributed backend sums the rows' gradient.

    Args:
        wanted: --collectives.
        device_default: what suits the device: `gloo` or `nccl`.

    Returns:
        (name, the reason).

    Raises:
        UsageError: what is asked for is not there or does not fit the device.
    """
    if wanted == "auto":
        if device_default == "nccl":
            return "nccl", "GPUs"
        if _why_no_ccl() is None:
            return "ccl", "oneCCL's bindings are installed"
        return "gloo", "ships with PyTorch"
    problem = None
    if wanted == "nccl" and device_default != "nccl":
        problem = "nccl is for GPUs, and this run is on the CPU"
    elif wanted == "ccl":
        problem = _why_no_ccl()
    elif wanted == "mpi":
        from torch.distributed import is_mpi_available

        problem = None if is_mpi_available() else "this PyTorch is built without MPI, as all of PyPI's are"
    if problem:
        raise UsageError(f"--collectives {wanted} cannot be used here: {problem}. --collectives auto takes what works.")
    return wanted, "asked for"


def first_of_nodelist(nodelist: str) -> str | None:
    """The first host of Slurm's compact notation: "node[03-05,7],big" is node03. None for an empty one."""
    match = re.match(r"([^,\[]+)(?:\[([^,\]-]+))?", nodelist)
    return match[1] + (match[2] or "") if match else None


def _launchers(environment: Mapping[str, str]) -> dict[str, tuple[str, str, str, str]]:
    """Those whose variables are looked at: what tells of a pod counts where nothing tells of the process."""
    if any(rank in environment for rank, *_ in _LAUNCHERS.values()):
        return _LAUNCHERS
    if any(name in environment for name in _OF_TRAINER[:2]):
        processes = environment.get(_PROCESSES, "1")
        if processes != "1":
            raise UsageError(
                f"{_PROCESSES} asks for {processes} processes on this machine, and this one was started alone. Set "
                "numProcPerNode to 1, or let torchrun start them: torchrun -m icom train …"
            )
        return {_TRAINER: _OF_TRAINER}
    # The index alone is that of one among many tasks that do not know of each other.
    together = all(name in environment for name in _OF_INDEXED_JOB[:2])
    return {_INDEXED_JOB: _OF_INDEXED_JOB} if together else _LAUNCHERS


def _numbers(
    environment: Mapping[str, str], launcher: str, names: tuple[str, str, str, str]
) -> tuple[int, int, int, int] | None:
    """(rank, world size, local rank, local size); None where this launcher left nothing."""
    rank, size, local_rank, local_size = names
    if rank not in environment and size not in environment:
        return None
    missing = [name for name in (rank, size) if name not in environment]
    if missing:
        raise UsageError(f"The environment is incomplete ({launcher}): {missing[0]} is not set.")
    # Some launchers tell nothing of the machine; then this process takes all of it.
    values = (environment[rank], environment[size], environment.get(local_rank, "0"), environment.get(local_size, "1"))
    return _checked(launcher, dict(zip(names, values, strict=True)))


def _slurm(environment: Mapping[str, str]) -> tuple[int, int, int, int] | None:
    """Only of a task that srun started: a batch script has SLURM_PROCID as well, and is no rank."""
    if "SLURM_STEP_NUM_TASKS" not in environment or "SLURM_PROCID" not in environment:
        return None
    # For instance "2(x3),1": two tasks on each of three nodes, one on the fourth.
    per_node: list[str] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")):
        per_node += [count] * int(times or 1)
    node = environment.get("SLURM_NODEID", "0")
    here = per_node[int(node)] if node.isdigit() and int(node) < len(per_node) else "1"
    return _checked(
        "Slurm",
        {
            "SLURM_PROCID": environment["SLURM_PROCID"],
            "SLURM_STEP_NUM_TASKS": environment["SLURM_STEP_NUM_TASKS"],
            "SLURM_LOCALID": environment.get("SLURM_LOCALID", "0"),
            "SLURM_STEP_TASKS_PER_NODE": here,
        },
    )


def _checked(launcher: str, values: dict[str, str]) -> tuple[int, int, int, int]:
    for name, value in values.items():
        if not _is_number(value):
            raise UsageError(f"The environment is wrong ({launcher}): {name} is {value!r}, no number.")
    rank, size, local_rank, local_size = (int(value) for value in values.values())
    if not (rank < size and local_rank < local_size <= size):
        said = ", ".join(f"{name}={value}" for name, value in values.items())
        raise UsageError(f"The environment contradicts itself ({launcher}): {said}.")
    return rank, size, local_rank, local_size


def _said(launcher: str, numbers: tuple[int, int, int, int]) -> str:
    rank, size, local_rank, local_size = numbers
    return f"{launcher} rank {rank} of {size} ({local_rank} of {local_size} on this machine)"


def _port(environment: Mapping[str, str]) -> int:
    port = environment.get("MASTER_PORT", str(DEFAULT_PORT))
    if not _is_number(port) or not 0 < int(port) < 2**16:
        raise UsageError(f"MASTER_PORT is {port!r}; a port number is 1 … 65535.")
    return int(port)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def is_loopback(address: str) -> bool:
    """Whether the address (name or number) says that it leads to this machine alone."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def has_ccl() -> bool:
    """Whether oneCCL's bindings are installed; imports nothing."""
    return importlib.util.find_spec(CCL_BINDINGS) is not None


def _why_no_ccl() -> str | None:
    """Why oneCCL's bindings cannot be used; None when they can. Imports them, which registers the backend."""
    if not has_ccl():
        return "oneCCL's bindings for PyTorch are not installed (docs/cluster.md has the command)"
    try:
        importlib.import_module(CCL_BINDINGS)
    except (ImportError, OSError, RuntimeError) as error:
        return f"oneCCL's bindings do not load ({str(error).splitlines()[0]}); they need libmpi and libfabric"
    return None

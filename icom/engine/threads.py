"""Which cores this process computes on."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from icom import machine

_LOCAL = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun, accelerate launch
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Intel MPI, MPICH
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)

_OPENMP_BINDS = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")


def local_rank_and_size(environment: Mapping[str, str]) -> tuple[int, int]:
    """This process's number among those that a launcher started on this machine, and how many they are."""
    for rank, size in _LOCAL:
        if rank in environment and size in environment:
            return int(environment[rank]), int(environment[size])
    return 0, 1


def use_own_cores() -> None:
    """One thread for each physical core that this process may use; with several processes, bound to those cores.

    Two ranks on a machine with two NUMA nodes get a node each. OpenMP's threads inherit the binding: call this before
    the first computation. What was set on purpose stays: OMP_NUM_THREADS the number of threads (accelerate launch
    sets it), and OpenMP's own variables where these run.
    """
    rank, size = local_rank_and_size(os.environ)
    cores = machine.cores_of_rank(rank, size)
    if size > 1 and not any(name in os.environ for name in _OPENMP_BINDS):
        os.sched_setaffinity(0, cores)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(cores))

"""Which cores this process computes on."""

from __future__ import annotations

import os

import torch

from icom import machine
from icom.parallel.place import Place

_OPENMP_BINDS = ("GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")
"""Not KMP_AFFINITY, which `accelerate launch` sets for everybody: it places threads inside the process's own cores."""


def use_own_cores(place: Place) -> None:
    """One thread for each physical core that this process may use; with several processes, bound to those cores.

    Two ranks on a machine with two NUMA nodes get a node each. OpenMP's threads inherit the binding: call this before
    the first computation. What was set on purpose stays: OMP_NUM_THREADS the number of threads (accelerate launch
    sets it), and OpenMP's own variables where these run. Slurm binds its tasks itself, or means to have them unbound.
    """
    cores = machine.cores_of_rank(place.local_rank, place.local_size)
    if place.local_size > 1 and place.launcher != "Slurm" and not any(name in os.environ for name in _OPENMP_BINDS):
        os.sched_setaffinity(0, cores)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(cores))

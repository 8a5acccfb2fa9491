"""Start a run on several machines: the hosts file, what mpirun and its processes need, the checks before it."""

"""The options of `icom launch mpirun` and `icom launch env`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

Flavour = Literal["intel", "mpich", "openmpi"]
FlavourOrAuto = Literal["auto", "intel", "mpich", "openmpi"]


@dataclass(kw_only=True)
class LaunchMpirunConfig:
    """Check all hosts, then train on them with mpirun.

    Example: icom launch mpirun --hosts hosts -- --train_data_dir photos --placeholder_token "<dicoo>" …
    """

    training_options: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- TRAINING OPTIONS")
    ] = ()
    """Everything after `--`: the options of `icom train`. They are checked before anything starts."""
    hosts: str
    """Required. File with one host per line (hosts.example explains it); rank 0 runs on the first."""
    n: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Processes in all. Default: as many as the hosts have room for, by their slots or else --ppn."""
    ppn: Annotated[int, tyro.conf.arg(aliases=["-ppn"])] = 1
    """Processes per host whose line says nothing else (host:2). One per socket is best."""
    accelerate_config: str | None = None
    """Configuration for `accelerate launch`. Default: accelerate_configs/multi_cpu.yaml of this project."""
    mpi: FlavourOrAuto = "auto"
    """Whose mpirun. `auto`: this environment's own, else the first in PATH."""
    dry_run: bool = False
    """Print the command and the environment, and stop; no host is asked anything."""


@dataclass(kw_only=True)
class LaunchEnvConfig:
    """Print `export` lines for people who call mpirun themselves.

    Example: eval "$(icom launch env --hosts hosts)"; mpirun -f hosts -n 3 -ppn 1 accelerate launch …
    """

    hosts: str | None = None
    """File with one host per line. Default: this machine is the first, and the default route leads to the others."""
    mpi: FlavourOrAuto = "auto"
    """Whose mpirun, as in `icom launch mpirun`."""

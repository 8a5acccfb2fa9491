"""Whose mpirun there is, and the command line in its dialect."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from icom.config.launch import Flavour, FlavourOrAuto
from icom.errors import IcomError
from icom.launch.hosts import Share

NAMES: dict[Flavour, str] = {"intel": "Intel MPI", "mpich": "MPICH", "openmpi": "Open MPI"}

_PROGRAMS: dict[Flavour, tuple[str, ...]] = {
    "intel": ("mpirun",),
    "mpich": ("mpirun", "mpirun.mpich", "mpiexec.mpich"),
    "openmpi": ("mpirun", "mpirun.openmpi"),
}
"""What each calls its mpirun; the longer names are Debian's."""

_SIGNS: tuple[tuple[str, Flavour], ...] = (
    # Intel's is a Hydra too: it has to come first.
    ("Intel(R) MPI Library", "intel"),
    ("HYDRA", "mpich"),
    ("Open MPI", "openmpi"),
    ("OpenRTE", "openmpi"),
)
"""What `mpirun --version` says."""

_PASSED_ON = (
    *("ACCELERATE_", "CCL_", "COMET_", "CONDA_", "DNNL_", "FI_", "GLOO_", "GOMP_", "HF_", "HUGGINGFACE_", "ICOM_"),
    *("KMP_", "LD_", "MALLOC_", "MASTER_", "MKL_", "OMP_", "ONEDNN_", "PYTHON", "TORCH_", "WANDB_", "XDG_CACHE_HOME"),
    *("PATH", "VIRTUAL_ENV", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
"""How names start that Open MPI is told to pass on; the others pass on everything."""

_VERSION_SECONDS = 20


@dataclass(frozen=True)
class Mpi:
    """An mpirun on this machine.

    Attributes:
        flavour: whose it is.
        mpirun: absolute path.
        version: the line in which it names itself.
    """

    flavour: Flavour
    mpirun: Path
    version: str


def find_mpi(wanted: FlavourOrAuto) -> Mpi:
    """The mpirun of this Python environment (PyPI's impi-rt puts one there), else the first in PATH.

    Raises:
        IcomError: there is none, or none of the wanted kind.
    """
    own = Path(sys.executable).parent
    others = []
    programs = list(dict.fromkeys(name for flavour in NAMES for name in _PROGRAMS[flavour]))
    for name in programs if wanted == "auto" else _PROGRAMS[wanted]:
        for path in (str(own), os.environ.get("PATH", os.defpath)):
            if not (found := shutil.which(name, path=path)):
                continue
            version = describe(Path(found))
            flavour = flavour_of(version)
            if flavour and wanted in ("auto", flavour):
                return Mpi(flavour, Path(found).absolute(), version)
            others.append(f"{found} is {NAMES[flavour] if flavour else 'of an unknown kind'}")
    what = "No mpirun was found" if wanted == "auto" else f"No mpirun of {NAMES[wanted]} was found"
    seen = f" ({'; '.join(dict.fromkeys(others))})" if others else ""
    raise IcomError(
        f"{what} in {own} or in PATH{seen}. Intel MPI: make setup-master EXTRAS=mpi; MPICH or Open MPI on Debian and "
        "Ubuntu: apt-get install mpich, or openmpi-bin. Every host needs the same one."
    )


def flavour_of(said: str) -> Flavour | None:
    """Whose mpirun it is that says this of itself; None if nobody's that icom knows."""
    return next((flavour for sign, flavour in _SIGNS if sign in said), None)


def describe(mpirun: Path) -> str:
    """What `mpirun --version` says in two lines; the reason in brackets where it does not run."""
    try:
        done = subprocess.run(
            [mpirun, "--version"],
            # Intel's mpirun takes the next program from PATH, where another MPI's may come first.
            env={**os.environ, "PATH": path_for(mpirun, os.environ)},
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            timeout=_VERSION_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"({mpirun} does not run: {error})"
    # A long block of build options follows in MPICH's.
    return " ".join(" ".join((done.stdout or done.stderr).splitlines()[:2]).split())


def path_for(mpirun: Path, environment: Mapping[str, str]) -> str:
    """PATH with the folders of this Python and of mpirun in front, where `accelerate` and mpirun's helpers are."""
    folders = [str(Path(sys.executable).parent), str(mpirun.parent)]
    if mpirun.parent in (Path("/usr/bin"), Path("/bin")):
        folders.pop()  # it is in every PATH, and before the rest it would hide what the user put there
    return os.pathsep.join(dict.fromkeys([*folders, *environment.get("PATH", os.defpath).split(os.pathsep)]))


def command(mpi: Mpi, shares: list[Share], program: list[str], names: Iterable[str]) -> list[str]:
    """mpirun's command line. The hosts stand in it: the MPIs' hosts files differ, and none is left behind.

    Args:
        mpi: from `find_mpi`.
        shares: the hosts and their numbers of processes.
        program: what each process runs.
        names: of the variables in its environment, for Open MPI, which passes on only what it is told to.
    """
    counts = {share.ranks for share in shares}
    total = str(sum(share.ranks for share in shares))
    if mpi.flavour == "openmpi":
        listed = ",".join(f"{share.host.name}:{share.ranks}" for share in shares)
        by = f"ppr:{shares[0].ranks}:node" if len(counts) == 1 else "slot"
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        # Its own binding gives each process a single core; icom binds processes to their share of the cores.
        options = ["--host", listed, "-n", total, "--map-by", by, "--bind-to", "none"]
        passed = [word for name in sorted(names) if name.startswith(_PASSED_ON) for word in ("-x", name)]
        return [str(mpi.mpirun), *root, *options, *passed, *program]
    hosts: list[str] = [share.host.name for share in shares]
    per_host = ["-ppn", str(shares[0].ranks)]
    if len(counts) > 1 and mpi.flavour == "mpich":
        hosts, per_host = [f"{share.host.name}:{share.ranks}" for share in shares], []
    elif len(counts) > 1:
        # Intel's ignores that number, but fills a name again for each time that it stands there (MPICH does not).
        hosts, per_host = [share.host.name for share in shares for _ in range(share.ranks)], ["-ppn", "1"]
    return [str(mpi.mpirun), "-hosts", ",".join(hosts), "-n", total, *per_host, *program]

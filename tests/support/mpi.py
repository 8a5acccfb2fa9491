"""Training on several hosts, as a user starts it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.command import ROOT
from tests.support.hosts import HOME, Host
from tests.support.namespaces import Command

BIN = Path(sys.executable).parent
OUTPUT = "/tmp/learned"
"""On every host's own disk."""

ENVIRONMENT = {
    "PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)]),
    "OMP_NUM_THREADS": "1",  # all hosts share this machine's cores
    "HF_ENDPOINT": "http://127.0.0.1:9",
}
"""Of a user's shell on the first host, with icom's environment active."""
HOSTS_FILE = HOME / "hosts"
PER_HOST = ("-n", "{processes}", "-ppn", "1")
INTEL = ("mpirun", "-f", str(HOSTS_FILE), *PER_HOST)
MPICH = ("mpirun.mpich", "-f", str(HOSTS_FILE), *PER_HOST)


@dataclass(frozen=True)
class Run:
    """What a run left.

    Attributes:
        code: mpirun's exit code.
        said: what mpirun showed of all processes, output and errors.
    """

    code: int
    said: str

    @property
    def lines(self) -> list[str]:
        """Without progress bars, after the last of which a message may stand in the same line."""
        text = re.sub(r"^(training|latents):[^\]\n]*\]?", "", self.said, flags=re.MULTILINE)
        return [line for line in text.splitlines() if line.strip()]

    def told(self) -> list[str]:
        """icom's messages, banner aside."""
        return [line for line in self.lines if line.startswith("icom: ") and "trainable numbers" not in line]


def training_options(options: Mapping[str, object]) -> list[str]:
    """ICOM's training options, on the bundled model; `options` are added or put in place of its own, None drops one."""
    training: dict[str, object] = {
        "pretrained_model_name_or_path": "bundled",
        "train_data_dir": "bundled",
        "learnable_property": "object",
        "placeholder_token": "<concept>",
        "initializer_token": "object",
        "resolution": 64,
        "train_batch_size": 1,
        "seed": 7,
        "gradient_accumulation_steps": 1,
        "max_train_steps": 6,
        "learning_rate": 2.0e-3,
        "lr_scheduler": "constant",
        "lr_warmup_steps": 0,
        "output_dir": OUTPUT,
        "mixed_precision": "no",
        "num_comparison_images": 0,
        "report_to": "none",
    }
    return [f"--{name}={value}" for name, value in (training | dict(options)).items() if value is not None]


def start(
    hosts: Sequence[Host],
    mpi: Sequence[str] = INTEL,
    variables: Mapping[str, str] | None = None,
    **options: object,
) -> Command:
    """Start ICOM's command on these hosts, from the first one, as its README has it.

    Args:
        hosts: rank 0's first.
        mpi: mpirun with its own options.
        variables: set in the user's shell besides those that the environment needs.
        options: training options that differ.
    """
    _need(mpi[0])
    write_hosts_file(hosts)
    words = [
        *(word.format(processes=len(hosts)) for word in mpi),
        *("accelerate", "launch", "--config_file", "accelerate_configs/multi_cpu.yaml", "textual_inversion_icom.py"),
        *training_options(options),
    ]
    flavour = "mpich" if mpi[0] == "mpirun.mpich" else "intel"
    settings = f"{shlex.quote(sys.executable)} -m icom launch env --hosts {HOSTS_FILE} --mpi {flavour}"
    shell = f'settings=$({settings}) && eval "$settings" && exec {shlex.join(words)}'
    return hosts[0].start(["sh", "-c", shell], {**ENVIRONMENT, **(variables or {})}, ROOT)


def launch(
    hosts: Sequence[Host],
    mpi: str = "intel",
    variables: Mapping[str, str] | None = None,
    training: Sequence[str] = (),
    **options: object,
) -> Command:
    """Start the same with `icom launch mpirun`, the hosts file being written already.

    Args:
        hosts: the first is where it is typed.
        mpi: intel, mpich or openmpi.
        variables: as for `start`.
        training: words for another training than ICOM's.
        options: as for `start`.
    """
    _need("mpirun" if mpi == "intel" else f"mpirun.{mpi}")
    words = [sys.executable, "-m", "icom", "launch", "mpirun", "--hosts", str(HOSTS_FILE), "--mpi", mpi, "--"]
    words += training or training_options(options)
    return hosts[0].start(words, {**ENVIRONMENT, **(variables or {})}, ROOT)


def write_hosts_file(hosts: Sequence[Host]) -> None:
    """The hosts file of the first of them, in its home."""
    names = ["localhost", *(host.name for host in hosts[1:])]
    hosts[0].path(HOSTS_FILE).write_text("\n".join(names) + "\n")


def _need(mpirun: str) -> None:
    if shutil.which(mpirun, path=ENVIRONMENT["PATH"]) is None:
        pytest.skip(f"{mpirun} is not installed (make test installs it, as root on Debian or Ubuntu)")


def finish(command: Command) -> Run:
    """Wait for its end."""
    with command:
        said, _ = command.communicate()
    return Run(command.returncode, said)


def metrics(host: Host, output: str = OUTPUT) -> list[dict[str, float]]:
    """The steps that a run has written so far; empty before the first."""
    try:
        lines = host.path(Path(output, "metrics.jsonl")).read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def ranks(host: Host) -> list[int]:
    """The machine's pids of the processes that train on this host."""
    return host.processes(r"^\S*python\S* (-\S+ )*\S*textual_inversion_icom\.py")

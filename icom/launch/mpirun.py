"""`icom launch mpirun` and `icom launch env`."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from icom.config.launch import LaunchEnvConfig, LaunchMpirunConfig
from icom.config.trainings import TrainingConfig, split_training
from icom.errors import IcomError, UsageError
from icom.launch.checks import Target, check, show_problems
from icom.launch.environment import (
    INTERFACES,
    YOURS,
    Master,
    Variable,
    cluster_variables,
    find_master,
    host_variables,
    is_this_machine,
)
from icom.launch.hosts import Share, read_hosts, share_out
from icom.launch.launch import Launch, become, count, show, training_config
from icom.launch.mpi import NAMES, Mpi, command, find_mpi
from icom.launch.probe import Contents, Request, notice_of
from icom.parallel.secret import SECRET, find_secret, new_secret

ROOT = Path(__file__).parent.parent.parent
ACCELERATE_CONFIG = ROOT / "accelerate_configs" / "multi_cpu.yaml"


def launch_mpirun(config: LaunchMpirunConfig) -> None:
    """Check all hosts and become mpirun; its exit code is this command's.

    Raises:
        UsageError: options, training options or hosts file are wrong.
        IcomError: a host cannot take part (all reasons of all hosts are in the table), or there is no mpirun.
    """
    training = training_config(config.training_options, "icom launch mpirun --hosts hosts")
    shares = share_out(read_hosts(config.hosts), config.n, config.ppn)
    accelerate_config = _accelerate_config(config.accelerate_config)
    mpi = find_mpi(config.mpi)
    master = find_master([share.host for share in shares], os.environ)
    find_secret(os.environ)  # a wrong one is refused here, and not by every rank
    launch = mpirun(mpi, shares, master, accelerate_config, config.training_options, os.environ, new_secret())
    if config.dry_run:
        show(launch, _own_variables(shares, launch))
        return
    targets = [Target(share.host.name, is_this_machine(share.host.name), share.ranks) for share in shares]
    script = ROOT / split_training(config.training_options)[0].script
    request = _request(training, [accelerate_config, script], mpi, master, launch)
    if notice := notice_of(request.contents):
        print(notice, file=sys.stderr)
    print(f"icom: asking {count(len(targets), 'host')} (a large model takes a while to read) …", file=sys.stderr)
    problems = check(targets, request, os.environ)
    if problems:
        show_problems(problems)
    if any(problem.stops for problem in problems):
        raise IcomError("Nothing was started.")
    ranks = sum(share.ranks for share in shares)
    print(
        f"icom: {count(ranks, 'process', 'processes')} on {count(len(shares), 'host')} by {NAMES[mpi.flavour]}, "
        f"rank 0 at {master.address} port {master.port}",
        file=sys.stderr,
        flush=True,
    )
    become(launch)


def mpirun(
    mpi: Mpi,
    shares: list[Share],
    master: Master,
    accelerate_config: Path,
    training_options: Sequence[str],
    environment: Mapping[str, str],
    secret: str,
) -> Launch:
    """What `icom launch mpirun` starts. Pure: it looks at nothing but these.

    Args:
        mpi: whose mpirun.
        shares: the hosts and their numbers of processes.
        master: where rank 0 will listen.
        accelerate_config: for `accelerate launch`, which every process goes through.
        training_options: as typed: the training's name, which may be missing, and its options.
        environment: the user's, which goes first.
        secret: for the processes to know each other by, unless the user gave one.
    """
    variables = [*cluster_variables(mpi, master, environment), _secret_variable(environment, secret)]
    # Quiet, because icom tells its errors itself: no stack of Accelerate's from every process after them.
    program = [sys.executable, "-m", "icom.launch.on_host", "accelerate", "launch", "--quiet"]
    program += ["--config_file", str(accelerate_config)]
    program += ["--main_process_ip", master.address, "--main_process_port", str(master.port)]
    training, options = split_training(training_options)
    program += [str(ROOT / training.script), *options]
    names = {*environment, *(variable.name for variable in variables)}
    return Launch(command(mpi, shares, program, names), variables, f"{NAMES[mpi.flavour]}: {mpi.version}")


def _secret_variable(environment: Mapping[str, str], secret: str) -> Variable:
    if SECRET in environment:
        return Variable(SECRET, environment[SECRET], YOURS, "(not shown)")
    why = "the processes know each other by it; never on a command line"
    return Variable(SECRET, secret, why, "(made for each run)")


def launch_env(config: LaunchEnvConfig) -> None:
    """Print what is the same on all hosts as `export` lines of a shell.

    Raises:
        UsageError: the hosts file is wrong.
        IcomError: there is no mpirun, or no way to the hosts.
    """
    mpi = find_mpi(config.mpi)
    hosts = read_hosts(config.hosts) if config.hosts else []
    print(f"# For {NAMES[mpi.flavour]}: {mpi.mpirun}")
    for variable in cluster_variables(mpi, find_master(hosts, os.environ), os.environ):
        print(f"export {variable.name}={shlex.quote(variable.value)}  # {variable.why}")
    # Made by the shell that reads it, so that it stands neither here nor on a command line.
    make = shlex.join([sys.executable, "-c", "import secrets; print(secrets.token_hex(32))"])
    print(f'[ -n "${{{SECRET}+set}}" ] || export {SECRET}="$({make})"  # {_secret_variable(os.environ, "").why}')
    if mpi.flavour == "openmpi":
        print("# Open MPI passes on only what it is told to: mpirun -x ICOM_SECRET -x MASTER_ADDR -x MASTER_PORT …")
    print("# Threads, preloads and gloo's interface are each host's own affair: mpirun … python -m icom.launch.on_host")
    print("# accelerate launch … sets them there.")


def _accelerate_config(given: str | None) -> Path:
    path = Path(given).expanduser().absolute() if given else ACCELERATE_CONFIG
    if not path.is_file():
        where = (
            "--accelerate_config names it" if given else "it comes with icom's repository: install icom from a clone"
        )
        raise UsageError(f"No file {path} ({where}).")
    if given:
        _read_as_accelerate(path)
    return path


def _read_as_accelerate(path: Path) -> None:
    """Let Accelerate itself read its configuration, here and once, where every rank would end in its traceback.

    Raises:
        UsageError: it cannot, or would start an mpirun of its own in every rank.
    """
    from accelerate.commands.config.config_args import load_config_from_file

    advice = "Leave --accelerate_config out: icom's own serves every machine as it is."
    try:
        read = load_config_from_file(str(path))
    except Exception as error:  # ValueError for its keys, and what YAML and dataclasses raise
        reason = str(error).partition(", please")[0]
        raise UsageError(
            f"Accelerate does not take {path}: {reason}. Keys of older versions, such as ipex_config and use_xpu, "
            f"have to go (docs/cluster.md). {advice}"
        ) from error
    if getattr(read, "mpirun_config", None):
        raise UsageError(
            f"{path} has an mpirun_config, with which every process would start an mpirun of its own. Remove it. "
            f"{advice}"
        )


def _request(training: TrainingConfig, files: Sequence[Path], mpi: Mpi, master: Master, launch: Launch) -> Request:
    # One that the user set may be no interface's name: Open MPI takes networks and lists too.
    ours = any(v.name in INTERFACES[mpi.flavour] and v.why != YOURS for v in launch.env)
    return Request(
        contents=Contents.of(training, map(str, files)),
        mpirun=str(mpi.mpirun),
        interface=master.interface if ours else None,
        address=master.address,
        port=master.port,
        listens=False,
        word=secrets.token_hex(8),
        environment={},
    )


def _own_variables(shares: list[Share], launch: Launch) -> list[Variable]:
    """What this machine would decide for itself, if it takes part."""
    own = next((share for share in shares if is_this_machine(share.host.name)), None)
    environment = dict(os.environ) | {variable.name: variable.value for variable in launch.env}
    return host_variables(environment, 0, own.ranks) if own else []

"""The script of a job, as a person would have written it. Pure: it looks at nothing but its arguments."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from icom.config.launch import LaunchSlurmConfig
from icom.config.trainings import Training
from icom.errors import UsageError

SAVE_SECONDS = 120
"""So long before the time limit the processes are told to save. Slurm may do it up to a minute earlier."""

_BEGINNING = """
set -uo pipefail

max_requeues={max_requeues}
python={python}
{variables}
starts_again=${{SLURM_RESTART_COUNT:-0}}
if ((starts_again > max_requeues)); then
  echo "icom: this job was started again $max_requeues times: enough (--max_requeues). To go on: sbatch {script}" >&2
  exit 1
fi
"""

_TRAINS = """
# Rank 0 runs on the first node, and so does this script. NodeAddr is how Slurm itself reaches it.
first=$(scontrol --oneliner show node "$SLURMD_NODENAME" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
MASTER_ADDR=${{MASTER_ADDR:-$first}}
# Jobs share nodes, so each has a port of its own, below those that the kernel gives to clients.
MASTER_PORT=${{MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}}
# The processes know each other by it. An empty one of yours stays empty: without.
ICOM_SECRET=${{ICOM_SECRET-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')}}
# For the message after the loss of a node.
ICOM_RESTARTED_BY=slurm
export MASTER_ADDR MASTER_PORT ICOM_SECRET ICOM_RESTARTED_BY

# srun asks for the CPUs anew. When a process ends, the others are left to save and end by themselves: the SIGTERM that
# --kill-on-bad-exit sends would come in between.
step=(--cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" --kill-on-bad-exit=0 --wait=60{container})

code=0
# Do all nodes have the same icom, pictures and model, and do they reach each other?
srun "${{step[@]}}" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \\
  "$python" -m icom.launch.look {script}{words} "${{training[@]}}" || code=$?
if ((code == 0)); then
  srun "${{step[@]}}" --ntasks-per-node={ppn} \\
    "$python" -m icom.launch.on_host "$python" -m icom {command} "${{training[@]}}" || code=$?
fi
"""

_DOES_A_PART = """
# srun asks for the CPUs anew.
code=0
srun --ntasks=1 --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}"{container} \\
  "$python" -m icom.launch.on_host "$python" -m icom {words} --part "$SLURM_ARRAY_TASK_ID" || code=$?
"""

_END = """
# 75: a process was lost. 143: SIGTERM, before the time limit or for a job that goes first. 137: SIGKILL of one process
# (its node died, or memory ran out). All have checkpoints to go on from. (A script that is told to end itself, by
# scancel or by Slurm that requeues the job, does not come here.)
case $code in
75 | 137 | 143 | 233)
  if ((starts_again < max_requeues)); then
    echo "icom: exit code $code: back into the queue, then on from {from_what}." >&2
    scontrol requeue "$SLURM_JOB_ID" && sleep 60 # Slurm ends this script meanwhile
  fi
  ;;
esac
exit "$code"
"""


def job_script(
    config: LaunchSlurmConfig,
    *,
    training: Training,
    options: Sequence[str],
    folder: Path,
    chdir: Path,
    cpus_per_task: int | None,
    tasks: Sequence[int] | None,
    at_once: int | None,
) -> str:
    """What sbatch gets.

    Args:
        config: of the command.
        training: what is started.
        options: lines of the shell's with its options, from `shell_lines`.
        folder: absolute; the script and the logs lie in it.
        chdir: the job's working directory, absolute.
        cpus_per_task: CPUs of each process; None: Slurm's default.
        tasks: numbers of an array's tasks; None: no array.
        at_once: how many of them may run together.

    Raises:
        UsageError: --time or --sbatch cannot be read.
    """
    script = folder / "icom.sbatch"
    head = [
        "#!/bin/bash",
        f"# Made by `icom launch slurm`. By hand: sbatch {shlex.quote(str(script))}",
        "# It goes on from the newest checkpoint in --output_dir, and starts anew where there is none.",
        *_directives(config, folder.name, chdir, cpus_per_task, tasks, at_once, _log(folder, "slurm", tasks)),
    ]
    body = _BEGINNING + _TRAINS + _END
    body = body.format(
        **_common(config, script),
        variables="training=(\n" + "\n".join(f"  {line}" for line in options) + "\n)\n",
        container=_container(config, chdir),
        ppn=processes_per_node(config),
        command=training.command,
        words="".join(f" {word}" for word in training.words),
        from_what="the last checkpoint",
    )
    return "\n".join(head) + "\n" + body


def parts_script(
    config: LaunchSlurmConfig,
    *,
    name: str,
    words: Sequence[str],
    folder: Path,
    chdir: Path,
    cpus_per_task: int | None,
    tasks: Sequence[int],
    at_once: int | None,
) -> str:
    """What sbatch gets for a job array whose tasks do a part each, with one process.

    Args:
        config: of the job.
        name: of the work, for the queue and the names of script and logs.
        words: what follows `icom`; `--part NUMBER` comes behind it.
        folder, chdir, cpus_per_task, at_once: as in `job_script`.
        tasks: numbers of the parts.

    Raises:
        UsageError: --time or --sbatch cannot be read.
    """
    script = folder / f"{name}.sbatch"
    head = [
        "#!/bin/bash",
        f"# Made by `icom data pipeline`. By hand: sbatch {shlex.quote(str(script))}",
        "# What a part has made stays, and is not made again.",
        *_directives(config, name, chdir, cpus_per_task, tasks, at_once, _log(folder, name, tasks)),
    ]
    body = _BEGINNING + _DOES_A_PART + _END
    body = body.format(
        **_common(config, script),
        variables="",
        container=_container(config, chdir),
        words=shlex.join(words),
        from_what="what is there",
    )
    return "\n".join(head) + "\n" + body


def _common(config: LaunchSlurmConfig, script: Path) -> dict[str, object]:
    """What stands in every script."""
    python = "python" if config.container_image else shlex.quote(sys.executable)
    return {"max_requeues": config.max_requeues, "python": python, "script": shlex.quote(str(script))}


def _log(folder: Path, name: str, tasks: Sequence[int] | None) -> str:
    """Where a job writes to, as Slurm takes it."""
    return f"{str(folder).replace('%', '%%')}/{name}-{'%A_%a' if tasks is not None else '%j'}.log"


def _directives(
    config: LaunchSlurmConfig,
    name: str,
    chdir: Path,
    cpus_per_task: int | None,
    tasks: Sequence[int] | None,
    at_once: int | None,
    log: str,
) -> list[str]:
    """The #SBATCH lines."""
    ppn = processes_per_node(config)
    wanted: list[tuple[str, object]] = [
        ("job-name", f"icom-{re.sub(r'[^A-Za-z0-9_.-]', '-', name)}"),
        ("nodes", config.nodes),
        ("ntasks-per-node", ppn),
        ("cpus-per-task", cpus_per_task),
        ("gpus-per-node", config.gpus_per_node),
        ("time", config.time),
        ("partition", config.partition),
        ("account", config.account),
        ("qos", config.qos),
        ("array", _array(tasks, at_once) if tasks is not None else None),
        ("chdir", chdir),
        ("output", log),
        ("open-mode", "append"),
        ("signal", f"TERM@{_seconds_to_save(config.time)}"),
    ]
    lines = [f"#SBATCH --{name}={_word(value)}" for name, value in wanted if value is not None]
    lines.append("#SBATCH --requeue" if config.max_requeues else "#SBATCH --no-requeue")
    if config.exclusive:
        lines.append("#SBATCH --exclusive")
    lines += [f"#SBATCH {_word(option)}" for option in _split(config.sbatch)]
    return lines


def _container(config: LaunchSlurmConfig, chdir: Path) -> str:
    """Pyxis's options for srun, with a space before them."""
    if not config.container_image:
        return ""
    container = f" --container-image={shlex.quote(config.container_image)}"
    if config.container_mounts:
        container += f" --container-mounts={shlex.quote(config.container_mounts)}"
        if is_mounted(chdir, config.container_mounts):  # else relative paths start at the image's own folder
            container += f" --container-workdir={shlex.quote(str(chdir))}"
    return container


def processes_per_node(config: LaunchSlurmConfig) -> int:
    """--ppn, or its default."""
    return config.ppn or config.gpus_per_node or 1


def is_mounted(path: Path, mounts: str) -> bool:
    """Whether a container with these mounts (SOURCE:TARGET[:FLAGS], …) sees the path."""
    targets = [mount.split(":")[1] for mount in mounts.split(",") if ":" in mount]
    return any(path.is_relative_to(target) for target in targets)


def _array(tasks: Sequence[int], at_once: int | None) -> str:
    return ",".join(map(str, tasks)) + (f"%{at_once}" if at_once else "")


def shell_lines(words: Sequence[str]) -> list[str]:
    """Options for the shell, one with its values on each line."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return lines


def _word(value: object) -> str:
    """As sbatch reads a #SBATCH line: it splits at spaces and takes quotes away."""
    text = str(value)
    if "'" in text or '"' in text or "\\" in text:
        raise UsageError(f"Slurm's #SBATCH lines cannot hold {text!r}: no quotes or backslashes there.")
    return f'"{text}"' if re.search(r"[\s#]", text) else text


def _split(options: str) -> list[str]:
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise UsageError(f"--sbatch {options!r} cannot be read: {error}.") from None
    grouped: list[str] = []
    for word in words:
        if word.startswith("-"):
            grouped.append(word)
        elif grouped and "=" not in grouped[-1]:  # `--mail-type END`
            grouped[-1] += f"={word}" if grouped[-1].startswith("--") else word
        else:
            raise UsageError(f"--sbatch {options!r}: {word!r} belongs to no option.")
    return grouped


def _seconds_to_save(time: str | None) -> int:
    """How long before the end of --time, a limit in Slurm's notation, the processes are told to save.

    Raises:
        UsageError: it is no time.
    """
    if time is None:
        return SAVE_SECONDS
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d\d))?(?::(\d\d))?", time)
    if not match:
        raise UsageError(f"--time {time} is no time limit. 90 are minutes; 1:30:00 are hours; 1-12:00:00 has a day.")
    days, first, second, third = match.groups()
    if days is not None:
        hours, minutes, seconds = int(first), int(second or 0), int(third or 0)
    elif third is not None:
        hours, minutes, seconds = int(first), int(second), int(third)
    else:
        hours, minutes, seconds = 0, int(first), int(second or 0)
    limit = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if not limit:  # 0: none
        return SAVE_SECONDS
    return max(1, min(SAVE_SECONDS, limit // 2))

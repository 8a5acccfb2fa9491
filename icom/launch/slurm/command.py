"""`icom launch slurm`: check, write the script, submit, and say what comes next."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from icom.config.launch import LaunchSlurmConfig
from icom.config.training import to_yaml
from icom.config.trainings import TrainingConfig, split_training
from icom.errors import IcomError, UsageError
from icom.files import make_writable_folder, write_atomically
from icom.launch.launch import count, training_config
from icom.launch.slurm import queue
from icom.launch.slurm.array import Task, common_folder, read_array, split_array
from icom.launch.slurm.follow import follow, follow_array
from icom.launch.slurm.script import is_mounted, job_script, processes_per_node, shell_lines

RESUME = "--resume_from_checkpoint"


def launch_slurm(config: LaunchSlurmConfig) -> None:
    """Submit the job.

    Raises:
        UsageError: options, training options or the array's file are wrong.
        IcomError: there is no Slurm, it does not take the job; with --wait: the job failed, with its exit code.
    """
    kind, options = split_training(config.training_options)
    tasks, at_once, resumes = None, None, False
    if config.array:
        file, at_once = split_array(config.array)
        tasks = read_array(file, config.training_options, config.nodes * processes_per_node(config))
        folder = Path(common_folder(kind, options)).expanduser().absolute()
        for task in tasks:
            check(task.training, config)
    else:
        training = training_config(config.training_options, "icom launch slurm --nodes 3")
        check(training, config)
        resumes = training.resume_from_checkpoint is not None
        folder = Path(training.output_dir).expanduser().absolute()
    if not config.dry_run:
        queue.need_slurm()
    left = None if tasks is None else [task for task in tasks if not task.done]
    if left == []:
        assert tasks is not None
        print(f"icom: all {count(len(tasks), 'run')} of {config.array} are done: nothing was submitted.")
        _report(tasks)
        return
    script = job_script(
        config,
        training=kind,
        options=_option_lines(options, folder if tasks else None, resumes=resumes),
        folder=folder,
        chdir=Path.cwd(),
        cpus_per_task=config.cpus_per_task or all_cpus(config),
        tasks=None if left is None else [task.number for task in left],
        at_once=at_once,
    )
    if config.dry_run:
        print(script, end="")
        return
    make_writable_folder(folder)
    path = folder / "icom.sbatch"
    for task in left or []:
        make_writable_folder(folder / "tasks")
        write_atomically(folder / "tasks" / f"{task.number}.yaml", to_yaml(task.training).encode())
    write_atomically(path, script.encode(), mode=0o755)
    print(f"icom: {queue.test_submission(str(path))}", file=sys.stderr)
    number = queue.submit(str(path))
    _say(config, number, folder, tasks, left)
    if config.wait:
        log = folder / f"slurm-{number}.log"
        code = follow(number, log) if left is None else follow_array(number, len(left))
        if tasks:
            _report(tasks)
        if code:
            raise _Ended(number, code)


class _Ended(IcomError):
    """The job failed; so does this command, with its exit code."""

    def __init__(self, number: str, code: int) -> None:
        super().__init__(f"Job {number} ended with exit code {code}.")
        self.exit_code = code


def check(training: TrainingConfig, config: LaunchSlurmConfig) -> None:
    """Refuse options that cannot work in a job.

    Raises:
        UsageError: names them.
    """
    if training.resume_from_checkpoint not in (None, "latest"):
        raise UsageError(
            f"{RESUME} {training.resume_from_checkpoint}: a job that starts again would go back to it every time. Jobs "
            "go on from the newest checkpoint; copy that one into a new --output_dir to begin with it."
        )
    if training.hub_token:
        raise UsageError("--hub_token would stand in the job's script. Set HF_TOKEN: sbatch passes it on.")
    if config.container_image and config.container_mounts:
        output = Path.cwd() / training.output_dir
        if not is_mounted(output, config.container_mounts):
            raise UsageError(
                f"--output_dir {output} lies in none of the folders that the container sees "
                f"({config.container_mounts}): what is learned would be lost with it."
            )


def _option_lines(options: Sequence[str], array: Path | None, *, resumes: bool) -> list[str]:
    """The training's options for the script, which goes on from what is there; `resumes`: they say so themselves."""
    resume = f"{RESUME} latest"
    if array:
        return [f'--config {shlex.quote(str(array / "tasks"))}/"$SLURM_ARRAY_TASK_ID".yaml', resume]
    return [*shell_lines(options), *([] if resumes else [resume])]


def all_cpus(config: LaunchSlurmConfig) -> int | None:
    """Of the smallest node, for each of its processes."""
    if config.dry_run and shutil.which("sinfo") is None:
        return None
    cpus = queue.cpus_of_smallest_node(config.partition)
    return max(1, cpus // processes_per_node(config)) if cpus else None


def _say(
    config: LaunchSlurmConfig, number: str, folder: Path, tasks: list[Task] | None, left: list[Task] | None
) -> None:
    what = f"{count(config.nodes, 'node')}, {count(config.nodes * processes_per_node(config), 'process', 'processes')}"
    if tasks is not None and left is not None:
        done = len(tasks) - len(left)
        what = f"{count(len(left), 'run')} on {what} each" + (f"; {done} are done already" if done else "")
    log = folder / (f"slurm-{number}_*.log" if left is not None else f"slurm-{number}.log")
    again = f"sbatch {shlex.quote(str(folder / 'icom.sbatch'))}"
    print(
        f"icom: job {number} ({what})\n"
        f"  log:    tail -F {shlex.quote(str(log)) if left is None else log}\n"
        f"  state:  squeue --job {number}" + (f"; icom report {shlex.quote(str(folder))}" if left else "") + "\n"
        f"  stop:   scancel {number} (it saves; to go on: {again})",
        flush=True,
    )


def _report(tasks: list[Task]) -> None:
    from icom.commands.report import show_outcomes
    from icom.training.outcome import read_outcome

    print()
    show_outcomes([read_outcome(Path(task.training.output_dir).expanduser()) for task in tasks])

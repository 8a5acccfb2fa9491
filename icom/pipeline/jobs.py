"""The stages as Slurm's jobs: an array for the parts of each, which waits for the one before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from icom.config.finetune import FinetuneConfig
from icom.config.pipeline import PipelineConfig, Stage, StageName, to_numbers
from icom.config.training import to_yaml
from icom.config.trainings import training_of_options
from icom.errors import IcomError
from icom.files import make_writable_folder, write_atomically
from icom.launch.slurm import queue
from icom.launch.slurm.command import all_cpus, check
from icom.launch.slurm.script import job_script, parts_script, shell_lines
from icom.pipeline.plan import FILE, Plan

_JOBS = "jobs.json"
"""Numbers of the jobs that were submitted last."""


def show(stages: Mapping[StageName, Stage], todo: Plan, root: Path) -> str:
    """The scripts, for --dry_run."""
    asks = shutil.which("sinfo") is not None
    scripts = [
        (_path(stages[name], root), _script(stages[name], parts, root, asks=asks)) for name, parts in todo.items()
    ]
    return "\n".join(f"# {path}\n{script}" for path, script in scripts)


def need_none_queued(root: Path) -> None:
    """See that no job of an earlier submission is to write to the same folder.

    Raises:
        IcomError: there is one, or there is no Slurm here.
    """
    queue.need_slurm()
    for name, number in _submitted(root).items():
        if any(not job.ended for job in queue.look_up(number)):
            raise IcomError(
                f"Job {number} ({name}) of this pipeline is in the queue: wait for its end, or scancel {number}."
            )


def submit(config: PipelineConfig, stages: Mapping[StageName, Stage], todo: Plan, root: Path) -> None:
    """Write the scripts, ask whether Slurm would take them, and submit them.

    Raises:
        UsageError: options of Slurm or of the training that cannot work in a job.
        IcomError: Slurm does not take a job.
    """
    paths = {}
    for name, parts in todo.items():
        stage = stages[name]
        script = _script(stage, parts, root, asks=True)
        paths[name] = _path(stage, root)
        make_writable_folder(paths[name].parent)
        make_writable_folder(_folder(root))
        if isinstance(stage.options, FinetuneConfig):
            write_atomically(_folder(root) / "train.yaml", to_yaml(stage.options).encode(), "output_dir")
        write_atomically(paths[name], script.encode(), "output_dir", mode=0o755)
    for path in paths.values():
        queue.test_submission(str(path))
    numbers: dict[str, str] = {}
    for name, path in paths.items():
        before = list(numbers.values())
        numbers[name] = queue.submit(str(path), after=before[-1] if before else None)
        write_atomically(_folder(root) / _JOBS, json.dumps(numbers).encode(), "output_dir")
        stage = stages[name]
        what = f"parts {to_numbers(todo[name])} of {stage.parts}" if stage.parts > 1 else name
        after = f", after {before[-1]}" if before else ""
        print(f"icom: job {numbers[name]}: {name}" + (f", {what}" if what != name else "") + after)
    print(
        f"  state:  icom data pipeline {config.file} --state; squeue\n"
        f"  stop:   scancel {' '.join(numbers.values())} (to go on: the same command again)",
        flush=True,
    )


def _folder(root: Path) -> Path:
    """Of what jobs are started with, and of the logs."""
    return root.absolute() / "slurm"


def _path(stage: Stage, root: Path) -> Path:
    """Where a stage's script lies."""
    if isinstance(stage.options, FinetuneConfig):  # as `icom launch slurm` has it
        return Path(stage.options.output_dir).expanduser().absolute() / "icom.sbatch"
    return _folder(root) / f"{stage.name}.sbatch"


def _script(stage: Stage, parts: list[int], root: Path, *, asks: bool) -> str:
    """A stage's script.

    Args:
        stage: of it.
        parts: that are to be done.
        root: output_dir of the pipeline.
        asks: whether there is a Slurm to ask for the nodes' CPUs.
    """
    options, slurm, folder = stage.options, stage.slurm, _folder(root)
    # Encoders and training compute with all CPUs of a node, if nothing else is said.
    computes = stage.name in ("precompute", "train")
    cpus = slurm.cpus_per_task or (all_cpus(slurm) if computes and asks else None)
    if isinstance(options, FinetuneConfig):
        check(options, slurm)
        words = ["--config", str(folder / "train.yaml"), "--resume_from_checkpoint", "latest"]
        return job_script(
            slurm,
            training=training_of_options(options),
            options=shell_lines(words),
            folder=_path(stage, root).parent,
            chdir=Path.cwd(),
            cpus_per_task=cpus,
            tasks=None,
            at_once=None,
        )
    return parts_script(
        slurm,
        name=stage.name,
        words=["data", "pipeline", str(root.absolute() / FILE), "--stage", stage.name],
        folder=folder,
        chdir=Path.cwd(),
        cpus_per_task=cpus,
        tasks=parts,
        at_once=stage.at_once,
    )


def _submitted(root: Path) -> dict[str, str]:
    """Stage -> number of the job that was submitted for it."""
    try:
        return {str(name): str(number) for name, number in json.loads((_folder(root) / _JOBS).read_text()).items()}
    except (OSError, ValueError, AttributeError):
        return {}
